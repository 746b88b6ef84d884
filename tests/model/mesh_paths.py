"""`paths.Walk` on a mesh of devices: the same hostile walk, judged by the same golden values."""

import dataclasses
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.cache.page_sharding import cache_specs
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.config import ModelConfig
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.model.decoder_layer import ExecutionPolicy
from glm52_jax.model.transformer import LayerTrace
from glm52_jax.params.axis_rules import query_gather_axes
from glm52_jax.params.sharding import batch_spec, named_shardings, param_specs
from sharding import collectives
from sharding.layout import Layout
from tests.model.cases import Case
from tests.model.paths import QUICK_OPTIONS, ROOM, Seen, Walk, hostile_cache, one_step


def device_put_args(params: Any, config: ModelConfig, layout: Layout, mesh: Mesh) -> Any:
    """Parameters of one device on a mesh."""
    return jax.device_put(params, named_shardings(param_specs(params, config, layout, mesh), mesh))


class MeshWalk(Walk):
    """A walk whose every step runs on all shards; rows of nothing but padding fill the batch up."""

    def __init__(
        self, case: Case, params: dict, layout: Layout, *, page_size: int, form: CacheFormat = PLAIN_CACHE
    ) -> None:
        super().__init__(case, params, page_size=page_size, form=form, step=self._step)
        self.layout, self.mesh = layout, layout.mesh(jax.devices()[: layout.devices])
        batch, length = case.tokens.shape
        rows = -(-batch // layout.parts("batch"))
        self.extra = rows * layout.parts("batch") - batch
        dtype = params["embed"].dtype
        make = partial(
            hostile_cache, case.config, rows, length + ROOM, page_size, dtype=dtype, form=form, layout=layout
        )
        specs = cache_specs(jax.eval_shape(make), layout)
        self.cache = jax.jit(jax.shard_map(make, mesh=self.mesh, in_specs=(), out_specs=specs, check_vma=False))()
        self.params = device_put_args(params, case.config, layout, self.mesh)

    def _step(
        self,
        params: Any,
        config: ModelConfig,
        tokens: Any,
        following: Any,
        positions: Any,
        cache: PagedCache,
        *,
        policy: ExecutionPolicy,
    ) -> tuple[Seen, PagedCache]:
        arrays = [np.pad(a, ((0, self.extra), (0, 0)), constant_values=-1) for a in (tokens, following, positions)]
        step = _compiled(config, dataclasses.replace(policy, layout=self.layout), self.mesh)
        seen, cache = step(params, *arrays, cache)
        count = len(tokens)
        experts = seen.layers.experts
        layers = LayerTrace(
            seen.layers.hidden[:, :count],
            Selection(mask=seen.layers.selection.mask[:, :count]),
            experts[:, :count].reshape(len(experts), -1, experts.shape[-1]),
        )
        chosen = None if seen.mtp_selection is None else Selection(mask=seen.mtp_selection.mask[:count])
        rows = [None if a is None else a[:count] for a in (seen.logits, seen.hidden, seen.mtp_state, seen.mtp_logits)]
        return Seen(rows[0], rows[1], layers, rows[2], rows[3], chosen), cache


@lru_cache(maxsize=32)
def _compiled(config: ModelConfig, policy: ExecutionPolicy, mesh: Mesh) -> Any:
    layout = policy.layout
    row = batch_spec(layout, "tokens")
    traced = PartitionSpec(None, *row)

    def shard(params: Any, tokens: Any, following: Any, positions: Any, cache: PagedCache) -> tuple[Seen, PagedCache]:
        seen, cache = one_step(params, config, tokens, following, positions, cache, policy)
        layers = seen.layers
        k = layers.experts.shape[-1]
        layers = LayerTrace(
            layers.hidden,
            Selection(mask=_whole_mask(layout, cache, layers.selection)),
            layers.experts.reshape(-1, *positions.shape, k),
        )
        chosen = seen.mtp_selection
        if chosen is not None:
            chosen = Selection(mask=_whole_mask(layout, cache, chosen))
        return seen._replace(layers=layers, mtp_selection=chosen), cache

    def run(params: Any, tokens: Any, following: Any, positions: Any, cache: PagedCache) -> tuple[Seen, PagedCache]:
        caches = cache_specs(cache, layout)
        draft = row if "mtp" in params else None
        selection = Selection(mask=row) if "mtp" in params else None
        specs = Seen(row, row, LayerTrace(traced, Selection(mask=traced), traced), draft, draft, selection)
        return jax.shard_map(
            shard,
            mesh=mesh,
            in_specs=(param_specs(params, config, layout, mesh), row, row, row, caches),
            out_specs=(specs, caches),
            check_vma=False,
        )(params, tokens, following, positions, cache)

    return jax.jit(run, compiler_options=QUICK_OPTIONS)


def _whole_mask(layout: Layout, cache: PagedCache, selection: Selection) -> jax.Array:
    """Bool `[..., all positions]` in order of position, of this device's tokens.

    Of a selection every device has its part, for all tokens that ask it.
    """
    axes, own, page = layout.axes_of("kv_pages"), cache.capacity, cache.page_size
    if selection.mask is None:
        assert selection.indices is not None
        mask = (selection.indices[..., None] == jnp.arange(own)).any(-2)
    else:
        mask = selection.mask
    whole = collectives.all_gather(layout, mask, axes, mask.ndim - 1)
    whole = collectives.local_shard(layout, whole, query_gather_axes(layout), mask.ndim - 2)
    count = layout.size(axes)
    pages = np.arange(own * count) // page
    places = pages % count * own + pages // count * page + np.arange(own * count) % page
    return jnp.take(whole, places, axis=-1)
