"""Ops: the frozen record of callables on which the model is built.

A back end is selected once, by name, when the worker starts: ``reference`` (plain torch: the specification,
and the oracle of tests), ``cpu`` (C++) or ``triton`` (CUDA and ROCm). Each op family packs its own weights:
``pack_*`` converts checkpoint tensors to the private format of its kernels. The ops are cut like the fused
kernels of a GPU, so that all back ends have the same signatures.

Shapes: T tokens in the step, R rows, H hidden, Nq/Nkv heads, D head_dim, E experts, K experts per token, I
intermediate, V vocabulary, L rows of logits. ``x`` is the residual stream, [T, H], in a dtype of the back
end's choice (the reference: float32).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch

    from chorale.kernels.adapters import LoraOps
    from chorale.kernels.draft_steps import Accepted, DraftPasses, DraftRowState, VerifyBatch, VerifyInputs


Precision = Literal["int8", "exact"]  # matrix products of the CPU ops


@dataclass(frozen=True, slots=True)
class AttentionMeta:
    """Positions, contexts and block tables of a step. All layers share one instance.

    ``block_tables`` and ``slots`` are indexed by ``CacheGroup`` (0 full, 1 window). Entry ``p`` of a row's
    table is the block of positions ``p * block_size ...``. Entries past the row's context, and window entries
    completely outside the window, are never read and may have any value. KV pools start as zeros.
    """

    positions: torch.Tensor  # [T] int64, position of each new token in its sequence
    query_start: torch.Tensor  # [R + 1] int32, cumulative num_new
    context_lens: torch.Tensor  # [R] int32, num_computed + num_new
    block_tables: tuple[torch.Tensor, torch.Tensor]  # 2 x [R, max_blocks] int32
    slots: tuple[torch.Tensor, torch.Tensor]  # 2 x [T] int64: block * block_size + offset
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The inputs of ``GptOss.forward`` for one step."""

    token_ids: torch.Tensor  # [T] int64
    logits_index: torch.Tensor  # [L] int64: which of the T tokens need logits
    attention: AttentionMeta
    adapters: Any = None  # those of the tokens, for ``LoraOps``; None: no token has an adapter


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention parameters of layers that can share a plan."""

    num_heads: int  # Nq
    num_kv_heads: int  # Nkv
    head_dim: int  # D
    sliding_window: int  # tokens that a layer of the window group sees, the query's own included
    full_window: int = 0  # the same of the full group; 0: all

    def window(self, group: int) -> int:
        """Return how many tokens a layer of a group sees; 0: all."""
        return self.sliding_window if group else self.full_window


class LayerCache(NamedTuple):
    """What a layer's attention needs to know of a step, and the layer's keys and values."""

    plan: Any  # the result of ``plan_attention`` for this step
    group: int  # a ``CacheGroup``
    kv: torch.Tensor  # [num_blocks, 2, Nkv, block_size, D]; the second index is K (0) or V (1)
    rope: Any = None  # [T, D] float32: cosines, then sines, of the new tokens; ``attention`` does not need it


@dataclass(frozen=True, slots=True)
class QkvWeights:
    """First half of attention. Rows of ``linear`` are q heads, then k heads, then v heads."""

    norm: torch.Tensor  # [H] float32
    linear: Any  # pack_linear of [(Nq + 2 Nkv) * D, H] and its bias


@dataclass(frozen=True, slots=True)
class PairNorms:
    """The norms of a draft head's two inputs: a token's embedding and a state."""

    token: torch.Tensor  # [H] float32
    state: torch.Tensor  # [H] float32
    keeps_normed: bool  # the residual stream starts with the normed state instead of the state
    dtype: torch.dtype  # type of the head's products


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each q and k head, of one layer or of the keys of ``Nl`` layers (then Nq is 0)."""

    weight: torch.Tensor  # [Nl, Nq + Nkv, D] float32
    dtype: torch.dtype  # type of q


@dataclass(frozen=True, slots=True)
class RouterWeights:
    """Norm and router of the expert layer."""

    norm: torch.Tensor  # [H] float32
    linear: Any  # pack_router of [E, H] and its bias
    top_k: int  # K
    dtype: torch.dtype | None = None  # type of the experts' products; None: float32


