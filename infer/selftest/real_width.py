"""Fifth section: a few layers of GLM-5.2's own widths, their memory and the time of a decode step, beside the plan.

Weights and cache are numbers without meaning, made on the devices. As many experts as the memory has room for.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from glm52_jax.cache.row_formats import parts_of
from glm52_jax.config import BUILT_IN, DENSE, FULL, SHARED, SPARSE, ModelConfig
from glm52_jax.params.init import abstract_params, build_tree, leaf_at
from glm52_jax.params.spec import Param
from infer.planning.memory_breakdown import MemoryBreakdown, memory_breakdown
from infer.selftest.checks import Check, CheckFailed, CheckSkipped, Passed, RunOnce
from infer.selftest.machine import Machine
from infer.steps import State, StepProvider
from sharding.devices import memory_limit
from sharding.errors import InputError
from sharding.hosts.process_group import current
from sharding.layout import SINGLE, Layout

GIB = 2**30
_CPU_BYTES = 3.5 * GIB  # of all CPU devices together, at most; widened weights take more than as much again
_SHARE = 0.6  # of a device's memory that parameters and cache may take
_ROUNDS = 5
_SLOW_SECONDS = 1.0  # a step that takes longer is timed three times


@dataclasses.dataclass(frozen=True)
class RealWidthSize:
    """What fits.

    Attributes:
        why: where it is another layout than the machine's, the reason.
    """

    config: ModelConfig
    layout: Layout
    batch: int
    context: int
    memory_breakdown: MemoryBreakdown
    why: str = ""

    def provider(self, mesh: Mesh) -> StepProvider:
        return _provider(self.config, self.layout, self.batch, self.context, mesh)


def _provider(config: ModelConfig, layout: Layout, batch: int, context: int, mesh: Mesh) -> StepProvider:
    return StepProvider.of(
        abstract_params(config),
        config,
        batch=batch,
        capacity=context,
        chunk=layout.parts("tokens"),
        layout=layout,
        mesh=mesh if layout.devices > 1 else None,
    )


def layers_of(experts: int, vocabulary: int) -> ModelConfig:
    """One layer of each kind that GLM-5.2 has: dense, of experts with an indexer, of experts without one."""
    return dataclasses.replace(
        BUILT_IN["glm-5.2"],
        num_hidden_layers=3,
        indexer_types=(FULL, FULL, SHARED),
        mlp_layer_types=(DENSE, SPARSE, SPARSE),
        num_nextn_predict_layers=0,
        n_routed_experts=experts,
        vocab_size=vocabulary,
    )


def choose_size(machine: Machine) -> RealWidthSize:
    """The most experts that the memory has room for, on the mesh, or else on its first device.

    Raises:
        Skip: not even the fewest fit on one device.
    """
    full = BUILT_IN["glm-5.2"]
    on_cpu = machine.platform == "cpu"
    # A vocabulary is not what a layer is about, and on a laptop it would take most of the memory.
    vocabulary = 16384 if on_cpu else full.vocab_size
    refusals = []
    for layout in dict.fromkeys((machine.layout, SINGLE)):
        batch, context = (2 if on_cpu else 8) * layout.parts("batch"), 4096 if on_cpu else 8192
        # Hosts whose memory is not equally free would otherwise run different programs, and wait for each other.
        room, parts = min(current().exchange(_room(machine, layout))), layout.parts("experts")
        sizes = [n for n in range(full.n_routed_experts, 0, -1) if n % parts == 0 and n >= full.num_experts_per_tok]
        refusal = f"{parts} of them do not share {full.n_routed_experts} experts"
        for experts in sizes:
            config = layers_of(experts, vocabulary)
            try:
                state = jax.eval_shape(_provider(config, layout, batch, context, machine.mesh).own_state)
                own = memory_breakdown(config, layout, state)
            except InputError as error:
                refusal = str(error)
                break
            if own.total <= room:
                return RealWidthSize(config, layout, batch, context, own, refusals[0] if refusals else "")
            refusal = f"{own.total / GIB:.1f} GiB for each with {experts} experts, room for {room / GIB:.1f}"
        refusals.append(f"{layout.devices} devices: {refusal}" if layout.devices > 1 else f"one device: {refusal}")
    raise CheckSkipped(f"layers of real width do not fit, {', '.join(refusals)}")


def _room(machine: Machine, layout: Layout) -> float:
    """Bytes that each device of the layout has for parameters and cache."""
    limit = memory_limit(machine.first)
    if limit is not None:
        return _SHARE * limit
    if machine.chip is not None:
        return _SHARE * machine.chip.hbm_bytes
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        free = _CPU_BYTES
    return min(_CPU_BYTES, free / 3) / layout.devices


@dataclasses.dataclass
class Bench:
    """The compiled step with what it needs; a step takes the state over, and gives the next one."""

    size: RealWidthSize
    provider: StepProvider
    compiled: Any
    params: Any
    state: State


def _prepare(machine: Machine) -> Bench:
    size = choose_size(machine)
    with jax.default_device(machine.first):
        provider = size.provider(machine.mesh)
        step = provider.decode(abstract_params(size.config))
        compiled = step.jitted.lower(*step.arguments).compile()
        return Bench(size, provider, compiled, _weights(size.config, step.arguments[0]), _state(provider))


def _weights(config: ModelConfig, shapes: Any) -> Any:
    def make(param: Param) -> Any:
        shape = leaf_at(shapes, param.path)
        return None if shape is None else _numbers(shape, param.path, param.init, config.initializer_range)

    return build_tree(config, make)


def _state(provider: StepProvider) -> State:
    """Every sequence near the end of its context, the cache full."""
    state = provider.state()
    kinds = (state.cache.latent, state.cache.index_keys)
    latent, keys = (jax.tree.map(lambda part: _numbers(part, "cache", "normal", 1.0), kind) for kind in kinds)
    # The steps to come move on by a place each.
    start = provider.capacity - 16 * (_ROUNDS + 2)
    position = jax.jit(lambda p: jnp.full_like(p, start), out_shardings=state.position.sharding)(state.position)
    return dataclasses.replace(
        state, cache=dataclasses.replace(state.cache, latent=latent, index_keys=keys), position=position
    )


def _numbers(shape: Any, path: str, init: str, deviation: float) -> jax.Array:
    """Ones, zeros, or numbers between plus and minus `deviation * sqrt(3)`, each device making its own part.

    A hash of the place: as good as random for a timing, and made as fast as it is written.
    """

    def make() -> jax.Array:
        if init != "normal":
            return jnp.full(shape.shape, {"ones": 1, "zeros": 0}[init], shape.dtype)
        place = jnp.uint32(len(path) * 2654435761 % 2**32)
        for dimension, size in enumerate(shape.shape):
            place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape.shape, dimension)
        for factor in (0x85EBCA6B, 0xC2B2AE35):
            place = (place ^ (place >> 15)) * jnp.uint32(factor)
        unit = (place >> 8).astype(jnp.float32) / 2**23 - 1
        return (unit * (deviation * 3**0.5)).astype(shape.dtype)

    sharding = getattr(shape, "sharding", None)
    return (jax.jit(make, out_shardings=sharding) if sharding is not None else jax.jit(make))()


def real_width(machine: Machine) -> Iterator[Check]:
    """The checks of this section."""
    if machine.quick:
        yield Check("all", _left_out)
        return
    bench = RunOnce("the step", lambda: _prepare(machine))
    plan = RunOnce("the plan", lambda: _plan(machine, bench()))
    yield Check("weights and step", lambda: _sized(bench()))
    yield Check("plan", lambda: _planned(plan()))
    yield Check("decode step", lambda: _timed(machine, bench(), plan))
    yield Check("memory", lambda: _memory(machine, bench(), plan))


def _left_out() -> Passed:
    raise CheckSkipped("left out by --quick")


def _sized(bench: Bench) -> Passed:
    size = bench.size
    config, layout = size.config, size.layout
    values = {
        "experts": config.n_routed_experts,
        "vocabulary": config.vocab_size,
        "layers": config.num_hidden_layers,
        "batch": size.batch,
        "context": size.context,
        "devices": layout.devices,
        "instead of the mesh": size.why or None,
    }
    where = f"{layout.devices} devices" if not size.why else f"one device ({size.why})"
    return Passed(
        f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.n_routed_experts} experts, vocabulary "
        f"{config.vocab_size}, batch {size.batch}, context {size.context} on {where}",
        values,
    )


def _plan(machine: Machine, bench: Bench) -> Any:
    """The compiler's plan of the same step where it has one for these devices; else None."""
    topology, size = machine.topology, bench.size
    if topology is None or size.layout is not machine.layout:
        return None
    from infer.planning.request import PlanRequest
    from infer.planning.slice_plan import compile_plan

    return compile_plan(PlanRequest(size.config, topology, size.layout, "decode", size.batch, size.context))


