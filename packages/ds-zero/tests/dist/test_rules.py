"""DESIGN's rulings on gradients, edits and divergence; reported bugs B36, B40, B42."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_zero
from ds_comm.errors import ConfigError, DivergenceError, EditError, EngineError
from ds_comm.testing.plugin import Ranks

STAGES = (0, 1, 2, 3)


def _rank() -> int:
    return torch.distributed.get_rank()


def _world() -> int:
    return torch.distributed.get_world_size()


def _lin() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


def _inputs(step: int = 0) -> Tensor:
    return torch.randn(4, 2, 4, generator=torch.Generator().manual_seed(step))


def _config(stage: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **extra,
    }


def _engine(stage: int, model: nn.Module | None = None, **extra: Any) -> ds_zero.Engine:
    return ds_zero.initialize(model=model or _lin(), config=_config(stage, **extra)).engine


def _plain_step(losses: Any, lr: float = 0.1) -> list[Tensor]:
    """One SGD step of plain torch on the mean over ranks of the sum of ``losses(model, x)``."""
    model = _lin()
    total = sum(losses(model, x) for x in _inputs()[: _world()]) / _world()
    total.backward()
    return [(p - lr * p.grad).detach() for p in model.parameters() if p.grad is not None]


def _state(engine: ds_zero.Engine) -> list[Tensor]:
    return list(engine.module_state_dict().values())


def _same(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-6) -> None:
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- several backwards -------------------------------------------------------------------------


def _two_backwards(stage: int) -> None:
    def first(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean()

    def second(model: nn.Module, x: Tensor) -> Tensor:
        return model(2 * x).abs().mean()

    engine = _engine(stage)
    x = _inputs()[_rank()]
    engine.backward(first(engine, x))
    engine.backward(second(engine, x))
    engine.step()
    wanted = _plain_step(lambda model, x: first(model, x) + second(model, x))
    _same(_state(engine), wanted)
    # One backward through two forwards gives the same sum.
    engine = _engine(stage)
    (first(engine, x) + second(engine, x)).backward()
    engine.step()
    _same(_state(engine), wanted)
    # Two forwards, then two backwards.
    engine = _engine(stage)
    one, two = first(engine, x), second(engine, x)
    one.backward()
    two.backward()
    engine.step()
    _same(_state(engine), wanted)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2])
def test_several_backwards_add_up(ranks: Ranks, stage: int, world: int) -> None:
    """B42: gradients of several backwards before one step are summed, at every stage."""
    ranks(world, _two_backwards, stage)


def _no_sync(stage: int) -> None:
    engine = _engine(stage)
    x = _inputs()[_rank()]
    with engine.no_sync():
        engine(x).square().mean().backward()
        with pytest.raises(EngineError, match="no_sync"):
            engine.step()
    engine(2 * x).square().mean().backward()
    engine.step()
    wanted = _plain_step(lambda m, x: m(x).square().mean() + m(2 * x).square().mean())
    _same(_state(engine), wanted)
    # Gradients that were never synced are reduced by the step itself.
    engine = _engine(stage)
    with engine.no_sync():
        engine(x).square().mean().backward()
    engine.step()
    _same(_state(engine), _plain_step(lambda m, x: m(x).square().mean()))


@pytest.mark.parametrize("stage", STAGES)
def test_no_sync_accumulates_and_reduces_later(ranks: Ranks, stage: int) -> None:
    """Local gradients count in the next synced backward, or at the step."""
    ranks(2, _no_sync, stage)


# ---- p.grad, norm, clipping --------------------------------------------------------------------


def _grad_views(stage: int) -> None:
    engine = _engine(stage)
    engine.backward(engine(_inputs()[_rank()]).square().mean())
    reference = _lin()
    (sum(reference(x).square().mean() for x in _inputs()[:2]) / 2).backward()
    for param, wanted in zip(engine.module.parameters(), reference.parameters(), strict=True):
        if stage == 0:
            assert param.grad is not None and wanted.grad is not None
            torch.testing.assert_close(param.grad, wanted.grad)
        else:
            assert param.grad is None
    engine.step()
    assert all(param.grad is None for param in engine.module.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_grad_after_backward(ranks: Ranks, stage: int) -> None:
    """The averaged gradient at stage 0; none where ranks keep shards."""
    ranks(2, _grad_views, stage)


def _clipped(stage: int, accumulation: int) -> None:
    engine = _engine(stage, gradient_clipping=0.05, gradient_accumulation_steps=accumulation)
    model = _lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for micro in range(accumulation):
            batch = _inputs(10 * step + micro)
            (sum(model(x).square().mean() for x in batch[:2]) / 2 / accumulation).backward()
            engine.backward(engine(batch[_rank()]).square().mean())
            engine.step()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert engine.get_global_grad_norm() == pytest.approx(norm.item(), rel=1e-5)
    _same(_state(engine), [p.detach() for p in model.parameters()])


@pytest.mark.parametrize("stage", STAGES)
def test_norm_and_clipping_equal_torch(ranks: Ranks, stage: int) -> None:
    """B31's kind: the reported norm is the one before clipping, at every stage."""
    ranks(2, _clipped, stage, 2)


