"""Command-line flags for the LR schedules."""

from __future__ import annotations

import argparse

from ds_zero.schedules.build import SCHEDULES
from ds_zero.schedules.factors import WARMUP_KINDS

__all__ = ["add_tuning_arguments"]


def add_tuning_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add one flag per schedule parameter, in a group of their own.

    Flag names equal the keys of ``scheduler.params``; a flag that is not given keeps the default
    of the schedule.

    Args:
        parser: is changed in place.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("learning-rate schedule")
    group.add_argument(
        "--lr_schedule", choices=sorted(SCHEDULES), default=None, help="name of the schedule"
    )
    _add_range_test(group)
    _add_one_cycle(group)
    _add_warmup(group)
    return parser


def _boolean(text: str) -> bool:
    """Read true or false from a flag's value.

    Raises:
        argparse.ArgumentTypeError: it is neither.
    """
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    value = known.get(text.strip().lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"expected true or false, got {text!r}")
    return value


def _add_range_test(group: argparse._ArgumentGroup) -> None:
    """Add the flags of LRRangeTest."""
    group.add_argument("--lr_range_test_min_lr", type=float, default=1e-3, help="first rate")
    group.add_argument(
        "--lr_range_test_step_size", type=int, default=2000, help="iterations per step rate"
    )
    group.add_argument(
        "--lr_range_test_step_rate", type=float, default=1.0, help="growth per step size"
    )
    group.add_argument(
        "--lr_range_test_staircase",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        help="grow in stairs",
    )


def _add_one_cycle(group: argparse._ArgumentGroup) -> None:
    """Add the flags of OneCycle."""
    group.add_argument("--cycle_min_lr", type=float, default=0.01, help="rate at both ends")
    group.add_argument("--cycle_max_lr", type=float, default=0.1, help="rate in the middle")
    group.add_argument("--decay_lr_rate", type=float, default=0.0, help="decay of the rate")
    group.add_argument(
        "--cycle_first_step_size", type=int, default=1000, help="iterations of the first half"
    )
    group.add_argument(
        "--cycle_second_step_size",
        type=int,
        default=None,
        help="iterations of the second half; default: as the first",
    )
    group.add_argument(
        "--cycle_first_stair_count", type=int, default=0, help="stairs of the first half"
    )
    group.add_argument(
        "--cycle_second_stair_count",
        type=int,
        default=None,
        help="stairs of the second half; default: as the first",
    )
    group.add_argument(
        "--decay_step_size", type=int, default=0, help="iterations per unit of decay; 0: no decay"
    )
    group.add_argument(
        "--cycle_momentum",
        type=_boolean,
        nargs="?",
        const=True,
        default=False,
        help="move momentum too",
    )
    group.add_argument("--cycle_min_mom", type=float, default=0.8, help="momentum in the middle")
    group.add_argument("--cycle_max_mom", type=float, default=0.9, help="momentum at both ends")
    group.add_argument("--decay_mom_rate", type=float, default=0.0, help="decay of momentum")


def _add_warmup(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the warm-up schedules."""
    group.add_argument("--warmup_min_lr", type=float, default=0.0, help="rate at the start")
    group.add_argument(
        "--warmup_max_lr",
        type=float,
        default=None,
        help="rate after the warm-up; default: each group's own",
    )
    group.add_argument(
        "--warmup_num_steps", type=int, default=1000, help="iterations of the warm-up"
    )
    group.add_argument(
        "--warmup_type", choices=WARMUP_KINDS, default="log", help="shape of the warm-up"
    )
    group.add_argument(
        "--total_num_steps", type=int, default=None, help="iterations of warm-up and decay"
    )
    group.add_argument(
        "--warmup_min_ratio", type=float, default=0.0, help="WarmupCosineLR: share at the start"
    )
    group.add_argument(
        "--cos_min_ratio", type=float, default=0.0001, help="WarmupCosineLR: share at the end"
    )
