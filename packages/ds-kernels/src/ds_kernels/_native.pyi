from collections.abc import Sequence
from typing import TypedDict, type_check_only

from torch import Tensor

@type_check_only
class _BuildInfo(TypedDict):
    compiler: str
    compiler_version: str
    cxx_standard: int
    flags: str
    openmp: bool
    cuda_version: str
    cuda_architectures: str
    cuda_sources: str

@type_check_only
class _Region:
    def __buffer__(self, flags: int, /) -> memoryview: ...

@type_check_only
class _Segment:
    def address(self) -> str: ...
    def contains(self, tensor: Tensor, /) -> bool: ...
    def has_huge_pages(self) -> bool: ...
    def allocate(self, num_bytes: int, /) -> _Region: ...

@type_check_only
class _Group:
    def close(self) -> None: ...
    def gather(self, what: str, flat: Tensor, shard: Tensor | None, /) -> int: ...
    def reduce(self, what: str, flat: Tensor, out: Tensor, accumulate: bool, /) -> int: ...
    def all_to_all(
        self, what: str, send: Sequence[Tensor], receive: Sequence[Tensor], /
    ) -> int: ...
    def complete(self, channel: int, index: int, /) -> None: ...
    def settle(self, channel: int, index: int, /) -> None: ...
    def completed(self, channel: int, index: int, /) -> bool: ...
    def all_reduce(self, what: str, tensor: Tensor, /) -> None: ...
    def reduce_scatter(self, what: str, flat: Tensor, out: Tensor, accumulate: bool, /) -> None: ...
    def all_gather(self, what: str, row: Tensor, out: Tensor, /) -> None: ...
    def broadcast(self, what: str, tensor: Tensor, source: int, /) -> None: ...

