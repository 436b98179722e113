"""A small decoder-only language model in plain torch; it knows nothing of ranks or shards.

Legend of the shape suffixes: B batch, T time, C channels, H heads, D channels per head, V symbols.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["LanguageModel", "ModelConfig", "generate"]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    Attributes:
        num_symbols: size of the alphabet.
        context: longest sequence, in symbols.
        channels: width of the residual stream.
        layers: number of blocks.
        heads: attention heads per block; divides ``channels``.
    """

    num_symbols: int
    context: int = 64
    channels: int = 128
    layers: int = 2
    heads: int = 4

    def as_dict(self) -> dict[str, Any]:
        """Return the sizes as plain values, to rebuild the model beside its weights."""
        return asdict(self)


def _upcast_matmul(x: Tensor) -> bool:
    """Return whether a product of these tensors is better done in fp32.

    A CPU without 16-bit matrix instructions multiplies bf16 element by element, some ten times
    slower than fp32.  Products of bf16 numbers are exact in fp32, and hardware sums them in fp32
    too, so the result is the same rounding of the same sum.
    """
    return (
        x.dtype == torch.bfloat16
        and x.device.type == "cpu"
        and torch.backends.cpu.get_cpu_capability() in {"DEFAULT", "AVX2"}
    )


class _WideProduct(torch.autograd.Function):
    """``x @ weight.T`` of bf16 tensors through fp32, keeping only the bf16 ones for backward."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_OC: Tensor) -> Tensor:
        ctx.save_for_backward(x_NC, weight_OC)
        return F.linear(x_NC.float(), weight_OC.float()).to(x_NC.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor, Tensor]:
        x_NC, weight_OC = ctx.saved_tensors
        wide_NO = grad_NO.float()
        grad_x_NC = (wide_NO @ weight_OC.float()).to(x_NC.dtype)
        grad_weight_OC = (wide_NO.flatten(0, -2).T @ x_NC.float().flatten(0, -2)).to(
            weight_OC.dtype
        )
        return grad_x_NC, grad_weight_OC


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in the dtype of ``x``."""
    if _upcast_matmul(x):
        product: Tensor = _WideProduct.apply(x, weight)  # type: ignore[no-untyped-call]
        return product
    return F.linear(x, weight)


class Linear(nn.Linear):
    """A linear map without bias that is also quick in bf16 on a CPU."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., width_in) to (..., width_out)."""
        return _product(x, self.weight)


class Attention(nn.Module):
    """Causal self-attention with rotary positions (Su et al. 2021)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = Linear(config.channels, 3 * config.channels)
        self.out = Linear(config.channels, config.channels)

    def forward(self, x_BTC: Tensor, rotation_TD: Tensor) -> Tensor:
        """Return the attention's output, of the shape of ``x_BTC``."""
        B, T, C = x_BTC.shape
        qkv = self.qkv(x_BTC).view(B, T, 3, self.heads, C // self.heads)
        q_BHTD, k_BHTD, v_BHTD = qkv.permute(2, 0, 3, 1, 4)
        q_BHTD, k_BHTD = _rotate(q_BHTD, rotation_TD), _rotate(k_BHTD, rotation_TD)
        if _upcast_matmul(v_BHTD):
            q_BHTD, k_BHTD, v_BHTD = q_BHTD.float(), k_BHTD.float(), v_BHTD.float()
        mixed_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True).to(
            x_BTC.dtype
        )
        out: Tensor = self.out(mixed_BHTD.transpose(1, 2).reshape(B, T, C))
        return out


def _rotations(context: int, width: int) -> Tensor:
    """Return cosines and sines of the rotary angles: (context, 2, width / 2), fp32."""
    speed = 1000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.outer(torch.arange(context), speed)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def _rotate(x_BHTD: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of channels by its position's angle."""
    cos, sin = rotation[: x_BHTD.size(2)].to(x_BHTD.dtype).unbind(1)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """Attention and a feed-forward layer, each on a normalised branch of the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.channels
        self.attention_norm = nn.RMSNorm(width)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = Linear(width, 4 * width)
        self.mlp_out = Linear(4 * width, width)

    def forward(self, x_BTC: Tensor, rotation: Tensor) -> Tensor:
        """Return the residual stream after this block."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC), rotation)
        hidden = F.relu(self.mlp_in(self.mlp_norm(x_BTC))).square()
        out: Tensor = x_BTC + self.mlp_out(hidden)
        return out


class LanguageModel(nn.Module):
    """Predicts the next symbol; the embedding is also the output layer (tied weights)."""

    rotation: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.num_symbols, config.channels)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.channels)
        rotation = _rotations(config.context, config.channels // config.heads)
        self.register_buffer("rotation", rotation, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draw the weights: what writes into the residual stream starts small."""
        nn.init.normal_(self.embedding.weight, std=0.05)
        for module in self.modules():
            if isinstance(module, Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for block in self.blocks:
            assert isinstance(block, Block)
            for last in (block.attention.out, block.mlp_out):
                nn.init.normal_(last.weight, std=0.2 * last.in_features**-0.5)

    def forward(self, symbols_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V), or with targets the mean cross-entropy in nats, fp32.

        Args:
            symbols_BT: int64, at most ``context`` long.
            targets_BT: int64, the symbol that follows each one.
        """
        x_BTC = self.embedding(symbols_BT) * math.sqrt(self.config.channels)
        for block in self.blocks:
            x_BTC = block(x_BTC, self.rotation)
        logits_BTV = _product(self.norm(x_BTC), self.embedding.weight).float()
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: list[int],
    length: int,
    *,
    temperature: float = 0.7,
    seed: int = 0,
) -> list[int]:
    """Return ``prompt`` followed by ``length`` sampled symbols.

    Args:
        model: on any device; its context limits how far it looks back.
        prompt: at least one symbol.
        length: how many symbols to draw.
        temperature: below 1 prefers the likelier symbols.
        seed: of the draws.
    """
    draws = torch.Generator().manual_seed(seed)
    symbols = list(prompt)
    for _ in range(length):
        recent = torch.tensor([symbols[-model.config.context :]])
        logits = model(recent)[0, -1] / temperature
        symbols.append(int(torch.multinomial(logits.softmax(-1), 1, generator=draws)))
    return symbols