class Routed(NamedTuple):
    """The input of an expert layer, and the experts that each token chose."""

    normed: torch.Tensor  # [T, H]
    expert_ids: torch.Tensor  # [T, K] int64
    gates: torch.Tensor  # [T, K] float32: the factors of the experts' results


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """One layer's experts in the checkpoint's format: MXFP4 (``*_blocks``, ``*_scales``) or dense.

    Rows of gate_up alternate gate, up, gate, up, ... The tensors may be views of a mapped file: a back end
    that keeps them must not write to them. ``dtype``: type of products with decoded weights.
    """

    gate_up_bias: torch.Tensor  # [E, 2 I]
    down_bias: torch.Tensor  # [E, H]
    swiglu_limit: float
    swiglu_alpha: float
    num_layers: int  # layers of the model, so that a back end can plan its memory
    dtype: torch.dtype
    gate_up_blocks: torch.Tensor | None = None  # [E, 2 I, H / 32, 16] uint8
    gate_up_scales: torch.Tensor | None = None  # [E, 2 I, H / 32] uint8
    down_blocks: torch.Tensor | None = None  # [E, H, I / 32, 16] uint8
    down_scales: torch.Tensor | None = None  # [E, H, I / 32] uint8
    fp8_activations: bool = False  # products of many tokens may round their inputs to e4m3
    # The checkpoint's scales of these inputs. None: the back end chooses them.
    gate_up_input_scale: float | None = None
    down_input_scale: float | None = None
    gate_up: torch.Tensor | None = None  # [E, H, 2 I]
    down: torch.Tensor | None = None  # [E, I, H]


NO_FINITE_LOGITS = -1  # no token, because the row's logits were not finite
NOTHING_ALLOWED = -2  # no token, because every token was forbidden; the logits were finite


@dataclass(frozen=True, slots=True)
class Allowed:
    """The tokens that a grammar allows: row n may have those whose bits (lowest first) are set in
    ``octets[index[n]]``; index -1: all tokens."""

    index: torch.Tensor  # [N] int32
    octets: torch.Tensor  # [G, V / 8 or more] uint8


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """Parameters for sampling N tokens. ``kernels/reference`` defines keys (``noise.py``) and filters
    (``filters.py``)."""

    keys: torch.Tensor  # [N, 2] int32, with any strides
    temperature: torch.Tensor  # [N] float32; 0: greedy
    rows: torch.Tensor  # [N] int32: device rows of the tokens
    # [N, 3] float32: top_k (V or more: off), top_p (1: off), min_p (0: off). None: no row has a filter.
    filters: torch.Tensor | None = None
    allowed: Allowed | None = None  # None: no row has a grammar
    # [N, EARLY_STOPS] int32, with any strides: stop ids that a row may not have before its ``min_tokens``;
    # unused entries are -1, and the first is -1 if there are none. None: no row has early stops.
    early_stops: torch.Tensor | None = None

    def at(self, some: slice | torch.Tensor) -> SamplingInputs:
        """Return the parameters of some tokens: a slice, or indices [M] int64."""
        allowed, filters, stops = self.allowed, self.filters, self.early_stops
        return SamplingInputs(
            self.keys[some],
            self.temperature[some],
            self.rows[some],
            None if filters is None else filters[some],
            None if allowed is None else Allowed(allowed.index[some], allowed.octets),
            None if stops is None else stops[some],
        )


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The host's inputs for a step in which N rows compute one token each."""

    rows: torch.Tensor  # [N] int32 device row
    num_computed: torch.Tensor  # [N] int32: the position of the new token
    token_ids: torch.Tensor  # [N] int32; negative: the row's last token
    # [2, N] int32, by group: the block of that position if the block is new, else -1.
    new_blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Memory with fixed addresses: row state (read and appended to), and the model's input (written).

    The written tensors may be longer than N; only their first N entries are used.
    """

    last_token: torch.Tensor  # [rows] int64
    block_tables: torch.Tensor  # [2, rows, width] int32
    token_ids: torch.Tensor  # [N] int64, written
    positions: torch.Tensor  # [N] int64, written
    context_lens: torch.Tensor  # [N] int32, written
    slots: torch.Tensor  # [2, N] int64, written
    tables: torch.Tensor  # [2, N, width] int32, written as far as layers can see
    block_size: int
    window: int


class Sample(Protocol):
    """Samples one token per row."""

    def __call__(
        self, logits: torch.Tensor, draws: SamplingInputs, last_token: torch.Tensor, out: torch.Tensor
    ) -> None:
        """logits [N, V] float32 -> ``out`` [N] int64, and ``last_token`` [rows] int64 at ``draws.rows``.

        A row without a token gets ``NO_FINITE_LOGITS`` or ``NOTHING_ALLOWED`` in ``out``.
        """
        ...


class MakeSampler(Protocol):
    def __call__(
        self, forbidden: torch.Tensor, rows_at_once: int, *, ids: torch.Tensor | None = None
    ) -> Sample:
        """Make a sampler. ``ids`` [columns] int64: the token id of each logits column; this rank must have
        all columns. None: columns are token ids. Masks, noise and ``out`` always use token ids."""
        ...


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Sizes that determine the memory for exchanges between ranks."""

    hidden: int
    tokens: int  # maximum tokens per step
    dtype: torch.dtype  # type of the model


