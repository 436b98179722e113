"""Activations with a bias in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_kernels.functional import gradients_of

__all__ = ["activate", "bias_activation", "bias_activation_backward", "working"]


def working(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a reference computes in: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation alone, in the dtype of ``x``."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return F.silu(x) if activation == "silu" else F.relu(x)


def bias_activation(x: Tensor, bias: Tensor | None, activation: str, /) -> Tensor:
    """See :func:`ds_kernels.ops.bias_activation.bias_activation`."""
    work = working(x.dtype)
    inner = x.to(work) if bias is None else x.to(work) + bias.to(work)
    return activate(inner, activation).to(x.dtype)


def bias_activation_backward(
    grad: Tensor, x: Tensor, bias: Tensor | None, activation: str, with_bias: bool, /
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``x`` and ``bias``; the second is None unless ``with_bias``."""
    grad_x, grad_bias = gradients_of(
        lambda a, b: bias_activation(a, b, activation), (x, bias), grad, (True, with_bias)
    )
    return grad_x, grad_bias
