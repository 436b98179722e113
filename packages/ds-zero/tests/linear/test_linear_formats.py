"""Packed weights against the formats' published values, and layers against plain formulas."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from ds_comm.errors import ConfigError
from ds_zero.linear import (
    LoRAConfig,
    LoRAOptimizedLinear,
    OptimizedLinear,
    QuantizationConfig,
    QuantizedLinear,
    QuantizedParameter,
)
from ds_zero.linear.packed import PackedFormat

FORMATS = [(8, 0), (4, 0), (8, 3), (8, 2), (6, 2), (6, 3), (4, 1)]


def _minifloats(exponent_bits: int, mantissa_bits: int, bias: int, drop: int) -> list[float]:
    """All positive values by the definition of OCP's formats, without the ``drop`` top codes."""
    found = []
    for e, m in product(range(2**exponent_bits), range(2**mantissa_bits)):
        fraction = m / 2**mantissa_bits
        found.append(2.0 ** (1 - bias) * fraction if e == 0 else 2.0 ** (e - bias) * (1 + fraction))
    return found[: len(found) - drop]


# OCP 8-bit Floating Point Specification 1.0 and Microscaling Formats 1.0, section 5.3: e4m3 has one
# NaN and no infinity, e5m2 has IEEE's, the 4- and 6-bit formats have neither.
VALUES = {
    (8, 0): [float(v) for v in range(128)],
    (4, 0): [float(v) for v in range(8)],
    (8, 3): _minifloats(4, 3, 7, 1),
    (8, 2): _minifloats(5, 2, 15, 4),
    (6, 2): _minifloats(3, 2, 3, 0),
    (6, 3): _minifloats(2, 3, 1, 0),
    (4, 1): [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
LARGEST = {(8, 3): 448.0, (8, 2): 57344.0, (6, 2): 28.0, (6, 3): 7.5, (4, 1): 6.0}


@pytest.mark.parametrize("bits", FORMATS)
def test_every_value_of_a_format_survives(bits: tuple[int, int]) -> None:
    """Groups that contain the largest value have the scale 1, so all others are exact."""
    values = VALUES[bits]
    assert max(values) == LARGEST.get(bits, max(values))
    line = torch.tensor([-v for v in values] + values)
    line = torch.cat([line, line.flip(0)])
    rows = line.repeat(3, 1)
    group = -(-line.numel() // 8) * 8
    rows = torch.nn.functional.pad(rows, (0, group - line.numel()))
    packing = PackedFormat(tuple(rows.shape), torch.float32, QuantizationConfig(*bits, group))
    assert torch.equal(packing.unpack(packing.pack(rows)), rows)


@pytest.mark.parametrize("bits", FORMATS)
@pytest.mark.parametrize("shape", [(3, 5), (1, 1), (64, 33), (7, 512)])
def test_values_round_to_the_nearest(bits: tuple[int, int], shape: tuple[int, ...]) -> None:
    """No value of the group's scaled table is closer; packing again changes nothing."""
    torch.manual_seed(0)
    weight = torch.randn(shape)
    config = QuantizationConfig(*bits, group_size=64)
    packing = PackedFormat(shape, torch.float32, config)
    packed = packing.pack(weight)
    assert packed.dtype == torch.uint8 and packed.numel() == packing.num_bytes
    found = packing.unpack(packed)
    table = torch.tensor(sorted({s * v for v in VALUES[bits] for s in (-1.0, 1.0)})).double()
    flat = weight.flatten().double()
    for start in range(0, flat.numel(), 64):
        part = flat[start : start + 64]
        scaled = table * (part.abs().max() / table.max())
        best = (part[:, None] - scaled).abs().min(dim=1).values
        error = (part - found.flatten()[start : start + 64].double()).abs()
        assert (error <= best + 1e-6 * part.abs().max()).all()
    again = packing.unpack(packing.pack(found))
    torch.testing.assert_close(again, found, rtol=1e-6, atol=0)


def test_zeros_and_bytes() -> None:
    """A group of zeros has no scale to divide by; without quantisation the bytes are the own."""
    packing = PackedFormat((4, 16), torch.bfloat16, QuantizationConfig(group_size=16))
    assert not packing.unpack(packing.pack(torch.zeros(4, 16))).any()
    plain = PackedFormat((3, 7), torch.bfloat16)
    weight = torch.randn(3, 7).bfloat16()
    assert plain.num_bytes == 42 and torch.equal(plain.unpack(plain.pack(weight)), weight)


def test_sizes() -> None:
    """4096 elements in groups of 512: the bits of the codes and eight fp32 scales."""
    for bits, num_bytes in (((8, 3), 4096), ((6, 2), 3072), ((4, 1), 2048)):
        packing = PackedFormat((64, 64), torch.bfloat16, QuantizationConfig(*bits))
        assert packing.num_bytes == num_bytes + 32


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: QuantizationConfig(q_bits=5), "q_bits=5"),
        (lambda: QuantizationConfig(q_bits=8, mantissa_bits=7), "mantissa_bits=7"),
        (lambda: QuantizationConfig(group_size=12), "multiple of 8"),
        (lambda: QuantizationConfig(q_dtype=torch.int8), "torch.uint8"),
        (lambda: LoRAConfig(lora_r=0), "lora_r >= 1"),
        (lambda: LoRAConfig(offload_ratio=1.5), "offload_ratio"),
        (lambda: QuantizedParameter(torch.zeros(3), requires_grad=True), "frozen"),
        (lambda: QuantizedParameter(torch.zeros(3, dtype=torch.int32)), "int32"),
        (
            lambda: OptimizedLinear(8, 8, LoRAConfig(base_weight_sharding=2)),
            "base_weight_sharding=2, but there are 1",
        ),
        (
            lambda: OptimizedLinear(8, 8, LoRAConfig(), device="meta"),
            "meta device",
        ),
    ],
)
def test_what_is_refused(make: object, match: str) -> None:
    """A ConfigError with the value."""
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]


