#include "cuda/norm.h"

namespace ds::cuda {

void rms_norm(const Norm& a, int device, void* stream) { norm_forward<false>(a, device, stream); }

void rms_norm_backward(const NormBackward& a, int device, void* stream) {
  norm_backward<false>(a, device, stream);
}

}  // namespace ds::cuda
