"""The Newton-Schulz iteration against singular values, and how matrices find their owners."""

from __future__ import annotations

import pytest
import torch

from ds_zero.optim.muon import orthogonalize
from ds_zero.optim.owners import assign_owners


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("shape", [(6, 6), (4, 50), (50, 4), (3, 8, 5), (1, 7), (7, 1), (1, 1)])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_singular_values_come_near_one(shape: tuple[int, ...], method: str, size: float) -> None:
    """The polynomial of degree 5, five times, on the singular values alone, to 1e-4."""
    torch.manual_seed(sum(shape))
    matrix = size * torch.randn(shape)
    found = orthogonalize(matrix, 5, method)
    assert found.shape == matrix.shape and found.is_contiguous()
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / s.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    wanted = (u * s.unsqueeze(-2)) @ vt
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
    large = s[..., :1]
    assert (large > 0.65).all() and (large < 1.3).all()


@pytest.mark.parametrize("method", ["standard", "gram"])
def test_zero_stays_zero(method: str) -> None:
    """A matrix without a gradient does not become NaN."""
    assert not orthogonalize(torch.zeros(3, 5), 5, method).any()


@pytest.mark.parametrize("steps", [1, 2, 3, 8])
def test_methods_agree_for_any_number_of_steps(steps: int) -> None:
    """Algebraically the same; 1e-3 after 8 steps in fp32."""
    matrix = torch.randn(5, 30, generator=torch.Generator().manual_seed(1))
    standard, gram = (orthogonalize(matrix, steps, m) for m in ("standard", "gram"))
    torch.testing.assert_close(gram, standard, rtol=1e-3, atol=1e-3)


def test_owners_share_the_work() -> None:
    """The costliest jobs first; never more than 4/3 of the best, here the mean or the largest."""
    generator = torch.Generator().manual_seed(0)
    for num_ranks in (1, 2, 3, 8):
        for count in (0, 1, 5, 40):
            costs = (torch.rand(count, generator=generator) ** 3 * 100).tolist()
            owners = assign_owners(costs, num_ranks)
            assert len(owners) == count and all(0 <= owner < num_ranks for owner in owners)
            loads = [0.0] * num_ranks
            for cost, owner in zip(costs, owners, strict=True):
                loads[owner] += cost
            least = max([sum(costs) / num_ranks, *costs[:0], *(costs and [max(costs)])])
            # Two of the num_ranks + 1 largest jobs share a rank.
            ordered = sorted(costs, reverse=True)
            if count > num_ranks:
                least = max(least, ordered[num_ranks - 1] + ordered[num_ranks])
            assert max(loads) <= least * 4 / 3 + 1e-9