def _overflow(stage: int, precision: str) -> None:
    extra: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    model = _lin()
    engine = _engine(
        stage,
        model,
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        **extra,
    )
    dtype = next(model.parameters()).dtype
    before, lr = _state(engine), engine.get_lr()
    scale = float("inf") if _rank() == 1 else 1.0
    engine.backward((engine(_inputs()[_rank()].to(dtype)) * scale).square().mean())
    engine.step()
    assert engine.skipped_steps == engine.global_steps == 1
    assert not engine.was_step_applied()
    assert engine.get_lr() == lr
    norm = engine.get_global_grad_norm()
    assert norm is not None and not torch.isfinite(torch.tensor(norm))
    _same(_state(engine), before, 0.0)
    engine.backward(engine(_inputs()[_rank()].to(dtype)).square().mean())
    engine.step()
    assert engine.was_step_applied() and engine.skipped_steps == 1 and engine.global_steps == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_overflow_on_one_rank_skips_all(ranks: Ranks, stage: int, precision: str) -> None:
    """A non-finite gradient anywhere: no update, the schedule rests, both counters move."""
    ranks(2, _overflow, stage, precision)


# ---- unused parameters and diverging ranks -----------------------------------------------------


class Experts(nn.Module):
    """Every rank uses the expert of its own number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.experts[which](x).square().mean()


def _experts(stage: int) -> list[float]:
    model = Experts()
    wanted = [model(_inputs()[0], which).item() for which in (0, 1)]
    reference = copy.deepcopy(model)
    engine = ds_zero.initialize(
        model=model,
        config=_config(
            stage,
            optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}},
        ),
    ).engine
    loss = engine(_inputs()[0], _rank())
    assert loss.item() == pytest.approx(wanted[_rank()])
    engine.backward(loss)
    engine.step()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.5)
    (sum(reference(_inputs()[0], which) for which in (0, 1)) / 2).backward()
    optimizer.step()
    _same(_state(engine), [p.detach() for p in reference.parameters()], 1e-5)
    return [loss.item()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_that_use_other_modules(ranks: Ranks, stage: int) -> None:
    """B36: losses and updates are right; the third expert, which nobody used, is left alone."""
    ranks(2, _experts, stage)


def _diverge() -> str:
    engine = ds_zero.initialize(model=Experts(), config=_config(3)).engine
    with pytest.raises(DivergenceError) as caught:
        engine(_inputs()[0], _rank())
    return str(caught.value)


def test_stage_3_names_both_modules(ranks: Ranks) -> None:
    """B36 at stage 3: an error that names both modules, never mixed weights."""
    for message in ranks(2, _diverge):
        assert "experts.0" in message and "experts.1" in message


def _unused_is_error(stage: int) -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 4), "idle": nn.Linear(4, 4)})
    zero = {"stage": stage, "ignore_unused_parameters": False}
    engine = ds_zero.initialize(model=model, config=_config(stage, zero_optimization=zero)).engine
    engine.backward(engine.module["used"](_inputs()[_rank()]).square().mean())
    with pytest.raises(EngineError, match="idle.weight"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 2])
def test_unused_parameters_can_be_an_error(ranks: Ranks, stage: int) -> None:
    """``ignore_unused_parameters: false`` names them."""
    ranks(2, _unused_is_error, stage)


# ---- edits -------------------------------------------------------------------------------------


def _owner_edit(stage: int, precision: str) -> None:
    extra: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    model = _lin()
    engine = _engine(stage, model, **extra)
    first = next(model.parameters())
    with ds_zero.GatheredParameters(model.parameters(), modifier_rank=1):
        assert first.shape == (4, 4) and not first.isnan().any()
        if _rank() == 1:
            with torch.no_grad():
                first.fill_(7)
    state = engine.module_state_dict()
    assert (state["0.weight"] == 7).all()
    # The master followed: a step moves on from the new value.
    engine.backward(engine(_inputs()[_rank()].to(first.dtype)).square().mean())
    engine.step()
    assert ((engine.module_state_dict()["0.weight"].float() - 7).abs() < 1).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_owners_edit_reaches_every_copy(ranks: Ranks, stage: int, precision: str) -> None:
    """``modifier_rank``'s values go to all ranks and into the masters."""
    ranks(2, _owner_edit, stage, precision)


