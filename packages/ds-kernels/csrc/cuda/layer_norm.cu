#include "cuda/norm.h"

namespace ds::cuda {

void layer_norm(const Norm& a, int device, void* stream) { norm_forward<true>(a, device, stream); }

void layer_norm_backward(const NormBackward& a, int device, void* stream) {
  norm_backward<true>(a, device, stream);
}

}  // namespace ds::cuda
