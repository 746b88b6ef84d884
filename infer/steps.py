"""The jitted steps of generation: prefill a chunk, decode a token, verify drafts.

A provider returns each step as (function, abstract arguments, names): the engine runs it, a planner can compile it
without weights. Shapes depend on the batch, the capacity and the number of drafts only, so nothing is compiled again
as sequences grow; the state is donated, so that the cache is updated in place.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.cache.page_sharding import cache_specs
from glm52_jax.cache.paged_cache import PAGE_SIZE, PagedCache
from glm52_jax.config import ModelConfig
from glm52_jax.model import mtp
from glm52_jax.model.decoder_layer import ExecutionPolicy
from glm52_jax.model.dispatch_policy import GATHER
from glm52_jax.model.transformer import compute_dtype, extend, model_logits
from glm52_jax.params.axis_rules import check_rules
from glm52_jax.params.sharding import batch_spec, param_specs
from infer.finite_check import NOWHERE, is_finite, mark_not_finite
from infer.sampling import Sampling, next_token
from infer.speculative import MAX_DRAFT_TOKENS, DraftWindow, accept, draft
from sharding.collectives import all_gather, axis_index, order_after, psum
from sharding.errors import InputError
from sharding.exchange import OVERLAP_OPTIONS
from sharding.hosts import process_group
from sharding.layout import SINGLE, Layout

_WITHOUT_RAGGED = ("TPU v5 lite",)  # on its larger slices the compiler refuses ragged exchanges


@flax.struct.dataclass
class State:
    """What generation carries from step to step; donated to each of them.

    Attributes:
        cache: every token but the newest of each sequence.
        token: int32 `[batch]`, the newest token.
        position: int32 `[batch]`, where it stands.
        window: what the MTP layer has not seen yet; None without drafts.
    """

    cache: PagedCache
    token: jax.Array
    position: jax.Array
    window: DraftWindow | None


_agreed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Jitted steps that all hosts have found to be the same program."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step before it is compiled.

    Attributes:
        function: pure; takes `arguments` in order.
        arguments: `jax.ShapeDtypeStruct` trees.
        names: a name for each argument.
        donated: names of those whose buffers the step may reuse.
        jitted: the function under `jax.jit` with these donations; the same object for equal providers, so that a
            second generation of the same shapes compiles nothing.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    names: tuple[str, ...]
    donated: tuple[str, ...]
    jitted: Any

    def __call__(self, *arguments: Any) -> Any:
        if process_group.current().processes > 1 and self.jitted not in _agreed:
            # Hosts that trace different programs would wait for each other without end.
            text = self.jitted.lower(*arguments).as_text()
            found = hashlib.sha256(text.encode()).hexdigest()[:16]
            process_group.current().agree(f"the traced program of a step of {', '.join(self.names[2:])}", found)
            _agreed.add(self.jitted)
        return self.jitted(*arguments)


@dataclasses.dataclass(frozen=True)
class StepProvider:
    """Makes the steps of one kind of generation.

    Attributes:
        config: the model's.
        dtype: of its activations and of the cache.
        batch: sequences a step.
        capacity: tokens a sequence, drafts not counted.
        chunk: tokens of each sequence in a prefill step.
        draft_tokens: drafts a verify step.
        sampled: whether any sequence is sampled; a greedy step does no work for it.
        backend: see `kernels.resolve_backend`.
        page_size: rows a page of the cache.
        cache_format: how the cache keeps its rows.
        layout: how the step is divided over the devices of `mesh`; its batch axes divide `batch`. Rules under which the
            step would not compute what one device does are refused, see `axis_rules`.
        mesh: of the layout's devices; None for one device, JAX's first. A plan for one device has a mesh of it.
        halves: exchange rows with experts in two halves, see `ExecutionPolicy.overlap`.
    """

    config: ModelConfig
    dtype: jnp.dtype
    batch: int
    capacity: int
    chunk: int
    draft_tokens: int = 0
    sampled: bool = False
    backend: str | None = None
    page_size: int = PAGE_SIZE
    cache_format: CacheFormat = PLAIN_CACHE
    layout: Layout = SINGLE
    mesh: Mesh | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        check_rules(self.layout)
        if not 0 <= self.draft_tokens <= MAX_DRAFT_TOKENS:
            raise InputError(f"draft_tokens is {self.draft_tokens}, expected 0 to {MAX_DRAFT_TOKENS}")
        if self.capacity > self.config.max_position_embeddings:
            raise InputError(
                f"{self.capacity} tokens are asked for, more than max_position_embeddings "
                f"{self.config.max_position_embeddings}"
            )
        found = 1 if self.mesh is None else self.mesh.devices.size
        if found != self.layout.devices:
            what = "there is no mesh of them" if self.mesh is None else f"the mesh has {found}"
            raise InputError(f"layout {self.layout.name} has {self.layout.devices} devices, but {what}")
        for what, size, name in (("batch", self.batch, "batch"), ("chunk", self.chunk, "tokens")):
            if size % self.layout.parts(name):
                raise InputError(
                    f"{what} is {size}, expected a multiple of {self.layout.parts(name)}, the devices that layout "
                    f"{self.layout.name} has for it"
                )

    @classmethod
    def of(cls, params: dict[str, Any], config: ModelConfig, **shapes: Any) -> StepProvider:
        """The provider for these parameters (or their shapes); `shapes` are the other fields.

        Raises:
            InputError: drafts are asked for and the parameters have no MTP layer.
        """
        provider = cls(config, compute_dtype(params), **shapes)
        if provider.draft_tokens and "mtp" not in params:
            raise InputError(
                f"draft_tokens is {provider.draft_tokens}, but this checkpoint has no MTP layer to draft with"
            )
        return provider

    @property
    def _cached(self) -> ModelConfig:
        """The config that the cache is made for: rows for the MTP layer only when it drafts."""
        return self.config if self.draft_tokens else self.config.without_mtp()

    def state(self) -> State:
        """An empty state."""
        if self.mesh is None:
            return self.own_state()
        return _sharded_state(self)()

    def state_shapes(self) -> State:
        """Shapes of the state.

        Raises:
            InputError: the model's cache cannot be stored in `cache_format`, or divided as the layout says.
        """
        return jax.eval_shape(self.state)

    def own_state(self) -> State:
        """One device's part of an empty state."""
        room, batch = self.draft_tokens + 1, self.batch // self.layout.parts("batch")
        return State(
            # Drafts of a sequence at its end reach past its last token.
            cache=PagedCache.create(
                self._cached,
                batch,
                self.capacity + self.draft_tokens,
                dtype=self.dtype,
                page_size=self.page_size,
                form=self.stored_format,
                layout=self.layout,
            ),
            token=jnp.zeros(batch, jnp.int32),
            position=jnp.full(batch, -1, jnp.int32),
            window=DraftWindow.empty(batch, room, self.config.hidden_size, self.dtype) if self.draft_tokens else None,
        )

    def state_specs(self) -> State:
        """Specs of the state on the mesh."""
        state, row = jax.eval_shape(self.own_state), batch_spec(self.layout)
        specs = jax.tree.map(lambda _: row, state)
        return dataclasses.replace(specs, cache=cache_specs(state.cache, self.layout))

    def prefill(self, params: dict[str, Any]) -> Step:
        """A chunk of every prompt; `params` may be shapes.

        Its function takes, after parameters and state: tokens, positions (-1 for padding) and the token after each
        (-1 where unknown), all int32 `[batch, chunk]`; the column of each prompt's last token, int32 `[batch]`, -1
        where it is not in this chunk; the sampling. It returns the state and the token after each prompt that ended
        here, int32 `[batch]`.

        Of every step, a token below zero says that the model's output was not finite, see `infer.finite_check`; of this
        one also in rows whose prompt did not end here.
        """
        chunk = jax.ShapeDtypeStruct((self.batch, self.chunk), jnp.int32)
        row = jax.ShapeDtypeStruct((self.batch,), jnp.int32)
        return self._step(
            "_prefill",
            params,
            {"tokens": chunk, "positions": chunk, "next_tokens": chunk, "last": row, "sampling": self._sampling()},
        )

    def decode(self, params: dict[str, Any]) -> Step:
        """One token of every active sequence: parameters, state, active bool `[batch]`, sampling -> state, tokens."""
        active = jax.ShapeDtypeStruct((self.batch,), jnp.bool_)
        return self._step("_decode", params, {"active": active, "sampling": self._sampling()})

    def verify(self, params: dict[str, Any]) -> Step:
        """Drafts and their verification: arguments as `decode`.

        Its function returns the state, tokens int32 `[batch, draft_tokens + 1]` and how many drafts stood, int32
        `[batch]`; one token more than that counts.
        """
        active = jax.ShapeDtypeStruct((self.batch,), jnp.bool_)
        return self._step("_verify", params, {"active": active, "sampling": self._sampling()})

    def _step(self, method: str, params: dict[str, Any], arguments: dict[str, Any]) -> Step:
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
        state = self.state_shapes()
        if self.mesh is not None:
            whole = (params, state, *arguments.values())
            specs = self._specs(method, params, arguments)
            params, state, *rest = _with_shardings(whole, specs, self.mesh)
            arguments = dict(zip(arguments, rest, strict=True))
        return Step(
            function=self._function(method, tuple(arguments)),
            arguments=(params, state, *arguments.values()),
            names=("params", "state", *arguments),
            donated=("state",),
            jitted=_jitted(self, method, tuple(arguments)),
        )

    def _sampling(self) -> Sampling | None:
        if not self.sampled:
            return None
        return jax.eval_shape(lambda: Sampling.of(self.batch, 0.0, 1.0, [0] * self.batch))

    def _specs(self, method: str, params: dict[str, Any], arguments: Any) -> tuple[Any, ...]:
        """Specs of the arguments of a step: parameters, state, then arrays with a row a sequence."""
        assert self.mesh is not None
        chunk = ("tokens", "positions", "next_tokens") if method == "_prefill" else ()
        specs = [batch_spec(self.layout, *(("tokens",) if name in chunk else ())) for name in arguments]
        return (param_specs(params, self.config, self.layout, self.mesh), self.state_specs(), *specs)

    def device_put_args(self, method: str, *values: Any) -> tuple[Any, ...]:
        """Arrays of the host, which every process has whole, where a step wants them: its arguments after the state."""
        if self.mesh is None:
            return values
        names = {"_prefill": ("tokens", "positions", "next_tokens", "last", "sampling")}.get(
            method, ("active", "sampling")
        )
        specs = self._specs(method, {}, names)[2:]

        def put(spec: PartitionSpec, value: Any) -> jax.Array:
            value, sharding = np.asarray(value), NamedSharding(self.mesh, spec)
            return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])

        return tuple(jax.tree.map(lambda leaf, s=spec: put(s, leaf), v) for spec, v in zip(specs, values, strict=True))

    def _function(self, method: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
        """The step; on a mesh it runs on all shards, with collectives where it says so and nowhere else."""
        if self.mesh is None:
            return self._keeping_the_state(method)
        results = {"_prefill": 1, "_decode": 1, "_verify": 2}[method]

        def run(params: dict[str, Any], state: State, *rest: Any) -> Any:
            return jax.shard_map(
                self._keeping_the_state(method),
                mesh=self.mesh,
                in_specs=self._specs(method, params, arguments),
                out_specs=(self.state_specs(), *[PartitionSpec()] * results),
                check_vma=False,
            )(params, state, *rest)

        return run

    def _keeping_the_state(self, method: str) -> Callable[..., Any]:
        """One device's step; the state that it returns has the shapes and types of the one that it is given.

        With others its buffers could not be reused, and the next step would be compiled anew.
        """

        def run(params: dict[str, Any], state: State, *rest: Any) -> Any:
            results = getattr(self, method)(params, state, *rest)
            chex.assert_trees_all_equal_shapes_and_dtypes(results[0], state)
            return results

        return run

    @property
    def stored_format(self) -> CacheFormat:
        """The cache's format on the devices of the step."""
        return self.cache_format.on(self.platform, self.config, self.dtype)

    @property
    def platform(self) -> str:
        """That of the devices which will run the step."""
        return self.device.platform

    @property
    def kind(self) -> str:
        """Their `device_kind`."""
        return self.device.device_kind

    @property
    def device(self) -> Any:
        """One of them."""
        return self.mesh.devices.flat[0] if self.mesh is not None else jax.devices()[0]

    def _forms(self, tokens: int, layout: Layout) -> ExecutionPolicy:
        best = ExecutionPolicy.best(tokens, platform=self.platform, kind=self.kind, backend=self.backend, layout=layout)
        dispatch = GATHER if self.kind in _WITHOUT_RAGGED else None
        best = best.for_cache(self.config, jax.eval_shape(self.own_state).cache, tokens)
        return dataclasses.replace(best, overlap=self.overlap, dispatch=dispatch)

    @property
    def compiler_options(self) -> dict[str, Any] | None:
        """What the compiler of the devices has to be told for the step."""
        return dict(OVERLAP_OPTIONS) if self.overlap and self.platform == "tpu" else None

    @property
    def _undivided(self) -> Layout:
        """The layout of steps of a few tokens, which are not divided among devices."""
        return self.layout.with_rules(tokens=())

    def _everyones(self, rows: jax.Array) -> jax.Array:
        """The rows of all sequences, on every device."""
        return all_gather(self.layout, rows, self.layout.axes_of("batch"), 0)

    def _prefill(
        self,
        params: dict[str, Any],
        state: State,
        tokens: jax.Array,
        positions: jax.Array,
        next_tokens: jax.Array,
        last: jax.Array,
        sampling: Sampling | None,
    ) -> tuple[State, jax.Array]:
        layout, width = self.layout, tokens.shape[1]
        policy = self._forms(self.chunk, layout)
        hidden, cache, _ = extend(params, self._cached, tokens, positions, state.cache, policy)
        ended = last >= 0
        positions, last = order_after(layout, (positions, last), hidden)
        # One of the devices along `tokens` has the last token of a prompt; the others add zero.
        column = jnp.maximum(last, 0) - axis_index(layout, layout.axes_of("tokens")) * width
        mine = (column >= 0) & (column < width)
        column = jnp.clip(column, 0, width - 1)[:, None]
        final = jnp.where(mine[:, None, None], jnp.take_along_axis(hidden, column[..., None], axis=1), 0)
        final = psum(layout, final, layout.axes_of("tokens"))
        end = jnp.where(mine, jnp.take_along_axis(positions, column, axis=1)[:, 0], 0)
        end = psum(layout, end, layout.axes_of("tokens"))
        logits = model_logits(params, final[:, 0], self._undivided)
        token = next_token(logits, sampling, end + 1)
        # The last logits need not show what is wrong further ahead: a position that is NaN may just not be selected.
        wrong = jnp.where((positions >= 0) & ~is_finite(hidden), positions, NOWHERE)
        wrong = jnp.min(all_gather(layout, wrong, layout.axes_of("tokens"), 1), axis=1)
        wrong = jnp.minimum(wrong, jnp.where(ended & ~is_finite(logits), end, NOWHERE))
        window = state.window
        if window is not None:
            known = jnp.where(next_tokens >= 0, positions, -1)
            next_tokens, known = order_after(layout, (next_tokens, known), token)
            _, cache, _ = mtp.mtp_layer(params, self._cached, hidden, next_tokens, known, cache, policy)
            window = DraftWindow(
                hidden=jnp.where(ended[:, None, None], window.hidden.at[:, :1].set(final), window.hidden),
                tokens=jnp.where(ended[:, None], window.tokens.at[:, 0].set(token), window.tokens),
                positions=jnp.where(ended[:, None], window.positions.at[:, 0].set(end), window.positions),
            )
        state = State(
            cache=cache,
            token=jnp.where(ended, token, state.token),
            position=jnp.where(ended, end + 1, state.position),
            window=window,
        )
        return state, self._everyones(mark_not_finite(token, wrong == NOWHERE, wrong))

    def _decode(
        self, params: dict[str, Any], state: State, active: jax.Array, sampling: Sampling | None
    ) -> tuple[State, jax.Array]:
        positions, policy = jnp.where(active, state.position, -1), self._forms(1, self._undivided)
        hidden, cache, _ = extend(params, self._cached, state.token[:, None], positions[:, None], state.cache, policy)
        logits, position = model_logits(params, hidden[:, 0], policy.layout), state.position
        token = next_token(logits, sampling, position + 1)
        state = State(
            cache=cache,
            token=jnp.where(active, token, state.token),
            position=jnp.where(active, position + 1, position),
            window=state.window,
        )
        return state, self._everyones(mark_not_finite(token, is_finite(logits), position))

    def _verify(
        self, params: dict[str, Any], state: State, active: jax.Array, sampling: Sampling | None
    ) -> tuple[State, jax.Array, jax.Array]:
        assert state.window is not None
        room = self.draft_tokens + 1
        policy = self._forms(room, self._undivided)
        window = dataclasses.replace(state.window, positions=jnp.where(active[:, None], state.window.positions, -1))
        drafts, distributions, whole, cache = draft(
            params, self._cached, window, state.cache, self.draft_tokens, sampling, policy
        )
        tokens = jnp.concatenate([state.token[:, None], drafts], axis=1)
        positions = jnp.where(active[:, None], state.position[:, None] + jnp.arange(room), -1)
        hidden, cache, _ = extend(params, self._cached, tokens, positions, cache, policy)
        own, accepted = accept(
            model_logits(params, hidden, policy.layout), drafts, distributions, sampling, state.position + 1
        )
        # Drafts of a broken MTP layer would only be refused one after another, so the text would not show them.
        shown = jnp.where(own < 0, own, mark_not_finite(own, whole[:, None], state.position[:, None], of_drafts=True))
        kept = jnp.arange(room) <= accepted[:, None]
        newest = jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0]
        state = State(
            cache=cache,
            token=jnp.where(active, newest, state.token),
            position=jnp.where(active, state.position + accepted + 1, state.position),
            window=DraftWindow(hidden=hidden, tokens=own, positions=jnp.where(kept, positions, -1)),
        )
        return state, self._everyones(shown), self._everyones(accepted)


@lru_cache(maxsize=64)
def _jitted(provider: StepProvider, method: str, arguments: tuple[str, ...]) -> Any:
    # Keyed by the provider's value: bound methods of equal providers are not equal themselves.
    function = provider._function(method, arguments)
    return jax.jit(function, donate_argnums=1, compiler_options=provider.compiler_options)


@lru_cache(maxsize=64)
def _sharded_state(provider: StepProvider) -> Any:
    specs = provider.state_specs()
    return jax.jit(jax.shard_map(provider.own_state, mesh=provider.mesh, in_specs=(), out_specs=specs, check_vma=False))


def _with_shardings(values: tuple[Any, ...], specs: tuple[Any, ...], mesh: Mesh) -> list[Any]:
    """Trees of shapes with the shardings of specs, which stand for whole arguments where those are trees."""

    def one(spec: PartitionSpec, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), subtree)

    return [
        jax.tree.map(one, spec, value, is_leaf=lambda x: isinstance(x, PartitionSpec))
        for spec, value in zip(specs, values, strict=True)
    ]