@type_check_only
class Native:
    # The functions of the module, as methods so that the module has a type.

    def build_info(self) -> _BuildInfo: ...
    def cpu_level(self) -> str: ...
    def cpu_level_in_use(self) -> str: ...
    def set_cpu_level(self, name: str) -> None: ...

    # adam
    def adam_(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adamw: bool,
        bias_correction: bool,
        grad_scale: float,
        out: Tensor | None,
        undo: Tensor | None,
        /,
    ) -> None: ...
    def adam_list_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        step: int,
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        adamw: bool,
        bias_correction: bool,
        grad_scale: float,
        outs: Sequence[Tensor] | None,
        undos: Sequence[Tensor] | None,
        /,
    ) -> None: ...
    def adam_bound_(
        self, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, /
    ) -> None: ...

    # bias_activation
    def bias_activation_(
        self, out: Tensor, x: Tensor, bias: Tensor | None, activation: int, /
    ) -> None: ...
    def bias_activation_backward_(
        self,
        grad_x: Tensor,
        grad_bias: Tensor | None,
        partials: Tensor | None,
        grad: Tensor,
        x: Tensor,
        bias: Tensor | None,
        activation: int,
        /,
    ) -> None: ...

    # gated_activation
    def gated_activation_(
        self, out: Tensor, gate: Tensor, up: Tensor | None, activation: int, /
    ) -> None: ...
    def gated_activation_backward_(
        self,
        grad_gate: Tensor,
        grad_up: Tensor | None,
        grad: Tensor,
        gate: Tensor,
        up: Tensor | None,
        activation: int,
        /,
    ) -> None: ...

    # layer_norm
    def layer_norm_(
        self,
        out: Tensor,
        sum: Tensor | None,
        statistics: Tensor,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        /,
    ) -> None: ...
    def layer_norm_backward_(
        self,
        grad_s: Tensor,
        grad_weight: Tensor | None,
        grad_bias: Tensor | None,
        partials: Tensor | None,
        grad: Tensor,
        grad_sum: Tensor | None,
        s: Tensor,
        weight: Tensor | None,
        statistics: Tensor,
        /,
    ) -> None: ...

    # rms_norm
    def rms_norm_(
        self,
        out: Tensor,
        sum: Tensor | None,
        rstd: Tensor,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        /,
    ) -> None: ...
    def rms_norm_backward_(
        self,
        grad_s: Tensor,
        grad_weight: Tensor | None,
        partials: Tensor | None,
        grad: Tensor,
        grad_sum: Tensor | None,
        s: Tensor,
        weight: Tensor | None,
        rstd: Tensor,
        /,
    ) -> None: ...

    # rotary
    def rotary_(
        self,
        query_out: Tensor,
        key_out: Tensor | None,
        query: Tensor,
        key: Tensor | None,
        cosine: Tensor,
        sine: Tensor,
        positions: Tensor | None,
        interleaved: bool,
        inverse: bool,
        /,
    ) -> None: ...

    # elementary
    def elementary_(self, function: int, out: Tensor, x: Tensor, /) -> None: ...
    def convert_(self, out: Tensor, x: Tensor, /) -> None: ...

    # paged_attention
    def paged_attention(
        self,
        out: Tensor,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int,
        alibi_slopes: Tensor | None,
        /,
    ) -> None: ...

    # block_sparse_attention
    def block_sparse_attention(
        self,
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Tensor,
        block: int,
        scale: float,
        causal: bool,
        key_bias: Tensor | None,
        /,
    ) -> None: ...
    def block_sparse_attention_backward(
        self,
        query_grad: Tensor,
        key_grad: Tensor,
        value_grad: Tensor,
        grad: Tensor,
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: Tensor,
        block: int,
        scale: float,
        causal: bool,
        key_bias: Tensor | None,
        /,
    ) -> None: ...

    # evoformer_attention
    def evoformer_attention(
        self,
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask_bias: Tensor | None,
        pair_bias: Tensor | None,
        scale: float,
        /,
    ) -> None: ...
    def evoformer_attention_backward(
        self,
        query_grad: Tensor,
        key_grad: Tensor,
        value_grad: Tensor,
        mask_grad: Tensor | None,
        pair_grad: Tensor | None,
        grad: Tensor,
        out: Tensor,
        lse: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask_bias: Tensor | None,
        pair_bias: Tensor | None,
        scale: float,
        /,
    ) -> None: ...

    # grouped_matmul
    def grouped_matmul(
        self, out: Tensor, x: Tensor, weight: Tensor, bounds: Tensor, transposed: bool, /
    ) -> None: ...
    def grouped_matmul_weight_grad(
        self, out: Tensor, x: Tensor, grad: Tensor, bounds: Tensor, /
    ) -> None: ...

    # shm
    ShmFailure: type[RuntimeError]
    def ShmSegment(self, capacity_bytes: int, /) -> _Segment: ...
    def ShmGroup(
        self,
        rank: int,
        segment: _Segment,
        addresses: list[str],
        timeout_s: float,
        chunk_bytes: int,
        /,
    ) -> _Group: ...
    # kv_cache
    def kv_cache_update_(
        self,
        query: Tensor | None,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slots: Tensor,
        positions: Tensor | None,
        cosine: Tensor | None,
        sine: Tensor | None,
        interleaved: bool,
        /,
    ) -> None: ...

    # moe_routing
    def top_k_gating(
        self, weights: Tensor, experts: Tensor, logits: Tensor, normalize: bool, /
    ) -> None: ...
    def expert_rows(self, rows: Tensor, bounds: Tensor, experts: Tensor, /) -> None: ...
    def moe_scatter(self, out: Tensor, x: Tensor, rows: Tensor, /) -> None: ...
    def moe_combine(self, out: Tensor, x: Tensor, rows: Tensor, weights: Tensor, /) -> None: ...

    # ragged_gather
    def ragged_embedding(
        self,
        out: Tensor,
        table: Tensor,
        tokens: Tensor,
        position_table: Tensor | None,
        positions: Tensor | None,
        /,
    ) -> None: ...
    def last_rows(self, out: Tensor, hidden: Tensor, query_start: Tensor, /) -> None: ...

    # random_ltd
    def token_sort(self, out: Tensor, indices: Tensor, length: int, /) -> None: ...
    def token_gather(self, out: Tensor, x: Tensor, indices: Tensor, /) -> None: ...
    def token_spread(
        self, out: Tensor, base: Tensor | None, rows: Tensor | None, indices: Tensor, /
    ) -> None: ...
    # quantize
    def quantize_(
        self,
        values: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        x: Tensor,
        error: Tensor | None,
        code: int,
        cols: int,
        block_size: int,
        outer: int,
        middle: int,
        power_of_two: bool,
        seed: int | None,
        error_decay: float,
        /,
    ) -> None: ...
    def dequantize_(
        self,
        out: Tensor,
        values: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        code: int,
        cols: int,
        block_size: int,
        /,
    ) -> None: ...