# ---- layers ------------------------------------------------------------------------------------


def test_the_factory() -> None:
    """The class that fits, with dtype and bias."""
    assert type(OptimizedLinear(4, 6)) is nn.Linear
    plain = OptimizedLinear(4, 6, bias=True, dtype=torch.float32)
    assert plain.weight.dtype == torch.float32 and plain.bias is not None
    assert type(OptimizedLinear(4, 6, LoRAConfig(lora_r=2))) is LoRAOptimizedLinear
    both = OptimizedLinear(4, 6, LoRAConfig(lora_r=2), QuantizationConfig())
    assert isinstance(both, LoRAOptimizedLinear) and isinstance(both.weight, QuantizedParameter)
    assert type(OptimizedLinear(4, 6, None, QuantizationConfig())) is QuantizedLinear
    assert {n for n, p in both.named_parameters() if p.requires_grad} == {
        "lora_weight_1.weight",
        "lora_weight_2.weight",
    }


def _parts(layer: LoRAOptimizedLinear) -> tuple[Tensor, Tensor]:
    assert layer.lora_weight_1 is not None and layer.lora_weight_2 is not None
    return layer.lora_weight_1.weight, layer.lora_weight_2.weight


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("host", [None, 0.0, 0.3])
@pytest.mark.parametrize("bias", [False, True])
def test_forward_and_gradients(quantized: bool, host: float | None, bias: bool) -> None:
    """``y = x W^T + b + (alpha / r) B A x`` and its derivatives in float64, to 1e-6."""
    torch.manual_seed(1)
    lora = LoRAConfig(lora_r=3, lora_alpha=6.0)
    if host is not None:
        lora = LoRAConfig(lora_r=3, lora_alpha=6.0, offload=True, offload_ratio=host)
    config = QuantizationConfig(group_size=16) if quantized else None
    layer = OptimizedLinear(7, 5, lora, config, bias=bias, dtype=torch.float32)
    assert isinstance(layer, LoRAOptimizedLinear)
    a, b = _parts(layer)
    assert not b.any() and a.abs().max() <= (6 / ((1 + 5) * 7)) ** 0.5 + 1e-6
    nn.init.normal_(b)
    x = torch.randn(2, 4, 7, requires_grad=True)
    y = layer(x)
    slope = torch.randn_like(y)
    y.backward(slope)
    weight = layer.full_weight().detach().double()
    xd, ad, bd, g = (t.detach().double() for t in (x, a, b, slope))
    offset = layer.bias.double() if bias else 0.0
    wanted = xd @ weight.T + offset + 2.0 * (xd @ ad.T @ bd.T)
    checks = {
        "y": (y, wanted),
        "x": (x.grad, g @ weight + 2.0 * (g @ bd @ ad)),
        "a": (a.grad, 2.0 * (g @ bd).flatten(0, 1).T @ xd.flatten(0, 1)),
        "b": (b.grad, 2.0 * g.flatten(0, 1).T @ (xd @ ad.T).flatten(0, 1)),
        "merged": (layer.merged_weight(), weight + 2.0 * bd @ ad),
    }
    for name, (got, value) in checks.items():
        assert got is not None
        torch.testing.assert_close(got.double(), value, rtol=1e-5, atol=1e-5, msg=name)
    layer.requires_grad_(False)
    assert layer(x.detach()).grad_fn is None


def test_quantized_layer_and_autocast() -> None:
    """The weight is made again for the backward; autocast computes in its dtype."""
    layer = OptimizedLinear(6, 4, None, QuantizationConfig(group_size=8), dtype=torch.float32)
    assert isinstance(layer, QuantizedLinear)
    x = torch.randn(3, 6, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.dequantized_weight().sum(0).expand(3, 6))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("host", [False, True])
def test_copies_pickles_and_state_dicts(quantized: bool, host: bool) -> None:
    """The same outputs; a float weight in its own shape may be loaded into any of them."""
    torch.manual_seed(2)
    lora = LoRAConfig(lora_r=2, offload=host)
    config = QuantizationConfig(group_size=8) if quantized else None
    layer = OptimizedLinear(8, 8, lora, config, dtype=torch.float32)
    assert isinstance(layer, LoRAOptimizedLinear)
    nn.init.normal_(_parts(layer)[1])
    x = torch.randn(3, 8)
    wanted = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), wanted)
    other = OptimizedLinear(8, 8, lora, config, dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), wanted)
    moved = other.to("cpu").half().float()
    assert isinstance(moved, LoRAOptimizedLinear)
    if quantized or host:
        assert torch.equal(moved.full_weight(), layer.full_weight())
    floats = {**layer.state_dict(), "weight": torch.eye(8)}
    other.load_state_dict(floats)
    assert torch.equal(other.full_weight(), torch.eye(8))
    if quantized and not host:
        weight = pickle.loads(pickle.dumps(layer.weight))
        assert torch.equal(weight.dequantized(), layer.full_weight())
        assert not weight.requires_grad