class PageCopies(Protocol):
    """Copies blocks between KV tensors and other device memory. A page is one block of all tensors,
    concatenated."""

    def gather(self, blocks: torch.Tensor, pages: torch.Tensor) -> None:
        """Copy blocks [N] int32 to ``pages`` [N, bytes per page] uint8."""
        ...

    def scatter(self, pages: torch.Tensor, blocks: torch.Tensor) -> None:
        """Copy ``pages`` to distinct blocks."""
        ...


@dataclass(frozen=True, slots=True)
class DraftOps:
    """The ops of a draft head, in addition to ``plan_attention``, ``attention`` and ``lm_head``. Every rank
    has the whole head: these ops exchange nothing."""

    # (x [T, P * W], norms [P, W] float32, eps) -> [T, P * W] float32, each of the P parts normed
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

    # (x [T, P * W], norms or None, eps, packed [N, P * W]) -> product of the normed x, [T, N] float32
    linear: Callable[[torch.Tensor, torch.Tensor | None, float, Any], torch.Tensor]

    # (embedding [V, H], token_ids [T], states [T, H] float32, norms, eps)
    # -> (normed [T, 2 H]: embeddings, then states; x [T, H] float32: new memory, or the normed states)
    join: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, PairNorms, float], tuple[torch.Tensor, torch.Tensor]
    ]

    # (normed [T, K], packed [(Nq + 2 Nkv) * D, K] with bias, cache) -> q [T, Nq, D]
    # Like ``Ops.qkv_rope_cache`` for normed input.
    qkv_rope_cache: Callable[[torch.Tensor, Any, LayerCache], torch.Tensor]

    # (qkv [T, Nl * (Nq + 2 Nkv) * D] float32, norms, eps, cache with kv [Nl, ...]) -> q
    # The rest of qkv_rope_cache after a product with bias, with a norm of each q and k head before rotary.
    # q [T, Nq, D] is that of the only layer; with several, the plan's shape has Nq 0.
    norm_rope_cache: Callable[[torch.Tensor, HeadNorms, float, LayerCache], torch.Tensor]

    # (y [T, K], packed [H, K], x [T, H]) -> x + product. May overwrite x.
    project_add: Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]

    # (x [T, H], norm [H] float32, pack_gated, eps) -> silu(gate) * up of the normed x, [T, I]
    gated_silu: Callable[[torch.Tensor, torch.Tensor, Any, float], torch.Tensor]

    pack_gated: Callable[[torch.Tensor, torch.Tensor], Any]  # (gate [I, H], up [I, H])


