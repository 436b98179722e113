"""Command-line arguments that scripts written for DeepSpeed add to their parser."""

from __future__ import annotations

from argparse import ArgumentParser

__all__ = ["add_config_arguments"]


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a parser.

    Args:
        parser: Any argparse parser; changed in place.

    Returns:
        The same parser.
    """
    group = parser.add_argument_group("DeepSpeed", "configuration of the training engine")
    group.add_argument(
        "--deepspeed", action="store_true", help="train with the engine (read by the script)"
    )
    group.add_argument(
        "--deepspeed_config", type=str, default=None, metavar="PATH", help="the ds_config JSON file"
    )
    return parser
