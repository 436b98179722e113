"""Block layouts against rules written out block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_kernels.sparsity import (
    BigBirdSparsity,
    DenseSparsity,
    FixedSparsity,
    LocalSparsity,
    LongformerSparsity,
    Sparsity,
    VariableSparsity,
)

RULES: list[tuple[Sparsity, Callable[[int, int, int], bool]]] = [
    (DenseSparsity(num_heads=2, block=4), lambda h, q, k: True),
    (
        FixedSparsity(num_heads=2, block=4, num_local_blocks=4, attention="unidirectional"),
        lambda h, q, k: k <= q and (q // 4 == k // 4 or k % 4 == 3),
    ),
    (
        FixedSparsity(
            num_heads=4,
            block=4,
            num_local_blocks=4,
            num_different_global_patterns=4,
            horizontal_global_attention=True,
        ),
        lambda h, q, k: q // 4 == k // 4 or k % 4 == 3 - h or q % 4 == 3 - h,
    ),
    (
        FixedSparsity(num_heads=1, block=4, num_local_blocks=4, num_global_blocks=2),
        lambda h, q, k: q // 4 == k // 4 or k % 4 >= 2,
    ),
    (
        VariableSparsity(
            num_heads=2,
            block=4,
            local_window_blocks=(1, 3),
            global_block_indices=(2, 5),
            global_block_end_indices=(4, 6),
        ),
        lambda h, q, k: (q + 2) // 3 == (k + 2) // 3 or k in (2, 3, 5),
    ),
    (
        LongformerSparsity(num_heads=2, block=4, global_block_indices=(1, 99)),
        lambda h, q, k: abs(q - k) <= 1 or q == 1 or k == 1,
    ),
    (
        LocalSparsity(num_heads=1, block=4, num_sliding_window_blocks=5),
        lambda h, q, k: 0 <= q - k <= 2,
    ),
    (
        BigBirdSparsity(num_heads=2, block=4, num_random_blocks=0, num_global_blocks=2),
        lambda h, q, k: abs(q - k) <= 1 or q < 2 or k < 2,
    ),
]


@pytest.mark.parametrize(("sparsity", "rule"), RULES, ids=lambda v: type(v).__name__)
def test_layouts_follow_their_rule(
    sparsity: Sparsity, rule: Callable[[int, int, int], bool]
) -> None:
    count = 10
    layout = sparsity.make_layout(4 * count)
    expected = [
        [[rule(h, q, k) for k in range(count)] for q in range(count)]
        for h in range(sparsity.num_heads)
    ]
    assert layout.tolist() == expected


@pytest.mark.parametrize("attention", ["unidirectional", "bidirectional"])
def test_random_blocks_are_many_enough_reproducible_and_differ_by_head(attention: Any) -> None:
    sparsity = BigBirdSparsity(
        num_heads=3, block=2, num_random_blocks=3, num_sliding_window_blocks=1,
        num_global_blocks=0, attention=attention,
    )  # fmt: skip
    layout = sparsity.make_layout(40)
    assert torch.equal(layout, sparsity.make_layout(40))
    assert not torch.equal(layout[0], layout[1])
    rows = layout.sum(-1)
    # Three random blocks and the diagonal, which may be one of them; fewer where fewer come before.
    allowed = torch.arange(1, 21) if attention == "unidirectional" else torch.full((20,), 20)
    assert (rows >= allowed.clamp(max=3)).all() and (rows <= allowed.clamp(max=4)).all()
    if attention == "unidirectional":
        assert not layout.triu(1).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseSparsity(num_heads=0), "num_heads=0"),
        (lambda: DenseSparsity(num_heads=1, attention="sideways"), "sideways"),
        (lambda: DenseSparsity(num_heads=1, block=16).make_layout(17), "no multiple"),
        (lambda: FixedSparsity(num_heads=1, num_local_blocks=4, num_global_blocks=3), "multiple"),
        (lambda: FixedSparsity(num_heads=1, num_different_global_patterns=5), "1 to 4"),
        (
            lambda: FixedSparsity(
                num_heads=1, attention="unidirectional", horizontal_global_attention=True
            ),
            "bidirectional",
        ),
        (lambda: VariableSparsity(num_heads=1, local_window_blocks=()), "local_window_blocks"),
        (
            lambda: LongformerSparsity(num_heads=1, global_block_end_indices=(0,)),
            "global_block_end_indices",
        ),
        (lambda: BigBirdSparsity(num_heads=1).make_layout(32), "only 2 blocks"),
    ],
)
def test_bad_descriptions_are_explained(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
