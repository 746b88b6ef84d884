"""One layer of this project with the weights of a checkpoint of any form: its parameters alone, and what it computes.

The layer is run by `decoder_layer`, or by `mtp_layer`, on a tree whose stacks have one layer; what happens inside is
computed once more with the functions that they call. Weights stay as they are stored, activations are float32.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.cache.page_sharding import TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES
from glm52_jax.checkpoint.load.leaf_arrays import make_array
from glm52_jax.checkpoint.load.leaf_slices import LeafLayout
from glm52_jax.checkpoint.load.leaf_values import LeafPart, ValueReader, scales, weight
from glm52_jax.checkpoint.sources.open_source import Checkpoint
from glm52_jax.checkpoint.sources.published import CODES, CheckpointContents, StoredTensor
from glm52_jax.config import DENSE, FULL, ModelConfig
from glm52_jax.kernels import resolve_backend
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.kernels.linear import linear, swiglu
from glm52_jax.model import indexer, mtp
from glm52_jax.model.attention import attention, project
from glm52_jax.model.decoder_layer import ExecutionPolicy, LayerIndex, decoder_layer
from glm52_jax.model.moe import moe, route
from glm52_jax.params.quantization import BlockQuantized
from glm52_jax.params.spec import Param, Stack, parameters
from sharding.layout import SINGLE

_CODES = tuple(DTYPES[name] for name in CODES)

Stages = dict[str, np.ndarray]
"""Arrays by the names of `STAGES`, without the batch: `[tokens, ...]`."""

STAGES = (
    "final norm",
    "MTP projection",
    "input norm",
    "index scores",
    "selected set",
    "attention output",
    "post-attention norm",
    "router scores",
    "chosen experts",
    "gates",
    "MLP output",
    "layer output",
    "MTP output",
)
"""What is compared, in the order in which it is computed; a layer has those of its kind."""


def layer_params(config: ModelConfig, layer: int) -> list[Param]:
    """The parameters that one layer has; the MTP layer is number `num_hidden_layers`.

    Optional ones are left out: rows of an embedding are read as they are needed, and no head is used.
    """
    here = (p for p in parameters(config) if p.stack is not Stack.GLOBAL and layer in p.layers(config))
    return [p for p in here if not p.optional]


class OwnLayers:
    """The layers of a checkpoint by number, one in memory at a time.

    Args:
        target: a converted or a published folder.
        contents: what `check` found in it.
        backend: of the kernels, see `kernels.resolve_backend`.
    """

    def __init__(self, target: Checkpoint, contents: CheckpointContents, backend: str | None = None):
        self.target, self.contents, self.config = target, contents, contents.config
        self.backend = resolve_backend(backend, jax.default_backend(), jax.devices()[0].device_kind)

    def embed(self, tokens: np.ndarray, layer: int | None = None) -> np.ndarray:
        """float32 `[tokens, embed]`; for the MTP layer its own embedding where the file has one."""
        own = self.contents.tensors.get(f"model.layers.{layer}.embed_tokens.weight")
        name = (own or self.contents.tensors["model.embed_tokens.weight"]).name
        dtype, width = DTYPES[self.target.entry(name).dtype], self.config.hidden_size
        rows = np.empty((len(tokens), width), dtype)
        for row, token in zip(rows, tokens, strict=True):
            self.target.pread(name, int(token) * width * dtype.itemsize, row.view(np.uint8).data)
        return rows.astype(np.float32)

    def rotary(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines, float32 `[tokens, pairs]`."""
        tables = Rotary.at(jnp.arange(tokens)[None], self.config.qk_rope_head_dim, self.config.rope_theta)
        return np.asarray(tables.cos[0]), np.asarray(tables.sin[0])

    def layer(self, number: int, x: np.ndarray, selection: np.ndarray | None) -> Stages:
        """Runs a decoder layer on the stream `x` `[tokens, embed]`; see `Reference.layer`."""
        full, dense = self.config.indexer_types[number] == FULL, self.config.mlp_layer_types[number] == DENSE
        mask = np.zeros((len(x), len(x)), bool) if selection is None else selection
        place = LayerIndex(0, full, 0, dense, 0)
        run = compiled(_layer, "config", "place", "backend")
        return _unbatched(run(self.tree(number), self.config, place, x[None], mask[None], self.backend))

    def mtp(self, x: np.ndarray, next_embedding: np.ndarray) -> Stages:
        """Runs the MTP layer; see `Reference.mtp`."""
        tree = self.tree(self.config.num_hidden_layers)
        norm = next(p for p in parameters(self.config) if p.path == "norm")
        with self._reader() as reader:
            tree["norm"] = self._leaf(reader, norm, 0)
        tree["embed"] = jnp.asarray(next_embedding)  # in the order of the tokens, which then are 0, 1, 2, ...
        run = compiled(_mtp_layer, "config", "backend")
        return _unbatched(run(tree, only_mtp(self.config), x[None], self.backend))

    def tree(self, layer: int) -> dict[str, Any]:
        """The parameters of a layer in stacks of one, each weight of the type that it is stored in."""
        tree: dict[str, Any] = {}
        with self._reader() as reader:
            for param in layer_params(self.config, layer):
                group, name = param.path.split(".")
                tree.setdefault(group, {})[name] = self._leaf(reader, param, layer)
        return tree

    def _reader(self) -> ValueReader:
        quantization = self.config.quantization
        decoder_layer = quantization.block if quantization else None
        return ValueReader(self.target, decoder_layer, lambda name, size: None)

    def _leaf(self, reader: ValueReader, param: Param, layer: int) -> Any:
        """One parameter in place; codes stay codes where the model computes with them."""
        stored = [self.contents.tensors[t.name] for t in param.published(self.config, layer)]
        lead = () if param.stack in (Stack.MTP, Stack.GLOBAL) else (1,)
        lead = (*lead, *param.shape[: len(param.shape) - len(param.piece_shape)])
        logical_shape, dtype = param.logical_shape or param.tensor_shape, held_dtype(self.target, param, stored)

        def array(form: LeafLayout, parts: list[LeafPart], dtype: np.dtype) -> jax.Array:
            return make_array(form.shape, dtype, None, lambda targets: reader.fill(form, parts, targets))

        if dtype not in _CODES:
            parts = [weight(s, dequantize=s.scale is not None) for s in stored]
            return jax.block_until_ready(
                array(LeafLayout(lead, param.tensor_shape, logical_shape, param.rows), parts, dtype)
            )
        assert reader.block is not None
        grid = stored[0].tensor.scale_shape(reader.block)
        codes = [weight(s, dequantize=False) for s in stored]
        quantized = BlockQuantized(
            array(LeafLayout(lead, param.tensor_shape, param.tensor_shape), codes, dtype),
            array(LeafLayout(lead, grid, grid), [scales(s) for s in stored], np.dtype(np.float32)),
            logical_shape=tuple(logical_shape),
            block=reader.block,
            row_dims=param.row_dims,
        )
        return jax.block_until_ready(quantized)


