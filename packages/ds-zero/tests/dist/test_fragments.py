"""Reading and setting masters, gradients and optimiser states, against plain torch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_zero
from ds_comm.errors import DivergenceError, EditError, EngineError
from ds_comm.testing.plugin import Ranks

LR = 0.01


class Net(nn.Module):
    """Odd sizes; a frozen, an unused and a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inp = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.unused = nn.Linear(3, 2)
        self.out = nn.Linear(7, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.out(self.frozen(x))


def _engine(stage: int, model: nn.Module, **extra: Any) -> ds_zero.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        **extra,
    }
    return ds_zero.initialize(model=model, dist_init_required=False, config=config).engine


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def _backward(engine: ds_zero.Engine, step: int, dtype: torch.dtype = torch.float32) -> None:
    x = _batch(step, engine.data_group.rank).to(dtype)
    engine.backward(engine(x).float().square().mean())


def _close(got: Tensor | None, wanted: Tensor | None, tolerance: float = 1e-5) -> None:
    if wanted is None:
        assert got is None
        return
    assert got is not None
    torch.testing.assert_close(got, wanted.detach(), rtol=tolerance, atol=tolerance)


def _read_everything(stage: int) -> None:
    """fp32, 1e-5: gradient, masters and moments of every parameter are those of plain torch."""
    model = Net()
    plain = copy.deepcopy(model)
    engine = _engine(stage, model)
    world = engine.dp_world_size
    optimizer = torch.optim.AdamW(
        [p for p in plain.parameters() if p.requires_grad], lr=LR, weight_decay=0
    )
    pairs = list(zip(model.parameters(), plain.parameters(), strict=True))
    for step in range(3):
        for param, _ in pairs:
            assert ds_zero.safe_get_full_grad(param) is None
            assert ds_zero.safe_get_local_grad(param) is None
        _backward(engine, step)
        for rank in range(world):
            (plain(_batch(step, rank)).square().mean() / world).backward()
        for param, twin in pairs:
            _close(ds_zero.safe_get_full_grad(param), twin.grad)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        for param, twin in pairs:
            got = ds_zero.safe_get_full_fp32_param(param)
            _close(got, twin if twin.requires_grad else None)
            for key in ("exp_avg", "exp_avg_sq"):
                wanted = optimizer.state.get(twin, {}).get(key)
                _close(ds_zero.safe_get_full_optimizer_state(param, key), wanted)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reads_are_those_of_plain_torch(ranks: Ranks, world: int, stage: int) -> None:
    ranks(world, _read_everything, stage)


def _set_everything(stage: int) -> None:
    """fp32, 1e-5: after setting all three, the next step is plain torch's from the same values."""
    model = Net()
    plain = copy.deepcopy(model)
    engine = _engine(stage, model)
    _backward(engine, 0)
    engine.step()
    pairs = [
        (p, q)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
        if q.requires_grad
    ]
    generator = torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW([q for _, q in pairs], lr=LR, weight_decay=0)
    used = [
        (p, q) for p, q in pairs if ds_zero.safe_get_full_optimizer_state(p, "exp_avg") is not None
    ]
    assert len(used) == len(pairs) - 2
    _backward(engine, 1)
    for param, twin in used:
        twin.data = torch.randn(twin.shape, generator=generator)
        twin.grad = torch.randn(twin.shape, generator=generator)
        moments = {"exp_avg": torch.randn(twin.shape, generator=generator)}
        moments["exp_avg_sq"] = torch.rand(twin.shape, generator=generator)
        optimizer.state[twin] = {
            "step": torch.tensor(1.0),
            **{k: v.clone() for k, v in moments.items()},
        }
        ds_zero.safe_set_full_fp32_param(param, twin)
        ds_zero.safe_set_full_grad(param, twin.grad)
        for key, value in moments.items():
            ds_zero.safe_set_full_optimizer_state(param, value, key)
            _close(ds_zero.safe_get_full_optimizer_state(param, key), value, 0.0)
        _close(ds_zero.safe_get_full_fp32_param(param), twin, 0.0)
        _close(ds_zero.safe_get_full_grad(param), twin.grad, 1e-6)
    engine.step()
    optimizer.step()
    for param, twin in pairs:
        _close(ds_zero.safe_get_full_fp32_param(param), twin)
    x = _batch(5, 0)
    _close(engine(x), plain(x), 1e-4)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_what_is_set_is_stepped_from(ranks: Ranks, world: int, stage: int) -> None:
    ranks(world, _set_everything, stage)


