#include "cpu/norm.h"

namespace ds::DS_ISA {

void rms_norm(const Norm& a) { norm_forward<false>(a); }

void rms_norm_backward(const NormBackward& a) { norm_backward<false>(a); }

}  // namespace ds::DS_ISA
