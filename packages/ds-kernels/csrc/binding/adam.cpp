#include "kernels/adam.h"

#include <cmath>

#include "binding/call.h"

namespace ds {
namespace {

struct Step {
  int64_t step;
  double lr, beta1, beta2, eps, weight_decay;
  bool adamw, bias_correction;
  double grad_scale;
};

AdamCoefficients coefficients(const Step& s) {
  if (s.step < 1) throw ArgumentError("step", "is " + std::to_string(s.step) + ", it counts from 1");
  check_range("lr", s.lr, 0, kInfinity);
  check_range("beta1", s.beta1, 0, 1);
  check_range("beta2", s.beta2, 0, 1);
  check_range("eps", s.eps, 0, kInfinity);
  check_range("weight_decay", s.weight_decay, 0, kInfinity);
  const double count = static_cast<double>(s.step);
  const double correction1 = s.bias_correction ? 1 - std::pow(s.beta1, count) : 1;
  const double correction2 = s.bias_correction ? 1 - std::pow(s.beta2, count) : 1;
  AdamCoefficients c;
  c.grad_scale = static_cast<float>(s.grad_scale);
  c.l2 = s.adamw ? 0.0f : static_cast<float>(s.weight_decay);
  c.decay = s.adamw ? static_cast<float>(1 - s.lr * s.weight_decay) : 1.0f;
  c.rest1 = static_cast<float>(1 - s.beta1);
  c.beta2 = static_cast<float>(s.beta2);
  c.rest2 = static_cast<float>(1 - s.beta2);
  c.inverse_root2 = static_cast<float>(1 / std::sqrt(correction2));
  c.eps = static_cast<float>(s.eps);
  c.step_size = static_cast<float>(s.lr / correction1);
  return c;
}

AdamSegment segment(const Tensor& param, const Tensor& grad, const Tensor& exp_avg,
                    const Tensor& exp_avg_sq, const Tensor& out, const Tensor& undo) {
  check_float(param);
  check_float(grad);
  check_dtype(exp_avg, {DType::f32, DType::bf16});
  check_same_dtype(exp_avg_sq, exp_avg);
  check_contiguous(param);
  for (const Tensor* t : {&grad, &exp_avg, &exp_avg_sq, &out}) {
    if (!*t) continue;
    check_numel(*t, param.numel);
    check_contiguous(*t);
    check_same_device(*t, param);
  }
  if (out) check_float(out);
  if (undo) {
    check_dtype(undo, {DType::f32});
    check_numel(undo, 3 * param.numel);
    check_contiguous(undo);
    check_same_device(undo, param);
  }
  check_no_overlap(param, {&grad, &exp_avg, &exp_avg_sq, &out, &undo});
  check_no_overlap(exp_avg, {&grad, &exp_avg_sq, &out, &undo});
  check_no_overlap(exp_avg_sq, {&grad, &out, &undo});
  check_no_overlap(out, {&grad, &undo});
  check_no_overlap(undo, grad);
  return {param.numel,     param.data, grad.data, exp_avg.data,
          exp_avg_sq.data, out.data,   undo.as<float>()};
}

void run(const std::vector<AdamSegment>& segments, const AdamTypes& types,
         const AdamCoefficients& c, const Tensor& first) {
  const auto count = static_cast<int64_t>(segments.size());
  if (first.is_cuda()) {
    DS_CUDA_CALL(adam, first, segments.data(), count, types, c);
  } else {
    int64_t numel = 0;
    for (const AdamSegment& s : segments) numel += s.numel;
    const ReleaseGil release(numel);
    DS_CPU(adam)(segments.data(), count, types, c);
  }
}

void adam_(py::handle param_, py::handle grad_, py::handle exp_avg_, py::handle exp_avg_sq_,
           int64_t step, double lr, double beta1, double beta2, double eps, double weight_decay,
           bool adamw, bool bias_correction, double grad_scale, py::handle out_, py::handle undo_) {
  const Tensor param = borrow(param_, "param"), grad = borrow(grad_, "grad");
  const Tensor exp_avg = borrow(exp_avg_, "exp_avg");
  const Tensor exp_avg_sq = borrow(exp_avg_sq_, "exp_avg_sq");
  const Tensor out = borrow_optional(out_, "out"), undo = borrow_optional(undo_, "undo");
  const AdamCoefficients c = coefficients(
      {step, lr, beta1, beta2, eps, weight_decay, adamw, bias_correction, grad_scale});
  const AdamSegment s = segment(param, grad, exp_avg, exp_avg_sq, out, undo);
  run({s}, {param.dtype, grad.dtype, exp_avg.dtype, out.dtype}, c, param);
}

// Optional lists are None or as long as the parameters'.
std::vector<Tensor> optional_list(py::handle list, const char* name, size_t count) {
  if (list.is_none()) return std::vector<Tensor>(count);
  std::vector<Tensor> tensors = borrow_list(list, name);
  check_count(name, tensors.size(), count);
  return tensors;
}

void adam_list_(py::handle params_, py::handle grads_, py::handle exp_avgs_, py::handle exp_avg_sqs_,
                int64_t step, double lr, double beta1, double beta2, double eps,
                double weight_decay, bool adamw, bool bias_correction, double grad_scale,
                py::handle outs_, py::handle undos_) {
  const auto params = borrow_list(params_, "params"), grads = borrow_list(grads_, "grads");
  const auto exp_avgs = borrow_list(exp_avgs_, "exp_avgs");
  const auto exp_avg_sqs = borrow_list(exp_avg_sqs_, "exp_avg_sqs");
  check_count("grads", grads.size(), params.size());
  check_count("exp_avgs", exp_avgs.size(), params.size());
  check_count("exp_avg_sqs", exp_avg_sqs.size(), params.size());
  const auto outs = optional_list(outs_, "outs", params.size());
  const auto undos = optional_list(undos_, "undos", params.size());
  const AdamCoefficients c = coefficients(
      {step, lr, beta1, beta2, eps, weight_decay, adamw, bias_correction, grad_scale});
  if (params.empty()) return;
  std::vector<AdamSegment> segments;
  segments.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    check_same_dtype(params[i], params[0]);
    check_same_dtype(grads[i], grads[0]);
    check_same_dtype(exp_avgs[i], exp_avgs[0]);
    if (outs[i]) check_same_dtype(outs[i], outs[0]);
    check_same_device(params[i], params[0]);
    segments.push_back(
        segment(params[i], grads[i], exp_avgs[i], exp_avg_sqs[i], outs[i], undos[i]));
  }
  run(segments, {params[0].dtype, grads[0].dtype, exp_avgs[0].dtype, outs[0].dtype}, c, params[0]);
}

void adam_bound_(py::handle param_, py::handle grad_, py::handle exp_avg_,
                 py::handle exp_avg_sq_) {
  const Tensor param = borrow(param_, "param"), grad = borrow(grad_, "grad");
  const Tensor exp_avg = borrow(exp_avg_, "exp_avg");
  const Tensor exp_avg_sq = borrow(exp_avg_sq_, "exp_avg_sq");
  for (const Tensor* t : {&param, &grad, &exp_avg, &exp_avg_sq}) {
    check_dtype(*t, {DType::f32});
    check_contiguous(*t);
    check_numel(*t, param.numel);
    check_cpu(*t);
  }
  const ReleaseGil release(param.numel);
  DS_CPU(adam_bound)(param.as<float>(), grad.as<float>(), exp_avg.as<float>(),
                     exp_avg_sq.as<float>(), param.numel);
}

}  // namespace

void bind_adam(py::module_& module) {
  module.def("adam_", &adam_);
  module.def("adam_list_", &adam_list_);
  module.def("adam_bound_", &adam_bound_);
}

}  // namespace ds