def _planned(plan: Any) -> Passed:
    if plan is None:
        raise CheckSkipped("there is no compiler's plan for these devices, only the account")
    longest = plan.floors[0]
    floors = {bound.resource: bound.seconds for bound in plan.floors}
    values = {"memory": plan.memory, "floors": floors, "collectives": plan.collectives, "warnings": plan.warnings}
    total = plan.memory["total"] / GIB
    return Passed(f"{total:.2f} GiB a device, no less than {longest.seconds * 1e3:.3f} ms ({longest.resource})", values)


def _timed(machine: Machine, bench: Bench, plan: RunOnce[Any]) -> Passed:
    """Median time of a step, several at a time where one is too short to be timed."""
    arguments = bench.provider.device_put_args("_decode", np.ones(bench.size.batch, np.bool_), None)
    tokens: Any = None

    def steps(count: int) -> float:
        nonlocal tokens
        start = time.perf_counter()
        for _ in range(count):
            bench.state, tokens = bench.compiled(bench.params, bench.state, *arguments)
        jax.block_until_ready((bench.state, tokens))
        return (time.perf_counter() - start) / count

    with jax.default_device(machine.first):
        steps(1)
        warm = current().tell(steps(1))  # all hosts make as many steps
        count = max(1, min(16, int(0.25 / warm)))
        times = [steps(count) for _ in range(_ROUNDS if warm < _SLOW_SECONDS else 3)]
    seconds = statistics.median(times)
    found = np.asarray(tokens)
    if not ((found >= 0) & (found < bench.size.config.vocab_size)).all():
        raise CheckFailed(f"tokens {found[:4].tolist()} are not in the vocabulary of {bench.size.config.vocab_size}")
    values: dict[str, Any] = {"seconds": seconds, "all": times, "steps at a time": count}
    rate = bench.size.batch / seconds
    figure = f"{seconds * 1e3:.2f} ms, {rate:,.1f} tokens a second (median of {len(times)} x {count} steps)"
    floor = _longest_floor(plan)
    if floor is None:
        return Passed(f"{figure}; no lower bound for this chip", values)
    ratio = seconds / floor.seconds
    values |= {"floor": floor.seconds, "binds": floor.resource, "times the floor": ratio}
    return Passed(f"{figure}; {ratio:.2f} times the lower bound of {floor.resource}", values)


