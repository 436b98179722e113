"""One product per group of rows, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["grouped_matmul", "grouped_matmul_weight_grad"]


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def grouped_matmul(x: Tensor, weight: Tensor, bounds: Tensor, transposed: bool, /) -> Tensor:
    """``x[rows of group] @ weight[group]``, one after the other."""
    edges = bounds.tolist()
    parts = [
        _wide(x[begin:end]) @ (_wide(w).T if transposed else _wide(w))
        for begin, end, w in zip(edges, edges[1:], weight.unbind(0), strict=False)
    ]
    columns = weight.shape[1 if transposed else 2]
    whole = torch.cat(parts) if parts else _wide(x).new_zeros(x.shape[0], columns)
    return whole.to(x.dtype)


def grouped_matmul_weight_grad(x: Tensor, grad: Tensor, bounds: Tensor, /) -> Tensor:
    """``x[rows of group].T @ grad[rows of group]``, ``[groups, depth, columns]``."""
    edges = bounds.tolist()
    parts = [
        _wide(x[begin:end]).T @ _wide(grad[begin:end])
        for begin, end in zip(edges, edges[1:], strict=False)
    ]
    if not parts:
        return x.new_zeros(0, x.shape[1], grad.shape[1])
    return torch.stack(parts).to(x.dtype)
