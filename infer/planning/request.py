"""`PlanRequest`: a step, a model and a slice to plan; checked before the compiler is asked, and also without one."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from typing import Any

import jax

from glm52_jax.cache.cache_format import CACHE_FORMATS, CacheFormat
from glm52_jax.config import FULL, ModelConfig
from glm52_jax.inputs.values import number, whole_number
from glm52_jax.kernels import resolve_backend
from glm52_jax.params.axis_rules import rules_of
from glm52_jax.params.init import abstract_params
from infer.planning.memory_breakdown import MemoryBreakdown, memory_breakdown, parameter_bytes
from infer.speculative import MAX_DRAFT_TOKENS
from infer.steps import StepProvider
from sharding.compiler.topology import Topology
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings
from sharding.layout import Layout
from sharding.presets import PRESETS, read_layouts

STEPS = ("decode", "verify", "prefill")
KERNELS = ("reference", "cpu", "tpu")
"""Backends of kernels that a plan can be made of: those that are compiled for a TPU, not interpreted."""
CHUNK = 4096
"""Tokens of each sequence in a prefill step where nothing else is asked for."""
MOST = 2**31 - 1
"""The largest number that a step counts with: its indices are int32."""
ROOM = 0.9
"""Part of the HBM that a preset's account may take, so that temporaries find room."""


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """What is to be planned.

    Attributes:
        config: of the model.
        topology: the slice.
        layout: of its devices.
        step: "decode", "verify" (drafts and their verification) or "prefill".
        batch: sequences of the step, rows of padding among them.
        context: positions that each has room for.
        chunk: tokens of each sequence in a prefill step.
        draft_tokens: drafts a verify step.
        kv: "plain", "fp8" or "fp8-tensor", see `row_formats.CACHE_FORMATS`.
        kernels: backend of the kernels, one of `KERNELS`; the best for TPUs when None.
        row_copy_ns: cost of issuing the copy of one row of the cache; the chip's stated one when None.
        halves: exchange rows with experts in two halves; the collectives then say whether they overlap.
        padding: rows of the batch without a sequence, which fill it up to a multiple of the devices that share it.
    """

    config: ModelConfig
    topology: Topology
    layout: Layout
    step: str = "decode"
    batch: int = 1
    context: int = 128 * 1024
    chunk: int = CHUNK
    draft_tokens: int = 0
    kv: str = "plain"
    kernels: str | None = None
    row_copy_ns: float | None = None
    halves: bool = False
    padding: int = 0

    @property
    def sequences(self) -> int:
        """Rows of the batch that are sequences."""
        return self.batch - self.padding

    @property
    def tokens(self) -> int:
        """Tokens that the step takes in, over all sequences; a verify step may keep as few as one of each."""
        return self.sequences * (self.chunk if self.step == "prefill" else 1)

    @property
    def row_copy_cost(self) -> float:
        """Nanoseconds to issue the copy of one row of the cache: as asked for, or the chip's."""
        return self.topology.chip.row_copy_ns if self.row_copy_ns is None else self.row_copy_ns

    def sized(self, **sizes: int) -> PlanRequest:
        """The same request with another batch or context, whose rows are all sequences."""
        return dataclasses.replace(self, **{"padding": 0} | sizes)

    def provider(self, mesh: Any) -> StepProvider:
        """The provider of the step, as generation would build it."""
        params = abstract_params(self.config)
        return StepProvider.of(
            params,
            self.config,
            batch=self.batch,
            capacity=self.context - self.draft_tokens,
            chunk=self.chunk if self.step == "prefill" else self.layout.parts("tokens"),
            draft_tokens=self.draft_tokens,
            backend=self.kernels,
            cache_format=cache_format(self.kv),
            layout=self.layout,
            mesh=mesh,
            overlap=self.halves,
        )

    def key(self) -> str:
        """A text that is the same for equal requests, whatever their layouts are called."""
        rules = tuple((name, self.layout.axes_of(name)) for name in sorted(rules_of(self.layout)))
        same = dataclasses.replace(self, layout=dataclasses.replace(self.layout, name="", rules=rules))
        return hashlib.sha256(repr(same).encode()).hexdigest()


def cache_format(kv: str) -> CacheFormat:
    """The cache's format by its name on the command line.

    Raises:
        InputError: no such name.
    """
    if not isinstance(kv, str) or kv not in CACHE_FORMATS:
        raise InputError(f"kv is {kv!r}, expected {' or '.join(CACHE_FORMATS)}")
    return CACHE_FORMATS[kv]