def _longest_floor(plan: RunOnce[Any]) -> Any:
    try:
        made = plan()
    except CheckSkipped:  # the plan failed, which is a result of its own
        return None
    return made.floors[0] if made is not None and made.floors else None


def _memory(machine: Machine, bench: Bench, plan: RunOnce[Any]) -> Passed:
    """Measured bytes beside the account of parameters and cache, and beside the plan."""
    own, stats = bench.size.memory_breakdown.total, machine.first.memory_stats()
    analysis = bench.compiled.memory_analysis()
    step = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    values: dict[str, Any] = {
        "account": dataclasses.asdict(bench.size.memory_breakdown) | {"total": own},
        "cache rows": sum(part.nbytes for part in parts_of(bench.state.cache.latent).values()),
        "arguments and outputs of the step": step,
        "temporaries of the step": analysis.temp_size_in_bytes,
    }
    figure = f"account {own / GIB:.3f} GiB a device, compiled step {step / GIB:.3f} and {_mib(analysis)} of temporaries"
    if stats and "peak_bytes_in_use" in stats:
        values |= {"in use": stats["bytes_in_use"], "peak since the start": stats["peak_bytes_in_use"]}
        figure += f", in use {stats['bytes_in_use'] / GIB:.3f}, peak {stats['peak_bytes_in_use'] / GIB:.3f}"
    try:
        made = plan()
    except CheckSkipped:
        made = None
    if made is not None:
        values["plan"] = made.memory
        figure += f"; plan {made.memory['total'] / GIB:.3f}"
    # What is neither parameters nor cache nor padding to tiles has no business among the arguments.
    if not 0.98 * own <= step <= 1.1 * own:
        raise CheckFailed(f"{figure}: expected the step's arguments to be those of the account", **values)
    return Passed(figure, values)


def _mib(analysis: Any) -> str:
    return f"{analysis.temp_size_in_bytes / 2**20:,.1f} MiB"
