"""``engine.gathered()``: one gather for many forwards, and training as if it had not been."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from twin import check_released, engine_of, square
from zoo import Stack

import ds_zero
from ds_comm.collectives import RecordingCollectives
from ds_comm.errors import EditError, EngineError
from ds_comm.testing.plugin import Ranks


def _stack() -> nn.Module:
    torch.manual_seed(11)
    return Stack()


def _recording(engine: ds_zero.Engine) -> RecordingCollectives:
    recorder = RecordingCollectives(engine.core.collectives)
    engine.core.residency._collectives = recorder
    return recorder


def _counts(stage: int) -> None:
    """Five forwards cost one gather a unit; the results and the next step have the same bits."""
    engine = engine_of(_stack(), stage)
    twin = engine_of(_stack(), stage)
    recorder = _recording(engine)
    units = sum(unit.releasable for unit in engine.core.units)
    assert (units > 3) == (stage == 3)
    with engine.gathered() as outside, torch.no_grad():
        assert outside == 0
        found = [square(engine, step) for step in range(5)]
    assert len(recorder.calls) == sum(
        len(unit.runs) for unit in engine.core.units if unit.releasable
    )
    check_released(engine)
    with torch.no_grad():
        assert all(torch.equal(square(twin, step), value) for step, value in enumerate(found))
    for each in (engine, twin):
        each.backward(square(each, each.data_group.rank))
        each.step()
    state, wanted = engine.module_state_dict(), twin.module_state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_many_forwards_cost_one_gather(ranks: Ranks, world: int, stage: int) -> None:
    ranks(world, _counts, stage)


def _budget() -> None:
    """What does not fit is gathered for each use; nothing but the budget is kept."""
    engine = engine_of(_stack(), 3)
    sizes = [
        sum(run.flat.numel() * 4 for run in unit.runs)
        for unit in engine.core.units
        if unit.releasable
    ]
    with torch.no_grad():
        wanted = square(engine, 0)
        for budget in (0, min(sizes), sum(sizes) - 1, sum(sizes)):
            with engine.gathered(max_bytes=budget) as outside:
                held = sum(
                    sum(run.flat.numel() * 4 for run in unit.runs)
                    for unit in engine.core.units
                    if unit.held
                )
                assert held <= budget
                assert (outside == 0) == (budget >= sum(sizes))
                assert torch.equal(square(engine, 0), wanted)
            assert not any(unit.held for unit in engine.core.units)
    with pytest.raises(EngineError, match="max_bytes=-1"):
        with engine.gathered(max_bytes=-1):
            pass


def test_a_budget_of_bytes(ranks: Ranks) -> None:
    ranks(2, _budget)


def _lengths() -> None:
    """Ranks run different numbers of forwards: rank 1 three times as many."""
    engine = engine_of(_stack(), 3)
    with engine.gathered(), torch.no_grad():
        for step in range(2 + 4 * engine.data_group.rank):
            square(engine, step)
    engine.backward(square(engine, 0))
    engine.step()
    check_released(engine)


def test_ranks_may_run_different_numbers_of_forwards(ranks: Ranks) -> None:
    ranks(2, _lengths)


def _misuse() -> None:
    engine = engine_of(_stack(), 3)
    weight = engine.module.inp.weight
    with pytest.raises(EditError, match="'inp.weight' was written to"):
        with engine.gathered(), torch.no_grad():
            weight.zero_()
    check_released(engine)
    with pytest.raises(KeyError):
        with engine.gathered():
            raise KeyError
    check_released(engine)
    engine.backward(square(engine, 0))
    with engine.gathered(), pytest.raises(EngineError, match=r"step\(\) inside of a context"):
        engine.step()
    engine.step()
    with engine.gathered(), engine.gathered(), torch.no_grad():
        square(engine, 0)
    check_released(engine)
    with pytest.raises(EngineError, match="Linear belongs to no engine"):
        with ds_zero.unwrap_model_for_generation(nn.Linear(2, 2)):
            pass
    state = engine.module_state_dict()
    with engine.gathered():
        ds_zero.safe_set_full_fp32_param(weight, torch.ones(4, 4))
        assert bool((weight == 1).all())
    assert not torch.equal(engine.module_state_dict()["inp.weight"], state["inp.weight"])


def test_edits_exceptions_steps_and_nesting(ranks: Ranks) -> None:
    ranks(2, _misuse)


def _gradients() -> None:
    """A backward inside of the context, with the step after it, is as one outside."""
    engine, twin = engine_of(_stack(), 3), engine_of(_stack(), 3)
    with engine.gathered():
        engine.backward(square(engine, 0))
    twin.backward(square(twin, 0))
    engine.step()
    twin.step()
    state, wanted = engine.module_state_dict(), twin.module_state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_backward_inside(ranks: Ranks) -> None:
    ranks(2, _gradients)


def _generate() -> None:
    """Hugging Face ``generate``, greedy: the tokens of plain torch, of a length by rank."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=33, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model: Any = transformers.LlamaForCausalLM(config).eval()
    ids = torch.arange(4)[None] + 2
    length = 3 if torch.distributed.get_rank() == 0 else 9
    options = {"max_new_tokens": length, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(ids, **options)
    engine = engine_of(model, 3)
    recorder = _recording(engine)
    with ds_zero.unwrap_model_for_generation(engine) as inner:
        assert inner is model
        assert torch.equal(inner.generate(ids, **options), wanted)
    assert len(recorder.calls) == sum(len(u.runs) for u in engine.core.units if u.releasable)
    model.train()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def test_generate(ranks: Ranks) -> None:
    ranks(2, _generate)