def _ownerless_edit(stage: int) -> None:
    model = _lin()
    _engine(stage, model)
    first = next(model.parameters())
    with pytest.raises(EditError, match=r"0\.weight"):
        with ds_zero.GatheredParameters(first):
            if _rank() == 0:
                first.data.fill_(7)


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_without_owner_is_an_error(ranks: Ranks, stage: int) -> None:
    """B40: it is never dropped silently, and every rank learns of it."""
    ranks(2, _ownerless_edit, stage)


def _released_edits() -> None:
    for edit in ("assign", "zero", "half"):
        model = _lin()
        engine = _engine(3, model)
        first = model[0].weight
        assert first.shape == (4, 4) and first.isnan().all()
        if edit == "assign":
            first.data = torch.zeros(4, 4)
        elif edit == "zero":
            first.data.zero_()
        else:
            model.half()
        with pytest.raises(EditError, match=r"0\.weight"):
            engine(_inputs()[_rank()])


def test_edits_of_released_parameters_are_errors(ranks: Ranks) -> None:
    """Replacing, zeroing or casting a released parameter would be lost."""
    ranks(2, _released_edits)


def _kept_edit(stage: int) -> None:
    model = _lin()
    engine = _engine(stage, model, bf16={"enabled": True})
    with torch.no_grad():
        model[0].weight.mul_(2)
    engine.backward(engine(_inputs()[_rank()].bfloat16()).square().mean())
    with pytest.raises(EditError, match=r"0\.weight"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_edits_of_low_precision_copies_are_errors(ranks: Ranks, stage: int) -> None:
    """The fp32 master would overwrite them."""
    ranks(2, _kept_edit, stage)


def _state_dicts() -> None:
    model = _lin()
    engine = _engine(3, model)
    with pytest.raises(EngineError, match="module_state_dict"):
        model.state_dict()
    with pytest.raises(EngineError, match="load_module_state_dict"):
        model.load_state_dict(_lin().state_dict())
    with pytest.raises(EngineError, match="GatheredParameters"):
        copy.deepcopy(model)
    with ds_zero.GatheredParameters(model.parameters()):
        kept = model.state_dict()
    wanted = _lin().state_dict()
    assert all(torch.equal(kept[name], wanted[name]) for name in wanted)
    other = {name: value + 1 for name, value in wanted.items()}
    engine.load_module_state_dict(other)
    found = engine.module_state_dict()
    assert all(torch.equal(found[name], other[name]) for name in other)
    engine.destroy()
    assert all(torch.equal(model.state_dict()[name], other[name]) for name in other)


def test_raw_state_dicts_at_stage_3(ranks: Ranks) -> None:
    """Never a file of NaN: an error with the right verb, copies inside the context."""
    ranks(2, _state_dicts)


# ---- optimisers --------------------------------------------------------------------------------


def _client(stage: int, name: str, as_callable: bool) -> None:
    make = getattr(torch.optim, name)
    model, reference = _lin(), _lin()
    options = {"lr": 0.01, "weight_decay": 0.1}
    given = (lambda params: make(params, **options)) if as_callable else None
    engine, optimizer, *_ = ds_zero.initialize(
        model=model,
        optimizer=given or make(model.parameters(), **options),
        config={key: v for key, v in _config(stage).items() if key != "optimizer"},
    )
    plain = make(reference.parameters(), **options)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1)
    plain_schedule = torch.optim.lr_scheduler.StepLR(plain, 2, gamma=0.1)
    with pytest.raises(EngineError, match=r"engine\.step"):
        optimizer.step()
    for step in range(5):
        batch = _inputs(step)
        engine.backward(engine(batch[_rank()]).square().mean())
        engine.step()
        schedule.step()
        (sum(reference(x).square().mean() for x in batch[:2]) / 2).backward()
        plain.step()
        plain.zero_grad()
        plain_schedule.step()
    assert engine.get_lr() == [group["lr"] for group in plain.param_groups]
    _same(_state(engine), [p.detach() for p in reference.parameters()], 1e-5)


