"""fp16 with loss scaling against GradScaler in one process, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fp16 import PlainFp16, full_masters
from torch import Tensor, nn
from zoo import MODELS

import ds_zero
from ds_comm.errors import EngineError, LossScaleError
from ds_comm.testing.plugin import Ranks
from ds_zero.tensors import tensors_in

STAGES = (0, 1, 2, 3)


def _rank() -> int:
    return torch.distributed.get_rank()


def _world() -> int:
    return torch.distributed.get_world_size()


def _lin() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def _inputs(step: int = 0) -> Tensor:
    """A micro-batch for each of four ranks, fp16."""
    return torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step)).half()


def _square(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).float().square().mean()
    return out


def _engine(stage: int, model: nn.Module | None = None, **extra: Any) -> ds_zero.Engine:
    fp16 = {"enabled": True, "initial_scale_power": 4, **extra.pop("fp16", {})}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "fp16": fp16,
        **extra,
    }
    return ds_zero.initialize(model=model or _lin(), config=config).engine


def _sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def _same(got: dict[str, Tensor], wanted: list[nn.Parameter], tolerance: float) -> None:
    for (name, value), other in zip(got.items(), wanted, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, other.detach(), rtol=tolerance, atol=tolerance, msg=name)


# ---- against torch -----------------------------------------------------------------------------


def _against_grad_scaler(stage: int, accumulation: int, clip: float) -> list[Tensor]:
    """Overflows first (2^20), then clean steps with growth every third one."""
    model = _lin()
    engine = _engine(
        stage,
        model,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clip,
        fp16={"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 3},
    )
    plain = PlainFp16(_lin(), _sgd, scale=2.0**20, window=3, clip=clip)
    skipped = 0
    for step in range(12):
        batches = [_inputs(10 * step + micro)[: _world()] for micro in range(accumulation)]
        assert engine.loss_scale == engine.cur_scale == engine.get_loss_scale()
        assert engine.loss_scale == plain.scaler.get_scale()
        applied = plain.step(_square, [list(batch) for batch in batches])
        for batch in batches:
            loss = _square(engine, batch[_rank()])
            assert engine.backward(loss) is loss
            engine.step()
        skipped += not applied
        assert engine.was_step_applied() == applied
        assert (engine.skipped_steps, engine.global_steps) == (skipped, step + 1)
        norm = engine.get_global_grad_norm()
        assert norm is not None
        if applied:
            assert norm == pytest.approx(plain.norm, rel=2e-3 if stage == 0 else 1e-5)
            assert engine.get_non_finite_gradient() is None
        else:
            assert not torch.isfinite(torch.tensor(norm))
    assert 2 <= skipped <= 8
    masters = full_masters(engine)
    # At stage 0 the averaged gradient is rounded to fp16 once more where nothing accumulates.
    _same(masters, plain.masters, 1e-3 if stage == 0 and accumulation == 1 else 1e-6)
    for value, master in zip(engine.module_state_dict().values(), masters.values(), strict=True):
        assert torch.equal(value, master.half())
    return list(masters.values())


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_equals_grad_scaler(ranks: Ranks, accumulation: int, clip: float) -> None:
    """Masters, norms, scales and skipped steps; stages that shard are bit-identical."""
    found = [ranks(2, _against_grad_scaler, s, accumulation, clip)[0] for s in STAGES]
    equal = [(1, 2), (2, 3)] if accumulation == 1 else [(0, 1), (2, 3)]
    for one, two in equal:
        for a, b in zip(found[one], found[two], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("world", [1, 3])
def test_other_numbers_of_ranks(ranks: Ranks, world: int) -> None:
    ranks(world, _against_grad_scaler, 3, 2, 0.05)


# ---- where the scale enters --------------------------------------------------------------------


class WithLoss(nn.Module):
    """Returns loss and logits, of which the first is computed from the second."""

    def __init__(self) -> None:
        super().__init__()
        self.body = _lin()

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.body(x)
        return {"loss": logits.float().square().mean(), "rest": (logits,)}


def _masters_after(engine: ds_zero.Engine, backward: Any) -> list[Tensor]:
    backward(engine, _inputs()[_rank()])
    engine.step()
    assert engine.was_step_applied()
    return list(full_masters(engine).values())


def _all_ways(stage: int) -> None:
    def by_engine(engine: ds_zero.Engine, x: Tensor) -> None:
        engine.backward(_square(engine, x))

    def by_scale(engine: ds_zero.Engine, x: Tensor) -> None:
        engine.scale(_square(engine, x)).backward()

    def by_torch(engine: ds_zero.Engine, x: Tensor) -> None:
        _square(engine, x).backward()

    def by_gradient(engine: ds_zero.Engine, x: Tensor) -> None:
        out = engine(x)
        out.backward(2 * out.detach() / out.numel())

    wanted = _masters_after(_engine(stage), by_engine)
    for way in (by_scale, by_torch, by_gradient):
        for got, value in zip(_masters_after(_engine(stage), way), wanted, strict=True):
            torch.testing.assert_close(got, value, rtol=1e-3, atol=1e-4)
    # Several outputs: the gradient of the loss passes the logits inside, and is scaled once.

    def of_loss(engine: ds_zero.Engine, x: Tensor) -> None:
        engine(x)["loss"].backward()

    def of_logits(engine: ds_zero.Engine, x: Tensor) -> None:
        engine(x)["rest"][0].float().square().mean().backward()

    def half_each(engine: ds_zero.Engine, x: Tensor) -> None:
        found = engine(x)
        (found["loss"] / 2 + found["rest"][0].float().square().mean() / 2).backward()

    for way in (of_loss, of_logits, half_each):
        got = _masters_after(_engine(stage, WithLoss()), way)
        for value, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stage", STAGES)
def test_every_way_of_calling_backward_does_the_same(ranks: Ranks, stage: int) -> None:
    """``engine.backward``, ``engine.scale().backward()``, ``loss.backward()``; fp16 rounding."""
    ranks(2, _all_ways, stage)


_NOT_IN_FP16 = {
    "weight_norm and orthogonal",  # torch has no QR in fp16 on the CPU
    "sparse matrix",  # nor this product
    "dict outputs",  # its values overflow
    "torch.func.grad",  # not at stage 3
}


def _zoo() -> None:
    for name in sorted(MODELS.keys() - _NOT_IN_FP16):
        found = {}
        for stage, plain in ((1, False), (3, False), (3, True)):
            torch.manual_seed(11)
            engine = _engine(stage, MODELS[name]())
            for step in range(2):
                x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step + 9 * _rank()))
                loss = engine(x.half())
                loss = loss if isinstance(loss, Tensor) else next(iter(tensors_in(loss)))
                loss = loss.float().square().mean()
                loss.backward() if plain else engine.backward(loss)
                engine.step()
            assert engine.skipped_steps == 0, name
            found[stage, plain] = full_masters(engine)
            engine.destroy()
        for key, values in found.items():
            for param, value in values.items():
                assert torch.equal(value, found[1, False][param]), (name, key, param)


@pytest.mark.slow
def test_models_of_every_kind(ranks: Ranks) -> None:
    """Stage 1, stage 3 and stage 3 with ``loss.backward()`` are bit-identical in fp16."""
    ranks(2, _zoo)


def _transformers() -> None:
    """Loss and logits come from one forward; the first is computed from the second."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(_rank()))
    found = []
    for way in ("engine", "loss", "checkpoint", "reentrant"):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        if way in ("checkpoint", "reentrant"):
            options = {"use_reentrant": way == "reentrant"}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
        engine = _engine(3, model, fp16={"initial_scale_power": 10})
        for _ in range(2):
            out = engine(input_ids=tokens, labels=tokens)
            assert type(out).__name__ == "CausalLMOutputWithCrossAttentions"
            assert out["logits"] is out.logits and out.loss is out[0]
            engine.backward(out.loss) if way == "engine" else out.loss.backward()
            engine.step()
        assert engine.was_step_applied()
        found.append(full_masters(engine))
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(other[name], value), name


