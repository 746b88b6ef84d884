"""One decoder layer, the same code for every path: training, prefill, decode, draft and verification.

Whether a layer has an indexer of its own and whether its MLP is dense are data, so that one compiled body serves any
layer plan; where they are known when the step is built (the MTP layer), the other branch is never traced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm52_jax.cache.page_sharding import TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.cache.row_formats import RowStack, is_hadamard, parts_of
from glm52_jax.config import DENSE, FULL, ModelConfig
from glm52_jax.kernels import Target, resolve_backend
from glm52_jax.kernels.cache_write.api import write_rows
from glm52_jax.kernels.cache_write.new_rows import RowTransform
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.model import indexer
from glm52_jax.model.attention import attention, expected_row_count, latent_row_transform, project
from glm52_jax.model.dispatch_policy import DispatchPolicy, choose_policy
from glm52_jax.model.moe import moe, sharded_mlp
from glm52_jax.params.axis_rules import query_gather_axes
from glm52_jax.params.spec import Stack, stack_layers
from sharding.collectives import all_gather, order_after
from sharding.errors import InputError
from sharding.exchange import resolve_exchange
from sharding.layout import SINGLE, Layout


@dataclasses.dataclass(frozen=True)
class ExecutionPolicy:
    """Which of its equal forms a step uses; fixed when the step is built.

    Attributes:
        attention: "absorbed" or "expanded".
        selection: "indices" or "mask"; "expanded" attention needs the mask.
        backend: backend of the kernels, see `kernels.BACKENDS`.
        layout: the mesh whose shards the step runs on; one device by default.
        dispatch: how tokens reach experts on other devices; chosen by the size of the step when None.
        transport: how rows are exchanged there, see `sharding.exchange.resolve_exchange`.
        halves: exchange rows in two halves, so that one may travel while the experts of the other are computed.
    """

    attention: str = "absorbed"
    selection: str = "indices"
    backend: str = "reference"
    layout: Layout = SINGLE
    dispatch: DispatchPolicy | None = None
    exchange_implementation: str = "padded"
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.attention not in ("absorbed", "expanded"):
            raise InputError(f"attention form is {self.attention!r}, expected absorbed or expanded")
        if self.selection not in ("indices", "mask"):
            raise InputError(f"selection form is {self.selection!r}, expected indices or mask")
        if self.attention == "expanded" and self.selection != "mask":
            raise InputError("attention form is 'expanded', which needs the selection form 'mask'")

    @classmethod
    def best(
        cls,
        tokens: int,
        *,
        platform: str | None = None,
        kind: str = "",
        backend: str | None = None,
        layout: Layout = SINGLE,
    ) -> ExecutionPolicy:
        """The forms for a step of `tokens` tokens a sequence.

        Few of them gather what they attend to. On a CPU many share it: keys and values of the whole context are made
        once. Elsewhere they gather too, since a mask of a long chunk and a long context would be larger than the chunk.
        """
        if platform is None:
            device = jax.devices()[0]
            platform, kind = device.platform, device.device_kind
        backend, exchange_implementation = resolve_backend(backend, platform, kind), resolve_exchange(None, platform)
        if tokens <= _FEW_TOKENS or platform != "cpu":
            return cls("absorbed", "indices", backend, layout, exchange_implementation=exchange_implementation)
        return cls("expanded", "mask", backend, layout, exchange_implementation=exchange_implementation)

    def for_cache(self, config: ModelConfig, cache: PagedCache, tokens: int) -> ExecutionPolicy:
        """These, with the form of selection that kernels for TPUs attend to fastest.

        Args:
            cache: or the shapes of one.
            tokens: of a sequence, in one step.
        """
        target = Target.of(self.backend)
        if target is None or self.attention == "expanded":
            return self
        from glm52_jax.kernels.sparse_mla.tile_sizes import RowShape, choose_implementation  # Pallas takes a second

        row = RowShape.of(list(parts_of(cache.latent).values()))
        expected = expected_row_count(config, cache, self.layout)
        # Over several devices a list says what is best of all; a mask would take the scores once more.
        dense = choose_implementation(target.chip, tokens, expected, cache.capacity, row) == "dense"
        selection = "mask" if dense and not self.layout.axes_of("kv_pages") else "indices"
        return dataclasses.replace(self, selection=selection)

    def dispatch_of(self, config: ModelConfig, tokens: int, itemsize: int) -> DispatchPolicy:
        """How `tokens` tokens of each device reach their experts."""
        if self.dispatch is not None:
            return self.dispatch
        form = choose_policy(
            self.layout, tokens, config, itemsize=itemsize, exchange_implementation=self.exchange_implementation
        ).form
        return dataclasses.replace(form, overlap=self.overlap)

    def no_selection(self, config: ModelConfig, cache: PagedCache, batch: int, tokens: int) -> Selection:
        """A selection of nothing, with the shapes that `indexer.select` gives."""
        tokens *= self.layout.size(query_gather_axes(self.layout))
        if self.selection == "mask":
            return Selection.empty(batch, tokens, positions=cache.capacity)
        return Selection.empty(batch, tokens, k=min(config.index_topk, cache.capacity))


_FEW_TOKENS = 8  # up to one verified token and seven drafts

Flag = jax.Array | bool
Ordinal = jax.Array | int


class LayerIndex(NamedTuple):
    """Where a layer's arrays are in the stacks, and of which kinds it is.

    Attributes:
        layer: ordinal in the stacks that every layer is in.
        full: whether the layer makes its own selection.
        indexer: ordinal in the indexer stack (any number where `full` is false).
        dense: whether the MLP is dense.
        mlp: ordinal in the dense or in the MoE stack.
    """

    layer: Ordinal
    full: Flag
    indexer: Ordinal
    dense: Flag
    mlp: Ordinal

    @classmethod
    def plan(cls, config: ModelConfig) -> LayerIndex:
        """The places of all decoder layers: arrays `[num_hidden_layers]`."""
        layers = range(config.num_hidden_layers)
        full = np.array([kind == FULL for kind in config.indexer_types])
        dense = np.array([kind == DENSE for kind in config.mlp_layer_types])
        stacks = {s: {layer: i for i, layer in enumerate(stack_layers(config, s))} for s in Stack}
        columns: dict[str, Any] = {
            "layer": np.arange(config.num_hidden_layers, dtype=np.int32),
            "full": full,
            "indexer": np.array([stacks[Stack.INDEXER].get(i, 0) for i in layers], np.int32),
            "dense": dense,
            "mlp": np.array([stacks[Stack.DENSE if dense[i] else Stack.MOE][i] for i in layers], np.int32),
        }
        return cls(**columns)

    @classmethod
    def of_mtp(cls, config: ModelConfig, *, own_selection: bool) -> LayerIndex:
        """The place of the MTP layer, the last of each stack that it is in."""
        last = {s: len(stack_layers(config, s)) - 1 for s in (Stack.LAYER, Stack.INDEXER, Stack.MOE)}
        return cls(last[Stack.LAYER], own_selection, last[Stack.INDEXER], False, last[Stack.MOE])


def decoder_layer(
    params: dict[str, Any],
    config: ModelConfig,
    place: LayerIndex,
    x: jax.Array,
    rotary: Rotary,
    places: TokenPositions,
    cache: PagedCache,
    selection: Selection,
    policy: ExecutionPolicy,
) -> tuple[jax.Array, PagedCache, Selection, jax.Array]:
    """Attention and MLP of one layer, each on the norm of the residual stream and added to it.

    Args:
        params: the whole tree; this layer is found by `place`.
        x: residual stream `[batch, tokens, embed]`.
        places: where its tokens stand.
        selection: of the last full layer; used as it is where this layer is shared.

    Returns:
        The stream after this layer, the cache with this layer's rows written, the selection that was used, and the
        chosen experts, int32 `[batch * tokens, num_experts_per_tok]` (-1 on a dense layer).
    """
    positions, weights = places.positions, layer_of(params["attention"], place.layer, backend=policy.backend)
    with jax.named_scope("attention"):
        out, cache, selection = _attention(params, config, place, weights, x, rotary, places, cache, selection, policy)
        x = x + out

    normed = rms_norm(x, weights["post_norm"], config.rms_norm_eps)
    with jax.named_scope("mlp"):
        out, experts = _choose(
            place.dense,
            lambda h: _dense_mlp(params, config, place.mlp, h, policy),
            lambda h: moe(
                params["moe"],
                config,
                place.mlp,
                h,
                positions >= 0,
                backend=policy.backend,
                layout=policy.layout,
                dispatch=policy.dispatch_of(config, positions.size, h.dtype.itemsize),
            ),
            normed,
        )
    return x + out, cache, selection, experts


def _attention(
    params: dict[str, Any],
    config: ModelConfig,
    place: LayerIndex,
    weights: dict[str, Any],
    x: jax.Array,
    rotary: Rotary,
    places: TokenPositions,
    cache: PagedCache,
    selection: Selection,
    policy: ExecutionPolicy,
) -> tuple[jax.Array, PagedCache, Selection]:
    """What attention adds to the stream, the cache with this layer's rows, and the selection that was used."""
    layout = policy.layout
    normed = rms_norm(x, weights["input_norm"], config.rms_norm_eps)
    projected = project(weights, config, normed, rotary)

    def written(stack: RowStack, layer: Ordinal, values: jax.Array, transform: RowTransform) -> RowStack:
        """The stack with the rows of the whole chunk."""
        chunk, rest = layout.axes_of("tokens"), transform
        if chunk:  # angles are those of this device's tokens
            values, rest = all_gather(layout, transform(values), chunk, 1), None
        return write_rows(
            stack, layer, values, cache.page_table, places.local_slots, transform=rest, backend=policy.backend
        )

    latent = written(cache.latent, place.layer, projected.kv, latent_row_transform(weights, config, rotary))
    if layout.axes_of("tokens"):
        normed = order_after(layout, normed, latent)
    cache = dataclasses.replace(cache, latent=latent)

    def own_selection(index_keys: RowStack, _: Selection) -> tuple[RowStack, Selection]:
        own = layer_of(params["indexer"], place.indexer, backend=policy.backend)
        transform = indexer.index_key_transform(own, config, rotary, hadamard_rotated=is_hadamard(index_keys))
        index_keys = written(index_keys, place.indexer, indexer.project_keys(own, normed), transform)
        chosen = indexer.select_positions(
            own,
            config,
            normed,
            projected.q_latent,
            rotary,
            dataclasses.replace(cache, index_keys=index_keys),
            place.indexer,
            places,
            as_mask=policy.selection == "mask",
            backend=policy.backend,
            layout=layout,
        )
        return index_keys, chosen

    index_keys, selection = _choose(
        place.full, own_selection, lambda keys, last: (keys, last), cache.index_keys, selection
    )
    cache = dataclasses.replace(cache, index_keys=index_keys)
    # What attention gathers, it gathers after the selection.
    projected = projected._replace(q_nope=order_after(layout, projected.q_nope, selection))
    places = dataclasses.replace(places, last_visible=order_after(layout, places.last_visible, selection))
    out = attention(
        weights,
        config,
        projected,
        cache,
        place.layer,
        places,
        selection,
        expanded=policy.attention == "expanded",
        backend=policy.backend,
        layout=layout,
    )
    return out, cache, selection


def _dense_mlp(
    params: dict[str, Any], config: ModelConfig, layer: Ordinal, x: jax.Array, policy: ExecutionPolicy
) -> tuple[jax.Array, jax.Array]:
    none = jnp.full((x.shape[0] * x.shape[1], config.num_experts_per_tok), -1, jnp.int32)
    stack = params["dense"]
    return sharded_mlp(policy.layout, x, stack["gate_up"], stack["down"], layer, backend=policy.backend), none


def _choose(flag: Flag, if_true: Callable, if_false: Callable, *operands: Any) -> Any:
    """`lax.cond` for a traced flag; a flag known now traces its branch only."""
    if isinstance(flag, bool):
        return (if_true if flag else if_false)(*operands)
    return jax.lax.cond(flag, if_true, if_false, *operands)