@pytest.mark.parametrize(
    ("stage", "name", "as_callable"),
    [(0, "Adagrad", False), (1, "RMSprop", True), (2, "Adam", False), (3, "NAdam", True)],
)
def test_client_optimizers(ranks: Ranks, stage: int, name: str, as_callable: bool) -> None:
    """Element-wise torch optimisers, as objects or functions, equal torch on one process."""
    ranks(2, _client, stage, name, as_callable)


def _refused() -> None:
    class Mystery(torch.optim.SGD):
        pass

    model = _lin()
    config = {key: v for key, v in _config(2).items() if key != "optimizer"}
    with pytest.raises(ConfigError, match="zero_allow_untested_optimizer"):
        ds_zero.initialize(
            model=model, optimizer=Mystery(model.parameters(), lr=0.1), config=config
        )
    model = _lin()
    with pytest.raises(ConfigError, match="several times in a step"):
        ds_zero.initialize(
            model=model, optimizer=torch.optim.LBFGS(model.parameters()), config=config
        )
    for section, match in (
        ({"type": "OneBitAdam", "params": {}}, "ds-compress"),
        ({"type": "AdamWW", "params": {}}, "did you mean 'AdamW'"),
        ({"type": "AdamW", "params": {"learning_rate": 1}}, "learning_rate"),
        ({"type": "AdamW", "params": {"lr": -1}}, "lr >= 0"),
    ):
        with pytest.raises(ConfigError, match=match):
            ds_zero.initialize(model=_lin(), config=_config(2, optimizer=section))


def test_unfit_optimizers_are_refused(ranks: Ranks) -> None:
    """Unknown classes and names, what no stage supports, wrong values."""
    ranks(2, _refused)