@with_project_settings
def plan_request(
    config: ModelConfig,
    topology: str | Topology,
    layout: str | Layout = "throughput",
    step: str = "decode",
    *,
    batch: int = 1,
    context: int = 128 * 1024,
    **options: Any,
) -> PlanRequest:
    """What is asked for, checked: nonsense is refused here, before the compiler is loaded.

    Args:
        topology: for instance "v5p:4x4x4", or "2xv6e:16x16" for two slices.
        layout: a preset, sizes such as "expert=16,tensor=4", a TOML file, or a `Layout`. Of a preset the first that
            divides the model and fits by the account is taken.
        options: `chunk`, `draft_tokens`, `kv`, `kernels`, `row_copy_ns`, `halves`.

    Raises:
        InputError: an unknown slice, layout, step, format or backend; a number that is none or out of its range; sizes
            that do not divide; a context past the model's, or without room for the chunk or the drafts.
    """
    if not isinstance(config, ModelConfig):
        raise InputError(f"config is {config!r}, expected a ModelConfig, which load_config reads")
    topology = Topology.parse(topology) if isinstance(topology, str) else topology
    if not isinstance(topology, Topology) or not isinstance(layout, str | Layout):
        raise InputError(f"topology and layout are {topology!r} and {layout!r}, expected names, a Topology, a Layout")
    if step not in STEPS:
        raise InputError(f"step is {step!r}, expected {', '.join(STEPS)}")
    batch, context = whole_number(batch, "batch", 1, MOST), whole_number(context, "context", 1)
    if context > config.max_position_embeddings:
        raise InputError(
            f"context is {context}, expected 1 to {config.max_position_embeddings}, the model's max_position_embeddings"
        )
    options = _checked(options, topology, step, context)
    if isinstance(layout, Layout):
        candidates: tuple[Layout, ...] = (layout,)
    else:
        candidates = read_layouts(layout, topology.device_count, topology.slices, experts=config.n_routed_experts)
    request = [PlanRequest(config, topology, one, step, batch, context, **options) for one in candidates]
    return _first_that_fits(request, preset=isinstance(layout, str) and layout in PRESETS)


def _checked(options: dict[str, Any], topology: Topology, step: str, context: int) -> dict[str, Any]:
    """The other options of a step, in range and with its defaults."""
    found = dict(options)
    cache_format(found.get("kv", "plain"))
    kernels, halves, cost = found.get("kernels"), found.get("halves", False), found.get("row_copy_ns")
    if kernels is not None:
        if kernels not in KERNELS:
            raise InputError(f"kernels: {kernels!r} is not one of {', '.join(KERNELS)}, which are compiled for TPUs")
        resolve_backend(kernels, "tpu", next(iter(topology.chip.kinds), ""))
    if not isinstance(halves, bool):
        raise InputError(f"halves is {halves!r}, expected True or False")
    if cost is not None:
        expected = "a positive, finite number of nanoseconds"
        found["row_copy_ns"] = number(cost, "row_copy_ns", expected)
        if not 0 < found["row_copy_ns"] < math.inf:
            raise InputError(f"row_copy_ns is {cost!r}, expected {expected}")
    if found.get("chunk") is None:
        # A sequence has no more tokens than its context has room for.
        found["chunk"] = min(CHUNK, context)
    elif whole_number(found["chunk"], "chunk", 1) > context and step == "prefill":
        raise InputError(f"chunk is {found['chunk']}, expected at most the context, {context}")
    drafts = found.get("draft_tokens")
    usual, least = (3, 1) if step == "verify" else (0, 0)
    drafts = whole_number(usual if drafts is None else drafts, "draft_tokens", least, MAX_DRAFT_TOKENS)
    found["draft_tokens"] = drafts
    if context <= drafts:
        raise InputError(f"context is {context}, expected more than the {drafts} draft tokens, which it has to hold")
    return found


def _first_that_fits(request: list[PlanRequest], *, preset: bool) -> PlanRequest:
    """The first request whose layout divides the model and the batch, and, of a preset, whose account fits."""
    refusals, divided = [], []
    for one in request:
        one.topology.check(one.layout)
        # A batch that the devices do not divide is filled up with rows of padding, as generation does.
        padding = -one.batch % one.layout.parts("batch")
        filled = dataclasses.replace(one, batch=one.batch + padding, padding=padding)
        try:
            parameter_bytes(one.config, one.layout)
        except InputError as error:
            refusals.append(error)
            continue
        own = request_memory(filled)
        divided.append((own.total, filled))
        if not preset or own.total <= ROOM * one.topology.chip.hbm_bytes:
            return filled
    if not divided:
        raise refusals[0]
    return min(divided, key=lambda one: one[0])[1]


def request_memory(request: PlanRequest) -> MemoryBreakdown:
    """The analytic account of a request.

    Raises:
        InputError: the layout does not divide a parameter or the chunk; drafts without an MTP layer.
    """
    provider = request.provider(_Abstract(request.layout.devices))
    return memory_breakdown(request.config, request.layout, jax.eval_shape(provider.own_state))


class _Device:
    platform = "tpu"


@dataclasses.dataclass(frozen=True)
class _Abstract:
    """Stands for a mesh where only the platform and the number of devices are asked for."""

    count: int

    @property
    def devices(self) -> Any:
        import numpy as np

        return np.array([_Device()] * self.count, object)


def describe(request: PlanRequest) -> dict[str, Any]:
    """A request by words and numbers."""
    layout = request.layout
    return {
        "topology": request.topology.name,
        "slices": request.topology.slices,
        "chips": request.topology.chips_per_slice * request.topology.slices,
        "devices": layout.devices,
        "layout": layout.name,
        "data": layout.data,
        "expert": layout.expert,
        "tensor": layout.tensor,
        "rules": {name: list(axes) for name, axes in rules_of(layout).items()},
        "step": request.step,
        "batch": request.batch,
        "sequences": request.sequences,
        "padding": request.padding,
        "tokens": request.tokens,
        "context": request.context,
        "chunk": request.chunk if request.step == "prefill" else None,
        "draft_tokens": request.draft_tokens,
        "kv": request.kv,
        "kernels": request.kernels,
        "row_copy_ns": request.row_copy_cost,
        "halves": request.halves,
        "weights": request.config.quantization.method if request.config.quantization else request.config.dtype,
        "full_layers": sum(kind == FULL for kind in request.config.indexer_types),
    }