def _low_precision(stage: int, kind: str) -> None:
    """16-bit compute: masters keep what was set; the compute copy is its rounding, exactly."""
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    section = {"enabled": True} if kind == "bf16" else {"enabled": True, "loss_scale": 128.0}
    model = Net()
    engine = _engine(stage, model, **{kind: section})
    _backward(engine, 0, dtype)
    grads = {n: ds_zero.safe_get_full_grad(p) for n, p in model.named_parameters()}
    # The gradient of the same loss in fp32, 2 % of its largest element: the scale was taken out.
    plain = Net()
    for rank in range(engine.dp_world_size):
        (plain(_batch(0, rank)).square().mean() / engine.dp_world_size).backward()
    for name, twin in plain.named_parameters():
        found = grads[name]
        assert (found is None) == (twin.grad is None), name
        if found is not None:
            error = (found - twin.grad).abs().max() / twin.grad.abs().max()
            assert found.dtype == torch.float32 and error < 0.02, (name, error)
    weight = model.inp.weight
    value = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    ds_zero.safe_set_full_fp32_param(weight, value)
    assert torch.equal(ds_zero.safe_get_full_fp32_param(weight), value)
    with ds_zero.GatheredParameters([weight]):
        assert torch.equal(weight.detach(), value.to(dtype))
    engine.step()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_low_precision(ranks: Ranks, kind: str, stage: int) -> None:
    ranks(2, _low_precision, stage, kind)


def _locals(stage: int) -> None:
    """The parts of all ranks, one after another, are the whole; what is set locally is read."""
    from ds_comm.collectives import gather_objects

    model = Net()
    engine = _engine(stage, model)
    group = engine.data_group
    _backward(engine, 0)
    weight = model.blocks[0].weight

    def whole(part: Tensor | None) -> Tensor:
        assert part is not None and part.dim() == 1
        return torch.cat(gather_objects(part, group)).view(weight.shape)

    if stage > 0:
        grad = ds_zero.safe_get_full_grad(weight)
        assert torch.equal(whole(ds_zero.safe_get_local_grad(weight)), grad)
        ds_zero.safe_set_local_grad(weight, ds_zero.safe_get_local_grad(weight) * 2)
        assert torch.equal(ds_zero.safe_get_full_grad(weight), grad * 2)
        assert torch.equal(
            whole(ds_zero.safe_get_local_fp32_param(weight)),
            ds_zero.safe_get_full_fp32_param(weight),
        )
    engine.step()
    state = ds_zero.safe_get_local_optimizer_state(weight, "exp_avg")
    if stage == 0:
        with pytest.raises(EngineError, match="safe_set_full_optimizer_state"):
            ds_zero.safe_set_local_optimizer_state(weight, state, "exp_avg")
    else:
        if state is not None:
            ds_zero.safe_set_local_optimizer_state(weight, state + 1, "exp_avg")
        full = ds_zero.safe_get_full_optimizer_state(weight, "exp_avg")
        mine = ds_zero.safe_get_local_optimizer_state(weight, "exp_avg")
        parts = gather_objects(mine, group)
        assert torch.equal(torch.cat([p for p in parts if p is not None]).view(weight.shape), full)
        if state is not None:
            assert torch.equal(mine, state + 1)
    if stage == 3:
        mine = ds_zero.safe_get_local_fp32_param(weight)
        ds_zero.safe_set_local_fp32_param(weight, torch.full_like(mine, 0.25))
        with ds_zero.GatheredParameters([weight]):
            assert bool((weight == 0.25).all())
        with pytest.raises(EditError, match="takes values of shape"):
            ds_zero.safe_set_local_fp32_param(weight, torch.zeros(weight.numel() + 1))
    else:
        with pytest.raises(EngineError, match="kept whole"):
            ds_zero.safe_set_local_fp32_param(weight, torch.zeros(3))
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_local_parts(ranks: Ranks, stage: int) -> None:
    ranks(2, _locals, stage)


