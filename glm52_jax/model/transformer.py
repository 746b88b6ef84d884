"""The model: embedding, a scan over the layers, final norm, head.

`extend` is the one path through the layers; `forward` and `trace` run it over whole texts, the steps of `infer` over
chunks. Everything is a pure function of parameters, cache and tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.cache.page_sharding import TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.config import SPARSE, ModelConfig
from glm52_jax.inputs.values import token_batch
from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.model import embedding, mtp
from glm52_jax.model.decoder_layer import ExecutionPolicy, LayerIndex, decoder_layer
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings
from sharding.layout import SINGLE, Layout

Params = dict[str, Any]
"""Nested dictionaries of arrays, by the paths of the parameter table: `params["attention"]["q_b"]`."""


@flax.struct.dataclass
class LayerTrace:
    """What the layers did, one entry a layer: residual stream before it, its selection, its experts."""

    hidden: jax.Array  # [layers, batch, tokens, embed]
    selection: Selection  # [layers, batch, tokens, ...]
    experts: jax.Array  # int32 [layers, batch * tokens, num_experts_per_tok], -1 on dense layers


@flax.struct.dataclass
class Trace:
    """Everything that a run over whole texts shows; `tokens` has shape `[batch, length]`.

    Attributes:
        logits: float32 `[batch, length, vocab]`.
        hidden: `[layers + 1, batch, length, embed]`, the stream before each layer, then after the final norm.
        topk: int32 `[layers, batch, length, k]`, the columns of `tokens` that each query attends to, ascending, then
            -1; `k` is `index_topk` or `length`, whichever is less.
        experts: int32 `[moe_layers, batch * length, num_experts_per_tok]`, ascending; -1 for padding.
        mtp_logits: float32 `[batch, length - 1, vocab]`; row p is made of the hidden state at p and the token at
            p + 1. None without an MTP layer.
    """

    logits: jax.Array
    hidden: jax.Array
    topk: jax.Array
    experts: jax.Array
    mtp_logits: jax.Array | None


def extend(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    cache: PagedCache,
    policy: ExecutionPolicy,
    *,
    traced: bool = False,
    unroll: int = 1,
) -> tuple[jax.Array, PagedCache, LayerTrace | None]:
    """Runs the layers over a chunk of tokens and adds it to the cache.

    Args:
        tokens: int32 `[batch, tokens]`, any number at any position: a prompt, a chunk of it, one token, some drafts.
        positions: int32 `[batch, tokens]`, consecutive within a sequence; -1 for padding, on either side.
        cache: holds every earlier position of each sequence.
        forms: which of its equal forms the step uses.
        traced: also return what each layer did.
        unroll: layers a step of the scan.

    Returns:
        Hidden states after the final norm `[batch, tokens, embed]`, the cache with the chunk in it, the trace.
    """
    chex.assert_rank(tokens, 2)
    chex.assert_equal_shape((tokens, positions))
    x = embedding.embed_tokens(params["embed"], tokens, compute_dtype(params), policy.layout)
    places = TokenPositions.of(policy.layout, cache, positions)
    rotary = Rotary.at(positions, config.qk_rope_head_dim, config.rope_theta)

    def body(carry: tuple[jax.Array, PagedCache, Selection], place: LayerIndex) -> tuple[Any, LayerTrace | None]:
        before, cache, selection = carry
        x, cache, selection, experts = decoder_layer(
            params, config, place, before, rotary, places, cache, selection, policy
        )
        return (x, cache, selection), LayerTrace(before, selection, experts) if traced else None

    start = (x, cache, policy.no_selection(config, cache, *tokens.shape))
    (x, cache, _), layers = scan_layers(body, start, LayerIndex.plan(config), unroll)
    return rms_norm(x, params["norm"], config.rms_norm_eps), cache, layers


def scan_layers(body: Any, start: Any, plan: LayerIndex, unroll: int) -> Any:
    """`lax.scan` over the layers; a kind that all share is passed as a Python bool, so that only it is traced."""
    known = {f: bool(flags[0]) for f in ("full", "dense") if len(set((flags := getattr(plan, f)).tolist())) == 1}
    return jax.lax.scan(lambda carry, place: body(carry, place._replace(**known)), start, plan, unroll=unroll)


def model_logits(params: Params, hidden: jax.Array, layout: Layout = SINGLE) -> jax.Array:
    """float32 logits `[..., vocab]` of hidden states after the final norm."""
    return embedding.project_logits(params["head"], hidden, layout)


def compute_dtype(params: Params) -> jnp.dtype:
    """The dtype of the residual stream and of the cache: that of the embedding."""
    return params["embed"].dtype


@with_project_settings
def forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.typing.ArrayLike,
    mask: jax.typing.ArrayLike | None = None,
    *,
    policy: ExecutionPolicy | None = None,
    cache_format: CacheFormat | None = None,
) -> jax.Array:
    """Logits of whole texts.

    Args:
        params: from `load_params` or `init_params`.
        tokens: int `[batch, length]`.
        mask: bool `[batch, length]`, False for padding on any side; None for none. Positions count the real tokens.
        forms: which of its equal forms to use; the best for the length when None.
        cache_format: how the cache keeps its rows; plain when None. The others round them.

    Returns:
        float32 `[batch, length, vocab]`; rows under padding mean nothing. What is computed is returned: weights that
        are NaN or infinite give such logits, and in indexers and routers finite ones of another choice.

    Raises:
        InputError: a shape that does not fit, a token that the vocabulary has not, a text that is too long.
    """
    tokens, mask = _checked(config, tokens, mask)
    form = cache_format or PLAIN_CACHE
    return _forward(params, config, tokens, mask, policy or _best_forms(params, config, tokens, form), form)


@with_project_settings
def trace(
    params: Params,
    config: ModelConfig,
    tokens: jax.typing.ArrayLike,
    mask: jax.typing.ArrayLike | None = None,
    *,
    policy: ExecutionPolicy | None = None,
    cache_format: CacheFormat | None = None,
) -> Trace:
    """Like `forward`, with what every layer did. See `Trace`."""
    tokens, mask = _checked(config, tokens, mask)
    form = cache_format or PLAIN_CACHE
    return _trace(params, config, tokens, mask, policy or _best_forms(params, config, tokens, form), form)


@partial(jax.jit, static_argnames=("config", "policy", "form"))
def _forward(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    mask: jax.Array,
    policy: ExecutionPolicy,
    form: CacheFormat = PLAIN_CACHE,
) -> jax.Array:
    order = _real_first(mask)
    hidden, _, _ = _whole(params, config, tokens, mask, order, policy, form, traced=False)
    return _unpack(model_logits(params, hidden), order)


@partial(jax.jit, static_argnames=("config", "policy", "form"))
def _trace(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    mask: jax.Array,
    policy: ExecutionPolicy,
    form: CacheFormat = PLAIN_CACHE,
) -> Trace:
    order = _real_first(mask)
    hidden, cache, layers = _whole(params, config, tokens, mask, order, policy, form, traced=True)
    assert layers is not None
    batch, length = tokens.shape
    streams = jnp.concatenate([layers.hidden, hidden[None]])
    rows = jax.vmap(lambda selection: selection.sorted_indices(min(config.index_topk, length)))(layers.selection)
    columns = jnp.take_along_axis(order[None, :, None], jnp.maximum(rows, 0), axis=-1)
    columns = jnp.where(rows < 0, jnp.iinfo(jnp.int32).max, columns)  # sorts behind every column
    columns = jnp.sort(columns, axis=-1)
    columns = jnp.where(columns == jnp.iinfo(jnp.int32).max, -1, columns)
    sparse = np.flatnonzero([kind == SPARSE for kind in config.mlp_layer_types])
    experts = jnp.sort(layers.experts[sparse], axis=-1)
    experts = experts.reshape(len(experts), batch, length, -1)
    return Trace(
        logits=_unpack(model_logits(params, hidden), order),
        hidden=jax.vmap(lambda stream: _unpack(stream, order))(streams),
        topk=jax.vmap(lambda columns: _unpack(columns, order))(columns),
        experts=jax.vmap(lambda e: _unpack(e, order))(experts).reshape(len(experts), batch * length, -1),
        mtp_logits=_mtp_logits(params, config, tokens, mask, order, hidden, cache, policy),
    )


def _mtp_logits(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    mask: jax.Array,
    order: jax.Array,
    hidden: jax.Array,
    cache: PagedCache,
    policy: ExecutionPolicy,
) -> jax.Array | None:
    if "mtp" not in params:
        return None
    if tokens.shape[1] == 1:  # nothing has a successor
        return jnp.zeros((tokens.shape[0], 0, config.vocab_size), jnp.float32)
    packed = jnp.take_along_axis(tokens, order, axis=1)
    positions = _positions(mask)
    known = positions[:, 1:] >= 0  # the last token of a text has no successor
    positions = jnp.where(known, positions[:, :-1], -1)
    out, _, _ = mtp.mtp_layer(params, config, hidden[:, :-1], packed[:, 1:], positions, cache, policy)
    padded = jnp.pad(mtp.mtp_logits(params, out), ((0, 0), (0, 1), (0, 0)))
    return _unpack(padded, order)[:, :-1]


def _whole(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    mask: jax.Array,
    order: jax.Array,
    policy: ExecutionPolicy,
    form: CacheFormat,
    *,
    traced: bool,
) -> tuple[jax.Array, PagedCache, LayerTrace | None]:
    """`extend` over whole texts with a cache of their length; results in packed order."""
    config = config if "mtp" in params else config.without_mtp()
    cache = _cache_of(params, config, tokens, form, policy)
    packed = jnp.take_along_axis(tokens, order, axis=1)
    return extend(params, config, packed, _positions(mask), cache, policy, traced=traced)


def _cache_of(
    params: Params, config: ModelConfig, tokens: jax.Array, form: CacheFormat, policy: ExecutionPolicy
) -> PagedCache:
    """A cache for whole texts: one page a text, or pages and rows as the kernels for TPUs want them."""
    (batch, length), dtype = tokens.shape, compute_dtype(params)
    if Target.of(policy.backend) is None:
        return PagedCache.create(config, batch, length, dtype=dtype, page_size=length, form=form)
    return PagedCache.create(config, batch, length, dtype=dtype, form=form.on("tpu", config, dtype))


def _best_forms(params: Params, config: ModelConfig, tokens: jax.Array, form: CacheFormat) -> ExecutionPolicy:
    length = tokens.shape[1]
    best = ExecutionPolicy.best(length)
    return best.for_cache(config, jax.eval_shape(lambda: _cache_of(params, config, tokens, form, best)), length)


def _real_first(mask: jax.Array) -> jax.Array:
    """Columns of each row in packed order: real tokens first, in order, then padding."""
    return jnp.argsort(~mask, axis=1, stable=True).astype(jnp.int32)


def _positions(mask: jax.Array) -> jax.Array:
    """Positions in packed order: 0, 1, ... for the real tokens, then -1."""
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)
    return jnp.where(columns < jnp.sum(mask, axis=1, keepdims=True), columns, -1)


def _unpack(packed: jax.Array, order: jax.Array) -> jax.Array:
    """`[batch, length, ...]` from packed order back to the columns of the caller."""
    back = jnp.argsort(order, axis=1)
    return jnp.take_along_axis(packed, back.reshape(*back.shape, *[1] * (packed.ndim - 2)), axis=1)


def _checked(
    config: ModelConfig, tokens: jax.typing.ArrayLike, mask: jax.typing.ArrayLike | None
) -> tuple[jax.Array, jax.Array]:
    """Tokens as int32 and a mask as bool of the same shape; their values are checked where they are known."""
    given = [array for array in (tokens, mask) if isinstance(array, jax.Array)]
    if all(not isinstance(array, jax.core.Tracer) and array.is_fully_addressable for array in given):
        checked = token_batch(tokens, mask, config.vocab_size)
        # An array of JAX's stays where it is.
        tokens = tokens if isinstance(tokens, jax.Array) else checked[0]
        mask = mask if isinstance(mask, jax.Array) else checked[1]
    tokens = jnp.asarray(tokens)
    if tokens.ndim != 2 or 0 in tokens.shape or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InputError(f"tokens has shape {tokens.shape} and dtype {tokens.dtype}, expected integers [batch, length]")
    if tokens.shape[1] > config.max_position_embeddings:
        raise InputError(
            f"tokens has length {tokens.shape[1]}, more than max_position_embeddings {config.max_position_embeddings}"
        )
    mask = jnp.ones(tokens.shape, jnp.bool_) if mask is None else jnp.asarray(mask).astype(jnp.bool_)
    if mask.shape != tokens.shape:
        raise InputError(f"mask has shape {mask.shape}, expected that of tokens, {tokens.shape}")
    return tokens.astype(jnp.int32), mask