def _adam_modes(decoupled: bool, correction: bool) -> None:
    params = {
        "lr": 0.1,
        "weight_decay": 0.3,
        "betas": [0.8, 0.9],
        "adam_w_mode": decoupled,
        "bias_correction": correction,
    }
    engine = _engine(1, optimizer={"type": "Adam", "params": params})
    model = _lin()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()]
    for step in range(1, 4):
        batch = _inputs(step)
        engine.backward(engine(batch[_rank()]).square().mean())
        engine.step()
        model.zero_grad()
        (sum(model(x).square().mean() for x in batch[:2]) / 2).backward()
        for param, (m, v) in zip(model.parameters(), moments, strict=True):
            with torch.no_grad():
                assert param.grad is not None
                grad = param.grad if decoupled else param.grad + 0.3 * param
                m.mul_(0.8).add_(0.2 * grad)
                v.mul_(0.9).add_(0.1 * grad * grad)
                one = 1 - 0.8**step if correction else 1.0
                two = 1 - 0.9**step if correction else 1.0
                if decoupled:
                    param.mul_(1 - 0.1 * 0.3)
                param.sub_(0.1 * (m / one) / ((v / two).sqrt() + 1e-8))
    _same(_state(engine), [p.detach() for p in model.parameters()], 1e-5)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("correction", [True, False])
def test_adam_equals_its_formula(ranks: Ranks, decoupled: bool, correction: bool) -> None:
    """Type "Adam" decays decoupled unless ``adam_w_mode`` is false."""
    ranks(2, _adam_modes, decoupled, correction)


# ---- batch verbs -------------------------------------------------------------------------------


def _batch_verbs() -> None:
    engine = _engine(2, gradient_accumulation_steps=3)
    assert engine.get_batch_info() == (12, 2, 3)
    boundaries = []
    for _ in range(4):
        engine.backward(engine(_inputs()[_rank()]).square().mean())
        boundaries.append(engine.is_gradient_accumulation_boundary())
        engine.step()
    assert boundaries == [False, False, True, False]
    assert (engine.micro_steps, engine.global_steps, engine.global_samples) == (4, 1, 12)
    engine.set_train_batch_size(4)
    assert engine.get_batch_info() == (4, 2, 1)
    before = _state(engine)
    engine.backward(engine(_inputs()[_rank()]).square().mean())
    engine.step()
    assert engine.was_step_applied() and (engine.global_steps, engine.global_samples) == (2, 16)
    # The gradient is that of the new window alone.
    model = _lin()
    for param, value in zip(model.parameters(), before, strict=True):
        param.data.copy_(value)
    (sum(model(x).square().mean() for x in _inputs()[:2]) / 2).backward()
    _same(_state(engine), [(p - 0.1 * p.grad).detach() for p in model.parameters()])
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (10, 5, 1)
    with pytest.raises(ConfigError, match="5"):
        engine.set_train_batch_size(12)


def test_counters_and_batch_verbs(ranks: Ranks) -> None:
    """Boundaries, counters, and changing the window."""
    ranks(2, _batch_verbs)


# ---- lifetime ----------------------------------------------------------------------------------


def _lifetime(stage: int) -> None:
    import gc
    import weakref

    model = _lin()
    engine = _engine(stage, model)
    core = weakref.ref(engine.core)
    del engine
    gc.collect()
    # The model is still sharded, and still knows by whom.
    with ds_zero.GatheredParameters(model.parameters()):
        assert torch.equal(model[0].weight, _lin()[0].weight)
    del model
    gc.collect()
    assert core() is None


@pytest.mark.parametrize("stage", [0, 3])
def test_engines_are_freed_with_their_model(ranks: Ranks, stage: int) -> None:
    """Nothing global keeps them; a model without its engine can still be gathered."""
    ranks(2, _lifetime, stage)


def _same_model_twice() -> None:
    model = _lin()
    _engine(1, model)
    with pytest.raises(EngineError, match="another engine"):
        _engine(1, model)


def test_a_model_has_one_engine(ranks: Ranks) -> None:
    """A second one on the same parameters is refused."""
    ranks(1, _same_model_twice)


# ---- edits that only some ranks make, and other calls that must not be lost ---------------------