@dataclass(frozen=True, slots=True)
class Ops:
    """One back end. ``kernels/reference/`` defines each callable exactly.

    One layer of each group shares a KV tensor.
    """

    name: str

    # (meta, shape, block_size) -> plan. Called once per step, for the work that all layers share.
    plan_attention: Callable[[AttentionMeta, AttentionShape, int], Any]

    # (embedding [V, H] or ``pack_host_rows``, token_ids [T]) -> x [T, H]
    embed: Callable[[Any, torch.Tensor], torch.Tensor]

    # (x, normed or None, weights, eps, cache) -> q [T, Nq, D]
    # Norm, QKV, bias, rotary; writes k and v of the new tokens into kv at the group's slots. ``normed``: the
    # normed x that ``moe`` of the previous layer returned for these weights and this eps.
    qkv_rope_cache: Callable[[torch.Tensor, torch.Tensor | None, QkvWeights, float, LayerCache], torch.Tensor]

    # (q, sinks [Nq] float32, cache) -> [T, Nq * D]. After qkv_rope_cache of the same layer.
    attention: Callable[[torch.Tensor, torch.Tensor, LayerCache], torch.Tensor]

    # (attended [T, Nq * D], linear, x, weights, eps)
    # -> (new x: x + linear(attended), its norm and experts)
    # Output projection, residual, norm, router, top-k and softmax. May overwrite x.
    project_and_route: Callable[
        [torch.Tensor, Any, torch.Tensor, RouterWeights, float], tuple[torch.Tensor, Routed]
    ]

    # (routed, experts, x, the next layer's QkvWeights, eps)
    # -> (new x: x + sum of gate * expert(normed), its norm for the next layer's qkv_rope_cache)
    # May overwrite x. For the last layer, the next layer's weights are None. Returns None instead of the norm
    # if qkv_rope_cache computes it.
    moe: Callable[
        [Routed, Any, torch.Tensor, QkvWeights | None, float], tuple[torch.Tensor, torch.Tensor | None]
    ]

    # (x, logits_index [L], norm [H], head, eps) -> logits [L, V] float32
    lm_head: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, float], torch.Tensor]

    # (weight [N, K], bias [N] or None)
    pack_linear: Callable[[torch.Tensor, torch.Tensor | None], Any]
    # (weight [E, H] float32, bias [E] float32, type of the experts' products)
    pack_router: Callable[[torch.Tensor, torch.Tensor, torch.dtype], Any]
    pack_experts: Callable[[ExpertTensors], Any]
    pack_head: Callable[[torch.Tensor], Any]  # ([V, H])

    # (forbidden [V] uint8: ids that are never sampled; rows to process at once) -> ``Sample``. Called once.
    make_sampler: MakeSampler

    # (given, state): writes the fields that ``DecodeState`` marks as written.
    decode_inputs: Callable[[DecodeInputs, DecodeState], None]

    # Steps that verify drafts (``kernels/draft_steps.py``).
    verify_inputs: Callable[[VerifyInputs, DraftRowState, VerifyBatch], None]
    # (samples [N] int64, batch, given, state, written, acceptance probabilities [K] float32 or None)
    accept: Callable[
        [torch.Tensor, VerifyBatch, VerifyInputs, DraftRowState, Accepted, torch.Tensor | None], None
    ]
    draft_passes: Callable[[torch.Tensor, DraftRowState, DraftPasses], None]  # rows [R] int32

    # (KV tensors [blocks, ...] of the model and of a draft head) -> copies of their pages
    page_copies: Callable[[Sequence[torch.Tensor]], PageCopies]
    # pack_linear for the attention's output projection. None: the same function
    pack_output: Callable[[torch.Tensor, torch.Tensor | None], Any] | None = None

    # (pack_linear or pack_head) -> the same, with a smaller copy of the weights for few tokens, if the ops
    # have kernels for it. None: they have none.
    pack_compact: Callable[[Any], Any] | None = None

    # lm_head returns the logits of the whole vocabulary on every rank.
    has_whole_logits: bool = False

    draft: DraftOps | None = None  # None: draft heads are not supported
    lora: LoraOps | None = None  # None: adapters are not supported

    # (embedding [V, H] in host memory, device) -> packed, to stay in host memory. None: not supported
    pack_host_rows: Callable[[torch.Tensor, torch.device], Any] | None = None

    detail: str = ""  # shown after the name

    # kv may be float8_e4m3fn with scale 1; writes saturate (``kernels/reference/kv_elements.py``).
    supports_fp8_kv: bool = False

    # pack_experts decodes MXFP4; it gets blocks and scales in host memory.
    decodes_experts: bool = False

    # pack_linear and pack_head accept weights of any float type, so they get the checkpoint's type.
    keeps_dtypes: bool = False

    # A step of one new token per row never waits for the host, so it can be captured in a graph.
    capturable: bool = False

    # (function that starts the compile processes) -> ``triton.precompile.compiler.Precompiler``. Raises
    # ``RuntimeError`` if precompilation does not work here. None: there is nothing to compile.
    precompiler: Callable[[Callable[[], Any]], Any] | None = None

    # (own) -> [ranks, *own.shape]: a few float32 numbers of all ranks. None: ``Communicator.all_gather``.
    gather_few: Callable[[torch.Tensor], torch.Tensor] | None = None

    # Returns the same ops with sums over ranks through shared memory, or None if ranks share none; called on
    # all ranks. None: one rank, or a back end without such kernels.
    over_peers: Callable[[StepSizes, torch.device], Ops | None] | None = None

    def __str__(self) -> str:
        return f"{self.name} ({self.detail})" if self.detail else self.name


def with_compact(ops: Ops) -> Ops:
    """Return ops whose ``pack_linear`` and ``pack_head`` include ``pack_compact``."""
    compact = ops.pack_compact
    if compact is None:
        return ops
    return replace(
        ops,
        pack_linear=lambda weight, bias: compact(ops.pack_linear(weight, bias)),
        pack_head=lambda weight: compact(ops.pack_head(weight)),
    )
