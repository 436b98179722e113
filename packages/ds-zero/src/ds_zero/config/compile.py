"""``compile``: the compiler's keys, of which ``engine.compile()`` leaves little to choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from ds_comm.config import (
    Contradiction,
    Flag,
    KeyRules,
    NoEffect,
    NotYet,
    ProblemKind,
    Section,
    Strings,
    Whole,
)

__all__ = ["CompileSection"]

_OUTSIDE = NoEffect("gathers and reductions stay outside of the compiled blocks")
_ALWAYS = NoEffect("the next unit is always gathered while one computes")
_SYNC = NotYet(
    "leave it false; DS_VERIFY_COLLECTIVES=1 checks every collective", switch="deepcompile"
)
_PASSES = {
    "z1": None,
    "z3": None,
    "autosp": "leave it out, there is no sequence parallelism by the compiler",
    "autotp": "leave it out, there is no tensor parallelism by the compiler",
}


class CompileSection(Section):
    """``compile``: compiling the model.  ``engine.compile()`` compiles block by block.

    The keys are those of a compiler that works on the graph of the whole model with the
    collectives in it, and are read only with ``deepcompile``.  Here the stage does what its passes
    do.
    """

    key_rules: ClassVar[KeyRules] = KeyRules(switch="deepcompile")

    deepcompile: Annotated[Flag, _OUTSIDE] = False
    """Put gathers and reductions into the graph of the whole model."""
    passes: Strings | None = None
    """Passes over that graph: "z1" and "z3" are what the stage does anyway."""
    free_activation: Annotated[Flag, NoEffect("the compiler frees what backward does not need")] = (
        False
    )
    """Free large activations as soon as they are not needed."""
    free_activation_threshold: Annotated[
        Whole, Field(ge=0), NoEffect("the compiler frees what backward does not need")
    ] = 10 * 1024 * 1024
    """Bytes from which on an activation is large."""
    double_buffer: Annotated[Flag, _ALWAYS] = True
    """Gather into a second buffer while the first is in use."""
    keep_int_input_tensors: Annotated[
        Flag, NoEffect("inputs live as long as autograd needs them")
    ] = True
    """Keep integer inputs of the graph for backward."""
    keep_all_input_tensors: Annotated[
        Flag, NoEffect("inputs live as long as autograd needs them")
    ] = False
    """Keep all inputs of the graph for backward."""
    offload_activation: Annotated[
        Flag,
        NotYet(
            'checkpoint the blocks, with "activation_checkpointing.cpu_checkpointing"',
            switch="deepcompile",
        ),
    ] = False
    """Move activations to the host between forward and backward."""
    offload_activation_pin_memory: Annotated[
        Flag, NoEffect("activations are not moved by the compiler")
    ] = True
    """Use page-locked memory for them."""
    offload_opt_states: Annotated[
        Flag,
        NotYet(
            'leave it false, or write "zero_optimization.offload_optimizer"', switch="deepcompile"
        ),
    ] = False
    """Move optimiser states to the host during forward and backward."""
    offload_parameters: Annotated[
        Flag,
        NotYet('leave it false, or write "zero_optimization.offload_param"', switch="deepcompile"),
    ] = False
    """Move parameter shards to the host."""
    symmetric_memory: Annotated[
        Flag,
        NotYet("leave it false: collectives use the backend's own memory", switch="deepcompile"),
    ] = False
    """Gather through symmetric memory of the devices."""
    debug_log: Annotated[
        Flag, NotYet('set TORCH_LOGS, e.g. "graph_code"', switch="deepcompile")
    ] = False
    """Log the graphs."""
    sync_before_reduce: Annotated[Flag, _SYNC] = False
    """Synchronise the device before every reduction."""
    sync_after_reduce: Annotated[Flag, _SYNC] = False
    """Synchronise the device after every reduction."""
    sync_before_allgather: Annotated[Flag, _SYNC] = False
    """Synchronise the device before every gather."""
    sync_after_allgather: Annotated[Flag, _SYNC] = False
    """Synchronise the device after every gather."""

    def contradictions(self) -> Iterator[Contradiction]:
        """Passes that do not exist here."""
        for name in self.passes or () if self.deepcompile else ():
            if name not in _PASSES:
                yield Contradiction(
                    "passes",
                    f'there is no pass "{name}"; "z1" and "z3" are accepted',
                    ("passes", "deepcompile"),
                    ProblemKind.MALFORMED,
                )
            elif _PASSES[name] is not None:
                yield Contradiction(
                    "passes",
                    f'"{name}" is not available yet in this version: {_PASSES[name]}',
                    ("passes", "deepcompile"),
                    ProblemKind.UNAVAILABLE,
                )
