"""The operators of a full and of a shared layer: FLOPs and bytes read of each, for prefill and for decode.

The counts belong to the model, not to a chip or a kernel: no roofline, no overlap, no time. They say what sharing a
selection (IndexShare) can save at a batch and a context, and what it cannot. Rules of counting:

* FLOPs as in `account`; attention is the absorbed, sparse form. A prefill that expands keys and values, or scores all
  positions and masks them, does more.
* Weights are read once a step, at the width they are held in: FP8 codes with their scales where the checkpoint has
  them, except the halves of `kv_b_proj`, which are held in plain form.
* Of the routed experts those are read that some token chose, the expected number of them if each token's choice is
  uniform and independent.
* Cache rows (BF16) are read once a sequence and layer, however many queries of a chunk share them.
* Activations are not counted, but for the float32 index scores that top-k reads: they alone grow with the context.

JSON of `operators(config, ...)`, the stable keys of `glm52 inspect --ops --json`:

    key                         content
    --------------------------  ------------------------------------------------------------------------------------
    batch, context, chunk       as asked for
    layer                       number of the layer that is shown, shared where the plan has such a layer
    prefill, decode             a step of `chunk` tokens, and of one token, of each sequence, ending at `context`
      full, shared              the layer with an indexer and without: {flops, bytes, operators: [{name, shape, flops,
                                bytes, flops_share, bytes_share}]}; shared is null where no layer is
      saved_layer               part of the full layer's {flops, bytes} that the shared one saves
      saved_model               the same of all layers and the head: the plan against an indexer on every layer
    saved_by_batch              decode, other sizes: [{batch, context, flops, bytes}], parts saved of the whole model
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from glm52_jax.config import FULL, SHARED, SPARSE, ModelConfig
from glm52_jax.inputs.lengths import short_length
from glm52_jax.inspect.account import (
    CONTEXTS,
    EMBEDDING,
    active_elements,
    all_full,
    attention_flops,
    index_flops,
    index_key_bytes,
    latent_row_bytes,
    weight_flops,
)
from glm52_jax.params.spec import Param, Stack, Tensor, parameters
from sharding.errors import InputError

BATCHES = (1, 16, 256)
CACHE_FORMAT = "bf16"
_SCORE_BYTES = 4  # an index score is float32

INDEX_SCORES, TOP_K, ATTENTION = "index scores", "top-k", "sparse attention"
LAYER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("norms", ("attention.input_norm", "attention.q_a_norm", "attention.kv_a_norm", "attention.post_norm")),
    ("q_a", ("attention.q_a", "attention.q_a_bias")),
    ("q_b", ("attention.q_b",)),
    ("kv_a", ("attention.kv_a", "attention.kv_a_bias")),
    ("index q", ("indexer.q_b",)),
    ("index k", ("indexer.k", "indexer.k_norm", "indexer.k_norm_bias")),
    ("index weights", ("indexer.weights",)),
    (INDEX_SCORES, ()),
    (TOP_K, ()),
    ("absorb k_up", ("attention.k_up",)),
    (ATTENTION, ()),
    ("v_up", ("attention.v_up",)),
    ("o", ("attention.o", "attention.o_bias")),
    ("dense MLP", ("dense.gate_up", "dense.down")),
    ("router", ("moe.router", "moe.router_bias")),
    ("routed experts", ("moe.gate_up", "moe.down")),
    ("shared expert", ("moe.shared_gate_up", "moe.shared_down")),
)
"""Operators of a layer in the order they run, with the paths of their weights; a layer has those it has weights for."""


@dataclasses.dataclass(frozen=True)
class StepShape:
    """One step: each of `batch` sequences brings `tokens` queries, the last of which sees `context` positions."""

    batch: int
    context: int
    tokens: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "context", "tokens"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.tokens > self.context:
            raise InputError(f"the chunk of {self.tokens} tokens is longer than the context of {self.context}")

    @property
    def queries(self) -> int:
        return self.batch * self.tokens

    @property
    def visible(self) -> int:
        """Pairs of a query and a position up to its own."""
        return self.attended(self.context)

    def attended(self, topk: int) -> int:
        """Pairs of a query and a position it attends to, `topk` at most for each query."""
        before = self.context - self.tokens
        few = min(max(topk - before, 0), self.tokens)  # queries that see no more than topk
        return self.batch * (few * before + few * (few + 1) // 2 + (self.tokens - few) * topk)


@dataclasses.dataclass(frozen=True)
class Operator:
    """One row: its name, the shape of its weights or of what it reads, FLOPs, bytes read."""

    name: str
    shape: str
    flops: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """FLOPs and bytes read, or parts of them."""

    flops: float
    bytes: float


def layer_operators(config: ModelConfig, layer: int, step: StepShape) -> tuple[Operator, ...]:
    """The operators of decoder layer `layer` in `step`."""
    table = {p.path: p for p in parameters(config) if p.stack is not Stack.GLOBAL and layer in p.layers(config)}
    full = config.indexer_types[layer] == FULL
    rows = []
    for name, paths in LAYER:
        held = [table[path] for path in paths if path in table]
        if held:
            rows.append(_weights(config, name, held, layer, step))
        elif name == ATTENTION or (full and not paths):
            rows.append(_CACHED[name](config, step))
    return tuple(rows)


def layer_cost(config: ModelConfig, layer: int, step: StepShape) -> Cost:
    """The sum of a layer's operators."""
    return _sum(layer_operators(config, layer, step))


