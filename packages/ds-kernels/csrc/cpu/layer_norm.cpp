#include "cpu/norm.h"

namespace ds::DS_ISA {

void layer_norm(const Norm& a) { norm_forward<true>(a); }

void layer_norm_backward(const NormBackward& a) { norm_backward<true>(a); }

}  // namespace ds::DS_ISA