def held_dtype(target: Checkpoint, param: Param, stored: Sequence[StoredTensor]) -> np.dtype:
    """Of a layer's parameter: as it is stored, and float32 where codes are multiplied out or types are mixed."""
    found = {DTYPES[target.entry(s.name).dtype] for s in stored}
    dtype = found.pop()
    return np.dtype(np.float32) if found or (dtype in _CODES and param.dequantize) else dtype


def held_bytes(target: Checkpoint, contents: CheckpointContents, layer: int) -> int:
    """Bytes of a layer's parameters as `OwnLayers.tree` holds them."""
    total = 0
    for param in layer_params(contents.config, layer):
        stored = [contents.tensors[t.name] for t in param.published(contents.config, layer)]
        dtype = held_dtype(target, param, stored)
        total += param.elements * dtype.itemsize
        total += sum(4 * math.prod(target.entry(s.scale).shape) for s in stored if s.scale and dtype in _CODES)
    return total


def only_mtp(config: ModelConfig) -> ModelConfig:
    """A config whose one layer is the MTP layer, so that it is the first of every stack.

    No model is like that and `ModelConfig` refuses it, which is why it is not built in the usual way.
    """
    alone = copy.copy(config)
    for field, value in {"num_hidden_layers": 0, "indexer_types": (), "mlp_layer_types": ()}.items():
        object.__setattr__(alone, field, value)
    return alone


def _unbatched(stages: dict[str, jax.Array]) -> Stages:
    return {name: np.asarray(value[0]) for name, value in stages.items()}


@functools.cache
def compiled(function: Callable[..., dict[str, jax.Array]], *static: str) -> Callable[..., dict[str, jax.Array]]:
    """`jax.jit`, which on the CPU leaves conversions in the loops that they are in.

    XLA takes that of an expert from bfloat16 or float8 out of the loop over experts and so makes it one of all experts,
    twice the bytes of the layer: 39 GB for GLM-5.2.
    """
    kept = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
    options = kept if jax.default_backend() == "cpu" else None
    return jax.jit(function, static_argnames=static, compiler_options=options)