@pytest.mark.slow
def test_hugging_face_outputs(ranks: Ranks) -> None:
    pytest.importorskip("transformers")
    ranks(2, _transformers)


class Aux(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = _lin()
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body[0](x)
        self.aux = hidden.float().square().mean()
        out: Tensor = self.body[2](torch.relu(hidden))
        return out


def _usage_errors() -> None:
    x = _inputs()[0]
    # A gradient that passes no output of the model.
    engine = _engine(0)
    with pytest.raises(EngineError, match=r"engine\.scale"):
        engine.module[0](x).float().mean().backward()
    with pytest.raises(EngineError, match=r"engine\.scale"):
        engine.module[0].weight.float().square().sum().backward()
    # ... is fine with the scale at the loss.
    engine.scale(engine.module[0](x).float().mean()).backward()
    # A gradient that leaves through an input.
    leaf = x.clone().requires_grad_()
    with pytest.raises(EngineError, match=r"engine\.scale"):
        _square(engine, leaf).backward()
    engine.scale(_square(engine, leaf)).backward()
    assert leaf.grad is not None
    # Scaled twice, or in part.
    with pytest.raises(EngineError, match="plain loss"):
        engine.backward(engine.scale(_square(engine, x)))
    with pytest.raises(EngineError, match="whole loss"):
        loss = engine.scale(_square(engine, x))
        (_square(engine, x) + loss).backward()
    with pytest.raises(EngineError, match="no graph"):
        engine.scale(torch.ones(()))
    with pytest.raises(EngineError, match="no graph"):
        engine.backward(torch.ones(()))
    # After all these errors it trains as a new one does.
    engine.zero_grad()
    got = _masters_after(engine, lambda e, x: e.backward(_square(e, x)))
    wanted = _masters_after(_engine(0), lambda e, x: e.backward(_square(e, x)))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def _unscaled() -> None:
    x = _inputs()[0].float()
    engine = _engine(0, fp16={"enabled": False})
    loss = _square(engine, x)
    assert engine.scale(loss) is loss and engine.loss_scale == 1.0
    engine.scale(loss).backward()
    engine.step()
    assert engine.was_step_applied()


def test_without_scaling_the_loss_stays(ranks: Ranks) -> None:
    ranks(1, _unscaled)


def test_usage_errors(ranks: Ranks) -> None:
    """What hooks cannot scale is an error that names ``engine.scale``, and leaves no trace."""
    ranks(1, _usage_errors)


def _auxiliary_terms(stage: int) -> None:
    """Everything in a scaled loss is scaled, also what passes no output."""
    found = []
    for way in ("backward", "scale"):
        engine = _engine(stage, Aux())
        loss = _square(engine, _inputs()[_rank()]) + engine.module.aux
        if way == "backward":
            engine.backward(loss)
        else:
            engine.scale(loss).backward()
        engine.step()
        found.append(full_masters(engine))
    plain = PlainFp16(Aux(), _sgd, scale=16.0)

    def both(model: nn.Module, x: Tensor) -> Tensor:
        return _square(model, x) + model.aux

    plain.step(both, [list(_inputs()[: _world()])])
    for masters in found:
        _same(masters, plain.masters, 1e-3)


@pytest.mark.parametrize("stage", [0, 3])
def test_auxiliary_terms_of_a_scaled_loss(ranks: Ranks, stage: int) -> None:
    ranks(2, _auxiliary_terms, stage)


def _scale_moves_in_between(stage: int) -> None:
    """Unscaling uses the scale of the backward; two scales in a window are brought to one."""
    wanted = PlainFp16(_lin(), _sgd, scale=16.0)
    wanted.step(_square, [list(_inputs()[: _world()])])
    engine = _engine(stage)
    assert engine.core.scaler is not None
    engine.backward(_square(engine, _inputs()[_rank()]))
    engine.core.scaler.load_state_dict({"scale": 1024.0, "clean_steps": 0, "tolerance": 1})
    engine.step()
    assert engine.loss_scale == 1024.0
    _same(full_masters(engine), wanted.masters, 1e-3)
    wanted = PlainFp16(_lin(), _sgd, scale=16.0)
    wanted.step(_square, [list(_inputs(step)[: _world()]) for step in range(2)])
    engine = _engine(stage, gradient_accumulation_steps=2)
    assert engine.core.scaler is not None
    engine.backward(_square(engine, _inputs(0)[_rank()]))
    engine.step()
    engine.core.scaler.load_state_dict({"scale": 1024.0, "clean_steps": 0, "tolerance": 1})
    engine.backward(_square(engine, _inputs(1)[_rank()]))
    engine.step()
    _same(full_masters(engine), wanted.masters, 1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_the_scale_may_move_between_backward_and_step(ranks: Ranks, stage: int) -> None:
    ranks(2, _scale_moves_in_between, stage)


def _several_engines() -> None:
    """A generator and a critic with different scales; gradients of one pass through the other."""
    generator = _engine(2, nn.Linear(4, 4), fp16={"initial_scale_power": 6})
    critic = _engine(1, nn.Linear(4, 3), fp16={"initial_scale_power": 3})
    x = _inputs()[_rank()]
    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    for engine, layer in zip((generator, critic), reference, strict=True):
        layer.load_state_dict({k: v.float() for k, v in engine.module_state_dict().items()})
    torch.distributed.broadcast(reference[0].weight.data, 0)
    fake = generator(x)
    with pytest.raises(EngineError, match=r"engine\.scale"):
        critic(fake).float().square().mean().backward()
    generator.backward(critic(generator(x)).float().square().mean())
    # The critic's gradients came with the generator's scale, and are used just as well.
    generator.step()
    critic.step()
    sum(_square(reference, b.float()) / _world() for b in _inputs()[: _world()]).backward()
    for engine, layer in zip((generator, critic), reference, strict=True):
        for got, param in zip(full_masters(engine).values(), layer.parameters(), strict=True):
            assert param.grad is not None
            wanted = param.detach() - 0.1 * param.grad
            torch.testing.assert_close(got, wanted, rtol=2e-3, atol=1e-3)
    assert (generator.loss_scale, critic.loss_scale) == (64.0, 8.0)


def test_engines_with_different_scales(ranks: Ranks) -> None:
    ranks(2, _several_engines)


def _penalty() -> None:
    """A gradient penalty as torch's AMP examples write it: scale, differentiate, unscale."""
    engine = _engine(2, nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    reference = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    reference.load_state_dict({k: v.float() for k, v in engine.module_state_dict().items()})
    losses = []
    for model in (engine, reference):
        x = _inputs()[0].clone().requires_grad_()
        x = x if model is engine else x.detach().float().requires_grad_()
        out = model(x).float().sum()
        scaled = engine.scale(out) if model is engine else out
        (slope,) = torch.autograd.grad(scaled, x, create_graph=True)
        if model is engine:
            slope = slope / engine.loss_scale
        loss = out + slope.float().square().sum()
        losses.append(loss.item())
        (engine.backward(loss) if model is engine else loss.backward())
    engine.step()
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    for got, param in zip(full_masters(engine).values(), reference.parameters(), strict=True):
        wanted = param.detach() - 0.1 * (0 if param.grad is None else param.grad)
        torch.testing.assert_close(got, wanted, rtol=5e-3, atol=2e-3)


def test_gradient_penalty(ranks: Ranks) -> None:
    ranks(1, _penalty)


# ---- overflow ----------------------------------------------------------------------------------


def _overflow_in_a_window(stage: int, micro: int) -> None:
    """One micro-batch of one rank overflows: all ranks skip, nothing of the window survives."""
    engine = _engine(
        stage,
        gradient_accumulation_steps=2,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        fp16={"hysteresis": 1},
    )
    before, rates = full_masters(engine), engine.get_lr()
    for index in range(2):
        factor = 1e6 if (_rank(), index) == (1, micro) else 1.0
        engine.backward(_square(engine, _inputs(index)[_rank()]) * factor)
        engine.step()
    assert (engine.skipped_steps, engine.global_steps) == (1, 1)
    assert engine.loss_scale == 8.0 and engine.get_lr() == rates
    after = full_masters(engine)
    assert all(torch.equal(after[name], before[name]) for name in before)
    problem = engine.get_non_finite_gradient()
    assert problem is not None and problem.ranks == (1,) and problem.loss_ranks == ()
    assert problem.param in before
    # The next window is one like any other.
    plain = PlainFp16(_lin(), _sgd, scale=8.0)
    plain.step(_square, [list(_inputs(index)[: _world()]) for index in (2, 3)])
    rate = engine.get_lr()[0]
    for index in (2, 3):
        engine.backward(_square(engine, _inputs(index)[_rank()]))
        engine.step()
    assert engine.was_step_applied() and engine.skipped_steps == 1
    for name, param in zip(before, plain.masters, strict=True):
        moved = before[name] + (param.detach() - before[name]) * (rate / 0.1)
        torch.testing.assert_close(full_masters(engine)[name], moved, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("micro", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
def test_overflow_inside_of_a_window(ranks: Ranks, stage: int, micro: int) -> None:
    ranks(2, _overflow_in_a_window, stage, micro)


def _floor() -> None:
    engine = _engine(1, fp16={"hysteresis": 2, "initial_scale_power": 1, "min_loss_scale": 1})
    bad = _inputs()[0] * float("inf")
    for skipped in (1, 2):
        engine.backward(_square(engine, bad))
        engine.step()
        assert engine.skipped_steps == skipped
    assert engine.loss_scale == 1.0
    engine.backward(_square(engine, bad))
    with pytest.raises(LossScaleError, match="min_loss_scale"):
        engine.step()
    # The step was skipped as any other, so a caller who catches the error may go on.
    assert (engine.skipped_steps, engine.global_steps) == (3, 3)
    engine.backward(_square(engine, _inputs()[0]))
    engine.step()
    assert engine.was_step_applied()


def test_overflow_at_the_smallest_scale_is_an_error(ranks: Ranks) -> None:
    ranks(2, _floor)


def _static() -> None:
    engine = _engine(2, fp16={"loss_scale": 1000.0})
    plain = PlainFp16(_lin(), _sgd, scale=1000.0, window=10**6)
    for step in range(3):
        engine.backward(_square(engine, _inputs(step)[_rank()]))
        engine.step()
        plain.step(_square, [list(_inputs(step)[: _world()])])
    _same(full_masters(engine), plain.masters, 1e-6)
    engine.backward(_square(engine, _inputs()[0]) * float("inf"))
    engine.step()
    assert engine.skipped_steps == 1 and engine.loss_scale == 1000.0


def test_a_fixed_scale(ranks: Ranks) -> None:
    ranks(2, _static)


def _underflow() -> None:
    """What underflows without a scale arrives with one: the reason for all of this."""
    moved = []
    for power in (0, 16):
        engine = _engine(0, nn.Linear(4, 3), fp16={"initial_scale_power": power})
        before = full_masters(engine)["weight"].clone()
        engine.backward(_square(engine, _inputs()[_rank()]) * 1e-7)
        engine.step()
        moved.append(not torch.equal(full_masters(engine)["weight"], before))
    assert moved == [False, True]


def test_the_scale_saves_small_gradients(ranks: Ranks) -> None:
    ranks(2, _underflow)


# ---- inputs, batch norm, checkpoints -----------------------------------------------------------


def _auto_cast() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = _lin()

        def forward(self, batch: dict[str, Any], *, extra: Tensor) -> Tensor:
            assert batch["x"].dtype == extra.dtype == torch.float16
            assert batch["rows"][0].dtype == torch.int64
            out: Tensor = self.body(batch["x"] + extra)
            return out

    x = _inputs()[0]
    batch = {"x": x.float(), "rows": [torch.arange(2)]}
    engine = _engine(3, Two(), fp16={"auto_cast": True})
    engine.backward(engine(batch, extra=torch.zeros(4)).float().mean())
    engine.step()
    assert engine.was_step_applied() and batch["x"].dtype == torch.float32
    with pytest.raises(AssertionError):
        _engine(0, Two())(batch, extra=torch.zeros(4))


def test_auto_cast_of_inputs(ranks: Ranks) -> None:
    ranks(1, _auto_cast)


def _resume_save(folder: str, stage: int) -> dict[str, Any]:
    engine = _engine(
        stage, fp16={"initial_scale_power": 20, "hysteresis": 2, "loss_scale_window": 4}
    )
    for step in range(9):
        engine.backward(_square(engine, _inputs(step)[0]))
        engine.step()
    engine.save_checkpoint(folder)
    assert engine.core.scaler is not None and engine.skipped_steps > 0
    return {**engine.core.scaler.state_dict(), "skipped": engine.skipped_steps}


def _resume_load(folder: str, stage: int) -> tuple[dict[str, Any], list[float]]:
    engine = _engine(
        stage, fp16={"initial_scale_power": 3, "hysteresis": 2, "loss_scale_window": 4}
    )
    engine.load_checkpoint(folder)
    assert engine.core.scaler is not None
    state = {**engine.core.scaler.state_dict(), "skipped": engine.skipped_steps}
    moved = []
    for step in range(9, 13):
        engine.backward(_square(engine, _inputs(step)[0]))
        engine.step()
        moved.append(engine.loss_scale)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert engine.loss_scale == 8.0
    return state, moved


def test_the_scaler_resumes(ranks: Ranks, tmp_path: Path) -> None:
    """Saved by two ranks at stage 2, loaded by one and by three at others."""
    saved = ranks(2, _resume_save, str(tmp_path), 2)[0]
    results = [
        ranks(world, _resume_load, str(tmp_path), stage)[0]
        for world, stage in ((2, 2), (1, 0), (3, 3))
    ]
    for state, moved in results:
        assert state == saved
        assert moved == results[0][1]


def _fp32_checkpoint(folder: str) -> None:
    torch.manual_seed(0)
    plain = ds_zero.initialize(
        model=_lin(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    ).engine
    plain.save_checkpoint(folder)
    engine = _engine(1, nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))
    engine.load_checkpoint(folder)
    assert engine.loss_scale == 16.0
    wanted = plain.module_state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in full_masters(engine).items())


def test_a_checkpoint_without_a_scaler(ranks: Ranks, tmp_path: Path) -> None:
    ranks(2, _fp32_checkpoint, str(tmp_path))