def step_cost(config: ModelConfig, step: StepShape) -> Cost:
    """All decoder layers, the final norm, and the head for the last token of each sequence; no MTP, no embedding."""
    kinds = list(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    flops, size = 0, 0
    for kind, count in Counter(kinds).items():
        cost = layer_cost(config, kinds.index(kind), step)
        flops, size = flops + count * cost.flops, size + count * cost.bytes
    for param in parameters(config):
        if param.stack is Stack.GLOBAL and param.path != EMBEDDING:
            flops += step.batch * weight_flops(param.elements)
            size += held_bytes(config, param, 0)
    return Cost(flops, size)


def saved(config: ModelConfig, step: StepShape) -> Cost:
    """The part that sharing saves of the model: its plan against an indexer on every layer."""
    return _saved(step_cost(config, step), step_cost(all_full(config), step))


def saved_layer(config: ModelConfig, layer: int, step: StepShape) -> Cost:
    """The part that sharing saves of a layer: `layer` as it is against the same layer with an indexer."""
    return _saved(layer_cost(config, layer, step), layer_cost(all_full(config), layer, step))


def typical_layer(config: ModelConfig) -> int:
    """The layer to show: the first shared one with experts, else the first that is either, else the first."""
    kinds = list(zip(config.indexer_types, config.mlp_layer_types, strict=True))
    shared, sparse = ([i for i, kind in enumerate(kinds) if want in kind] for want in (SHARED, SPARSE))
    both = [i for i in shared if i in sparse]
    return next(iter([*both, *shared, *sparse, 0]))


def held_bytes(config: ModelConfig, param: Param, layer: int) -> int:
    """Bytes that one layer of `param` takes on a device, at the width it is held in."""
    if param.dequantize:
        return Tensor(param.path, param.shape, float32=param.float32).stored_bytes(config)
    return sum(tensor.stored_bytes(config) for tensor in param.published(config, layer))


def experts_read(config: ModelConfig, tokens: int) -> float:
    """Expected number of experts that `tokens` tokens choose, each of them `num_experts_per_tok` uniformly."""
    experts = config.n_routed_experts
    return experts * (1 - (1 - config.num_experts_per_tok / experts) ** tokens)


def operators(
    config: ModelConfig, *, batch: int, context: int, chunk: int, contexts: Sequence[int] = CONTEXTS
) -> dict[str, Any]:
    """The operator table under the stable keys of this module's docstring.

    Args:
        batch: sequences.
        context: positions in the cache at the end of the step.
        chunk: tokens of each sequence in a prefill step.
        contexts: lengths of `saved_by_batch`.

    Raises:
        InputError: a size is not positive, or the chunk is longer than the context.
    """
    layer = typical_layer(config)
    grid = [StepShape(b, length) for length in contexts for b in BATCHES]
    return {
        "batch": batch,
        "context": context,
        "chunk": chunk,
        "layer": layer,
        "prefill": _step(config, layer, StepShape(batch, context, chunk)),
        "decode": _step(config, layer, StepShape(batch, context)),
        "saved_by_batch": [
            {"batch": s.batch, "context": s.context, **dataclasses.asdict(saved(config, s))} for s in grid
        ],
    }


def _step(config: ModelConfig, layer: int, step: StepShape) -> dict[str, Any]:
    shared = config.indexer_types[layer] == SHARED
    return {
        "full": _table(layer_operators(all_full(config), layer, step)),
        "shared": _table(layer_operators(config, layer, step)) if shared else None,
        "saved_layer": dataclasses.asdict(saved_layer(config, layer, step)),
        "saved_model": dataclasses.asdict(saved(config, step)),
    }


def _table(rows: Sequence[Operator]) -> dict[str, Any]:
    total = _sum(rows)
    return {
        "flops": total.flops,
        "bytes": total.bytes,
        "operators": [
            {
                **dataclasses.asdict(row),
                "flops_share": row.flops / total.flops,
                "bytes_share": row.bytes / total.bytes,
            }
            for row in rows
        ],
    }


def _sum(rows: Sequence[Operator]) -> Cost:
    return Cost(sum(row.flops for row in rows), sum(row.bytes for row in rows))


def _saved(plan: Cost, every: Cost) -> Cost:
    return Cost(1 - plan.flops / every.flops, 1 - plan.bytes / every.bytes)


def _weights(config: ModelConfig, name: str, held: list[Param], layer: int, step: StepShape) -> Operator:
    flops = step.queries * weight_flops(sum(active_elements(config, param) for param in held))
    size = float(sum(held_bytes(config, param, layer) for param in held))
    if held[0].experts is not None:
        size *= experts_read(config, step.queries) / held[0].experts
    return Operator(name, _shape(config, name, held), flops, round(size))


def _shape(config: ModelConfig, name: str, held: list[Param]) -> str:
    if name == "norms":
        return "+".join(str(param.elements) for param in held)
    if held[0].path.endswith("gate_up"):
        *_, both, width, embed = held[0].shape
        chosen = f"{config.num_experts_per_tok} of {held[0].experts}, " if held[0].experts else ""
        return f"{chosen}{both + 1}x{width}x{embed}"
    return "x".join(str(size) for size in held[0].shape)


def _index_scores(config: ModelConfig, step: StepShape) -> Operator:
    shape = f"{config.index_n_heads}x{config.index_head_dim}, {short_length(step.context)} keys"
    keys = step.batch * step.context * index_key_bytes(config)[CACHE_FORMAT]
    return Operator(INDEX_SCORES, shape, index_flops(config, step.visible), keys)


def _top_k(config: ModelConfig, step: StepShape) -> Operator:
    shape = f"{min(config.index_topk, step.context)} of {short_length(step.context)}"
    return Operator(TOP_K, shape, 0, step.visible * _SCORE_BYTES)


def _attention(config: ModelConfig, step: StepShape) -> Operator:
    attended = step.attended(config.index_topk)
    rows = min(step.batch * step.context, attended)
    shape = f"{config.num_attention_heads}x{config.latent_width}, {min(config.index_topk, step.context)} rows"
    return Operator(ATTENTION, shape, attention_flops(config, attended), rows * latent_row_bytes(config)[CACHE_FORMAT])


_CACHED = {INDEX_SCORES: _index_scores, TOP_K: _top_k, ATTENTION: _attention}