def _foreign_edits(stage: int, precision: str) -> list[Tensor]:
    extra: dict[str, Any] = {"bf16": {"enabled": True}} if precision == "bf16" else {}
    model = _lin()
    engine = _engine(stage, model, **extra)
    wanted = [value.clone() for value in _state(engine)]
    first = model[0].weight
    with ds_zero.GatheredParameters(model.parameters(), modifier_rank=0):
        if _rank() == 1:
            first.data.fill_(9)
    _same(_state(engine), wanted, 0.0)
    with pytest.raises(EditError):
        with ds_zero.GatheredParameters(first):
            if _rank() == 1:
                first.data.fill_(9)
    _same(_state(engine), wanted, 0.0)
    with ds_zero.GatheredParameters(first, modifier_rank=0):
        if _rank() == 0:
            first.data = torch.full((4, 4), 5.0, dtype=first.dtype)
    assert (engine.module_state_dict()["0.weight"] == 5).all()
    context = ds_zero.GatheredParameters(first)
    with context, pytest.raises(EngineError, match="active"):
        context.__enter__()
    with pytest.raises(EngineError, match="modifier_rank=2"):
        with ds_zero.GatheredParameters(first, modifier_rank=2):
            pass
    engine.backward(engine(_inputs()[_rank()].to(first.dtype)).square().mean())
    engine.step()
    return _state(engine)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_edits_of_one_rank_never_make_ranks_differ(
    ranks: Ranks, stage: int, precision: str
) -> None:
    """Whoever edits: afterwards every rank holds the owner's values, or the old ones."""
    one, two = ranks(2, _foreign_edits, stage, precision)
    _same(one, two, 0.0)


def _strays(stage: int) -> None:
    model = _lin()
    model[2].bias.requires_grad_(False)
    engine = _engine(stage, model)
    model[2].bias.requires_grad_(True)
    engine.backward(engine(_inputs()[_rank()]).square().mean())
    with pytest.raises(EditError, match=r"2\.bias"):
        engine.step()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_that_are_never_trained_are_an_error(ranks: Ranks, stage: int) -> None:
    """Unfrozen after ``initialize``: an error that names them, no silence."""
    ranks(2, _strays, stage)


def _batch_norm(stage: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    engine = _engine(stage, model, bf16={"enabled": True})
    for step in range(3):
        engine.backward(engine(_inputs(step)[_rank()].bfloat16()).square().mean())
        engine.step()
    assert engine.was_step_applied() and model[1].weight.dtype == torch.float32
    model.eval()
    assert engine(_inputs()[0].bfloat16()).isfinite().all()


@pytest.mark.parametrize("stage", [0, 3])
def test_batch_norm_in_bf16(ranks: Ranks, stage: int) -> None:
    """Batch norm keeps fp32 parameters beside its fp32 statistics."""
    ranks(2, _batch_norm, stage)


def _calling_styles() -> None:
    model = _lin()
    groups = [{"params": model[0].weight, "lr": 0.5}, {"params": list(model[2].named_parameters())}]
    engine = ds_zero.initialize(model=model, model_parameters=groups, config=_config(1)).engine
    assert engine.get_lr() == [0.5, 0.1]
    bias = model[0].bias.detach().clone()
    engine.backward(engine(_inputs()[_rank()]).square().mean())
    engine.step()  # 0.bias has a gradient but is in no group: left alone, as in torch
    assert torch.equal(model[0].bias, bias) and model[0].bias.grad is None
    with pytest.raises(EngineError, match="Module"):
        ds_zero.initialize(model=[1], config=_config(1))  # type: ignore[arg-type]
    model = _lin()
    other = torch.optim.SGD(_lin().parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(ConfigError, match="another SGD"):
        ds_zero.initialize(model=model, lr_scheduler=schedule, config=_config(1))
    with pytest.raises(ConfigError, match="finite"):
        _engine(1, optimizer={"type": "AdamW", "params": {"lr": float("nan")}})


def test_calling_styles(ranks: Ranks) -> None:
    """Groups as torch takes them; pairings that cannot work are refused."""
    ranks(2, _calling_styles)
