"""Weights and checkpoints of an engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ds_comm.errors import CheckpointError
from ds_zero.checkpoint.folders import normalise_tag
from ds_zero.export import full_state_dict, load_state_dict, save_weights
from ds_zero.gather_once import gathered_units
from ds_zero.persistence import load_engine, save_engine
from ds_zero.readings import EngineReadings

__all__ = ["EngineStorage"]


class EngineStorage(EngineReadings):
    """The verbs that hand out, store and restore an engine's state; all are collective."""

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor]:
        """Return full copies of all parameters and buffers on every rank.  Collective.

        Args:
            exclude_frozen_parameters: Leave out what is not trained.
        """
        return full_state_dict(self.core, exclude_frozen=exclude_frozen_parameters)

    def load_module_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> None:
        """Set parameters and buffers by name, the fp32 masters with them.  Collective.

        Args:
            state_dict: The same full tensors on every rank.
            strict: Refuse missing and unknown names.

        Raises:
            CheckpointError: Names or shapes do not fit.
        """
        load_state_dict(self.core, state_dict, strict=strict)

    def gathered(self, max_bytes: int | None = None) -> AbstractContextManager[int]:
        """Keep parameters gathered over many forwards, for evaluation and generation.

        Collective at the entry; see [Note: gather once] in ``gather_once``.  At stages 0 to 2
        nothing has to be done, and nothing is.

        Example::

            with engine.gathered():
                tokens = engine.module.generate(prompt, max_new_tokens=100)

        Args:
            max_bytes: Bytes that may be kept on this device; None keeps everything.

        Returns:
            A context; it gives the number of units that did not fit.

        Raises:
            EditError: At the exit: a parameter was written to inside of the block.
        """
        return gathered_units(self.core, max_bytes)

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model's weights in their compute dtype from rank 0.  Collective.

        Args:
            save_dir: Folder; made if missing.
            save_filename: ``*.safetensors``, or ``*.bin`` for a torch pickle.
            exclude_frozen_parameters: Leave out what is not trained.

        Returns:
            True, once the file is whole.
        """
        save_weights(self.core, save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write model, optimiser, schedule and data position.  Collective.

        Args:
            save_dir: Folder of all checkpoints of a run.
            tag: Name of this one; ``global_step{N}`` by default.
            client_state: The caller's own values: JSON types and tensors.
            save_latest: Name it in ``latest``.
            exclude_frozen_parameters: Leave out parameters that are not trained.

        Returns:
            True, once the checkpoint is whole and named.

        Raises:
            CheckpointError: It could not be written; earlier checkpoints are untouched.
        """
        if client_state is not None and not isinstance(client_state, Mapping):
            raise CheckpointError(
                f"client_state must be a mapping from names to values, not a "
                f'{type(client_state).__name__}; write {{"mine": value}}'
            )
        name = f"global_step{self.global_steps}" if tag is None else normalise_tag(tag)
        save_engine(
            self,
            save_dir,
            name,
            client_state or {},
            save_latest=save_latest,
            exclude_frozen=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        missing_ok: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Read what any stage and number of ranks saved.  Collective.

        Args:
            load_dir: Folder of all checkpoints of a run.
            tag: Which one; the one named in ``latest`` by default.
            load_module_strict: Refuse missing and unknown parameters.
            load_optimizer_states: Restore the optimiser; otherwise it starts anew.
            load_lr_scheduler_states: Restore the schedule.
            load_module_only: Restore nothing but the weights.
            missing_ok: Return ``(None, None)`` if there is no checkpoint.

        Returns:
            Path of the checkpoint and the client state.

        Raises:
            CheckpointNotFoundError: There is none, and ``missing_ok`` is false.
            CheckpointError: It is damaged or does not fit the model.
        """
        found = load_engine(
            self,
            load_dir,
            tag,
            strict=load_module_strict,
            optimizer=load_optimizer_states and not load_module_only,
            schedule=load_lr_scheduler_states and not load_module_only,
            counters=not load_module_only,
            missing_ok=missing_ok,
        )
        if found[0] is not None:
            self.loaded_checkpoint_tag = os.path.basename(found[0])
        return found