def _other_optimizers(stage: int, kind: str) -> None:
    """States of optimisers that own whole parameters or keep 8-bit codes can be read and set."""
    model = Net()
    config = {"optimizer": {"type": kind, "params": {"lr": LR}}}
    engine = _engine(stage, model, **config)
    _backward(engine, 0)
    engine.step()
    weight = model.blocks[1].weight
    key = {"Muon": "momentum_buffer", "Adafactor": "row_var"}.get(kind, "exp_avg")
    before = ds_zero.safe_get_full_optimizer_state(weight, key)
    assert before is not None and before.abs().max() > 0
    # A constant is one of the codes of an 8-bit state, so every kind keeps it: 1e-6.
    value = torch.full_like(before, 0.5)
    ds_zero.safe_set_full_optimizer_state(weight, value, key)
    _close(ds_zero.safe_get_full_optimizer_state(weight, key), value, 1e-6)
    with pytest.raises(EngineError, match="keeps no 'nothing'"):
        ds_zero.safe_get_full_optimizer_state(weight, "nothing")
    _backward(engine, 1)
    engine.step()
    assert ds_zero.safe_get_full_fp32_param(weight).isfinite().all()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", ["Muon", "Adam8bit", "Lamb", "Lion"])
def test_states_of_other_optimizers(ranks: Ranks, kind: str, stage: int) -> None:
    ranks(2, _other_optimizers, stage, kind)


def _client_optimizer(stage: int) -> None:
    """A torch optimiser that the engine took over: element-wise, and one with odd state shapes."""
    for make in (
        lambda params: torch.optim.RMSprop(params, lr=LR, momentum=0.9),
        lambda params: torch.optim.Adafactor(params, lr=LR),
    ):
        model = Net()
        params = [p for p in model.parameters() if p.requires_grad]
        engine = ds_zero.initialize(
            model=model,
            optimizer=make(params),
            dist_init_required=False,
            config={
                "train_micro_batch_size_per_gpu": 2,
                "zero_allow_untested_optimizer": True,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
            },
        ).engine
        _backward(engine, 0)
        engine.step()
        weight = model.inp.weight
        key = "momentum_buffer" if make(params).__class__ is torch.optim.RMSprop else "row_var"
        value = ds_zero.safe_get_full_optimizer_state(weight, key)
        assert value is not None
        assert value.shape == (weight.shape if key == "momentum_buffer" else (7, 1))
        ds_zero.safe_set_full_optimizer_state(weight, value + 1, key)
        assert torch.equal(ds_zero.safe_get_full_optimizer_state(weight, key), value + 1)
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_states_of_a_client_optimizer(ranks: Ranks, stage: int) -> None:
    ranks(2, _client_optimizer, stage)


def _refusals() -> None:
    model = Net()
    loose = nn.Parameter(torch.zeros(3))
    frozen = model.frozen.weight
    engine = _engine(3, model)
    for param in (loose, frozen):
        assert ds_zero.safe_get_full_fp32_param(param) is None
        assert ds_zero.safe_get_full_grad(param) is None
        assert ds_zero.safe_get_full_optimizer_state(param, "exp_avg") is None
        assert ds_zero.safe_get_local_fp32_param(param) is None
        with pytest.raises(EngineError, match="belongs to no engine, or is frozen"):
            ds_zero.safe_set_full_fp32_param(param, torch.zeros(3))
    weight = model.inp.weight
    with pytest.raises(EditError, match=r"'inp.weight' takes values of shape \(7, 5\)"):
        ds_zero.safe_set_full_fp32_param(weight, torch.zeros(5, 7))
    with pytest.raises(EngineError, match="no reduced gradient"):
        ds_zero.safe_set_full_grad(weight, torch.zeros(7, 5))
    with pytest.raises(EngineError, match="none before its first step"):
        ds_zero.safe_set_full_optimizer_state(weight, torch.zeros(7, 5), "exp_avg")
    differing = torch.full((7, 5), float(engine.data_group.rank))
    with pytest.raises(DivergenceError, match="ranks 0 and 1 of the group pass different values"):
        ds_zero.safe_set_full_fp32_param(weight, differing)
    engine.destroy()


def test_refusals(ranks: Ranks) -> None:
    ranks(2, _refusals)


def _vectorized(stage: int) -> None:
    """A gradient that a function cuts: the norm of the step is that of the cut gradients, 1e-5."""
    model = Net()
    engine = _engine(stage, model)
    _backward(engine, 0)
    params = list(model.parameters())
    ds_zero.safe_update_full_grad_vectorized(params, lambda grad, _: grad.clamp(-1e-3, 1e-3))
    grads = [g for g in map(ds_zero.safe_get_full_grad, params) if g is not None]
    norm = torch.stack([g.norm() for g in grads]).norm()
    assert max(float(g.abs().max()) for g in grads) <= 1e-3 * (1 + 1e-6)
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-5)
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_vectorized_update(ranks: Ranks, stage: int) -> None:
    ranks(2, _vectorized, stage)