def _layer(
    params: dict[str, Any], config: ModelConfig, place: LayerIndex, x: jax.Array, mask: jax.Array, backend: str
) -> dict[str, jax.Array]:
    """What a decoder layer computes, `[1, tokens, ...]`; its output is `decoder_layer`'s."""
    places, rotary, cache, policy = _start(config, x.shape[1], backend)
    out, cache, selection, _ = decoder_layer(
        params, config, place, x, rotary, places, cache, Selection(mask=mask), policy
    )
    return _inside(params, config, place, x, rotary, places, cache, selection, backend) | {"layer output": out}


def _mtp_layer(params: dict[str, Any], config: ModelConfig, x: jax.Array, backend: str) -> dict[str, jax.Array]:
    """What the MTP layer computes; its output is `mtp.advance`'s."""
    places, rotary, cache, policy = _start(config, x.shape[1], backend)
    weights, eps, next_tokens = params["mtp"], config.rms_norm_eps, places.positions
    hidden = rms_norm(x, params["norm"], eps)
    out, cache, selection = mtp.mtp_layer(params, config, hidden, next_tokens, places.positions, cache, policy)
    both = [rms_norm(params["embed"][None], weights["embed_norm"], eps), rms_norm(hidden, weights["hidden_norm"], eps)]
    x = linear(jnp.concatenate(both, axis=-1), weights["project"])
    place = LayerIndex.of_mtp(config, own_selection=True)
    stages = _inside(params, config, place, x, rotary, places, cache, selection, backend)
    return stages | {"final norm": hidden, "MTP projection": x, "MTP output": out}


def _start(
    config: ModelConfig, tokens: int, backend: str
) -> tuple[TokenPositions, Rotary, PagedCache, ExecutionPolicy]:
    """Places and tables of one text, an empty cache of one layer, and the forms that prefill takes."""
    positions = jnp.arange(tokens, dtype=jnp.int32)[None]
    rotary = Rotary.at(positions, config.qk_rope_head_dim, config.rope_theta)
    latent, keys = (jnp.zeros((1, 1, tokens, width)) for width in (config.latent_width, config.index_head_dim))
    cache = PagedCache(latent, keys, jnp.zeros((1, 1), jnp.int32))
    return TokenPositions.of(SINGLE, cache, positions), rotary, cache, ExecutionPolicy("expanded", "mask", backend)


def _inside(
    params: dict[str, Any],
    config: ModelConfig,
    place: LayerIndex,
    x: jax.Array,
    rotary: Rotary,
    places: TokenPositions,
    cache: PagedCache,
    selection: Selection,
    backend: str,
) -> dict[str, jax.Array]:
    """The stages of a layer, with the rows that it wrote to the cache and the selection that it used."""
    weights = layer_of(params["attention"], 0)
    normed = rms_norm(x, weights["input_norm"], config.rms_norm_eps)
    projected = project(weights, config, normed, rotary)
    out = {"input norm": normed}
    if place.full:
        own = layer_of(params["indexer"], 0)
        queries = indexer.index_queries(own, config, projected.q_latent, rotary)
        heads = indexer.head_weights(own, config, normed)
        out["index scores"] = index_scores(
            queries, heads, cache.index_keys, 0, cache.page_table, places.last_visible, backend=backend
        )
    attended = attention(weights, config, projected, cache, 0, places, selection, expanded=True, backend=backend)
    post = rms_norm(x + attended, weights["post_norm"], config.rms_norm_eps)
    assert selection.mask is not None
    out |= {"selected set": selection.mask, "attention output": attended, "post-attention norm": post}
    if place.dense:
        mlp = swiglu(post, params["dense"]["gate_up"], params["dense"]["down"], 0)
    else:
        mlp, _ = moe(params["moe"], config, 0, post, places.positions >= 0, backend=backend)
        out |= _routed(params["moe"], config, post[0], backend)
    return out | {"MLP output": mlp, "layer output": x + attended + mlp}


def _routed(stack: dict[str, Any], config: ModelConfig, x: jax.Array, backend: str) -> dict[str, jax.Array]:
    router, bias = layer_of((stack["router"], stack["router_bias"]), 0)
    experts, gates = route(router, bias, config, x, jnp.ones(len(x), jnp.bool_), backend=backend)
    rows = jnp.arange(len(x))[:, None]
    empty = jnp.zeros((len(x), config.n_routed_experts))
    return {
        "router scores": jax.nn.sigmoid(linear(x, router.astype(jnp.float32)))[None],
        "chosen experts": empty.at[rows, experts].set(1)[None] > 0,
        "gates": empty.at[rows, experts].set(gates)[None],
    }
