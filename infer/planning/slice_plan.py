"""`SlicePlan`: what the compiler, or arithmetic alone, says of a step on a slice of TPUs.

Times here are lower bounds: what the work would take at least if one resource were used perfectly and nothing else
took any time. None of them is a prediction.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

import jax

from glm52_jax.config import FULL, SPARSE, ModelConfig
from glm52_jax.params.init import abstract_params
from infer.planning.lower_bounds import LowerBound, collectives, lower_bounds
from infer.planning.memory_breakdown import MemoryBreakdown
from infer.planning.request import PlanRequest, describe, request_memory
from sharding.errors import InputError
from sharding.jax_settings import with_project_settings

LARGE = 64 * 10**6
"""Bytes from which on a copy or an array that every device has is worth a warning."""


LARGEST_TEMPORARIES = 5


@dataclasses.dataclass(frozen=True)
class SlicePlan:
    """What a slice makes of a step; bytes are those of one device.

    Attributes:
        request: in words, by field.
        account: bytes by arithmetic.
        compiled: whether the compiler was asked; without libtpu the account is all there is.
        fits: whether it fits; by the account alone where nothing was compiled.
        memory: bytes: "arguments", "outputs", "temporaries", "total", "limit", "free", "code".
        temporaries: the largest places of the working memory: name, shape, bytes.
        collectives: kind, mesh axes, network, links and placement, bytes sent; see `lower_bounds.collectives`.
        flops: operations by type.
        hbm_bytes: moved to and from HBM.
        floors: Lower bounds of the time of a step, the longest first.
        tokens_per_second_per_device: of sequences, not of padding, at the largest lower bound.
        kernels: custom calls by name: how often they run, and the operations and bytes that they state, all together.
        warnings: sentences.
        seconds: of lowering and compiling, when it was made.
        made: when that was, in UTC; None where nothing was compiled.
        stored: whether it was made before and found again.
        refusal: what the compiler said where it does not fit.
    """

    request: dict[str, Any]
    account: MemoryBreakdown
    compiled: bool
    fits: bool
    memory: dict[str, int]
    temporaries: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    flops: dict[str, float]
    hbm_bytes: float
    floors: list[LowerBound]
    tokens_per_second_per_device: float | None
    kernels: list[dict[str, Any]]
    warnings: list[str]
    seconds: dict[str, float]
    refusal: str | None = None
    made: str | None = None
    stored: bool = dataclasses.field(default=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total_of_account": self.account.total}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> SlicePlan:
        fields = {f.name for f in dataclasses.fields(cls)}
        raw = {name: value for name, value in raw.items() if name in fields}
        return cls(
            **raw | {"account": MemoryBreakdown(**raw["account"]), "floors": [LowerBound(**f) for f in raw["floors"]]}
        )


@with_project_settings
def compile_plan(request: PlanRequest) -> SlicePlan:
    """Compiles the step of a request.

    Raises:
        InputError: the compiler refuses the step for another reason than its memory.
        NoCompilerError: libtpu is not installed, or does not know the slice.
    """
    from sharding.compiler.compile import compile_for

    placed = request.topology.mesh(request.layout)
    provider = request.provider(placed.mesh)
    step = getattr(provider, request.step)(abstract_params(request.config))
    try:
        compiled = compile_for(
            step.function,
            step.arguments,
            placed,
            donate=[step.names.index(name) for name in step.donated],
            names=step.names,
            shares=shares(request.config),
            copies_from=LARGE,
            options=provider.compiler_options,
        )
    except jax.errors.JaxRuntimeError as error:
        said = str(error).splitlines()[0]
        raise InputError(f"the TPU compiler cannot make {request.step} for {request.topology.name}: {said}") from error
    memory, program = compiled.memory, compiled.program
    own = request_memory(request)
    found = lower_bounds(request, program)
    longest = found[0].seconds
    return SlicePlan(
        request=describe(request) | {"placement": placed.placement},
        account=own,
        compiled=True,
        fits=compiled.fits,
        memory={
            name: getattr(memory, name)
            for name in ("arguments", "outputs", "temporaries", "total", "limit", "free", "code")
        },
        temporaries=[
            {"name": place.label, "shape": place.shape, "bytes": place.bytes}
            for place in compiled.temporaries[:LARGEST_TEMPORARIES]
        ],
        collectives=collectives(program, request.topology.chip),
        flops={name: float(count) for name, count in program.flops.items()},
        hbm_bytes=float(program.hbm_bytes),
        floors=found,
        tokens_per_second_per_device=request.tokens / longest / request.layout.devices if longest else None,
        kernels=[
            {"name": k.name, "executed": k.executed, "flops": k.flops, "hbm_bytes": k.hbm_bytes}
            for k in program.kernels
        ],
        warnings=_filled_up(request) + _warnings(own, compiled),
        seconds={"lower": compiled.lower_seconds, "compile": compiled.compile_seconds},
        refusal=compiled.refusal,
        made=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def analytic_plan(request: PlanRequest, why: str) -> SlicePlan:
    """What can be said without the compiler."""
    own, limit = request_memory(request), request.topology.chip.hbm_bytes
    return SlicePlan(
        request=describe(request),
        account=own,
        compiled=False,
        fits=own.total <= limit,
        memory={"arguments": own.total, "limit": limit, "free": limit - own.total},
        temporaries=[],
        collectives=[],
        flops={},
        hbm_bytes=0.0,
        floors=[],
        tokens_per_second_per_device=None,
        kernels=[],
        warnings=[
            *_filled_up(request),
            f"{why}; this is the account alone, without temporaries, collectives and lower bounds",
        ],
        seconds={},
    )


def shares(config: ModelConfig) -> dict[str, tuple[float, float]]:
    """How often each branch of the two conditionals of a layer is taken (`lax.cond`: False first)."""
    layers = config.num_hidden_layers
    full = sum(kind == FULL for kind in config.indexer_types) / layers
    sparse = sum(kind == SPARSE for kind in config.mlp_layer_types) / layers
    return {"attention/cond": (1 - full, full), "mlp/cond": (sparse, 1 - sparse)}


def _filled_up(request: PlanRequest) -> list[str]:
    if not request.padding:
        return []
    parts = request.layout.parts("batch")
    return [
        f"{request.sequences:,} {'sequence is' if request.sequences == 1 else 'sequences are'} filled up to a batch of "
        f"{request.batch:,}, a multiple of the {parts:,} devices that share it; rates count the "
        f"{request.sequences:,} alone"
    ]


def _warnings(own: MemoryBreakdown, compiled: Any) -> list[str]:
    found = []
    for copy in compiled.program.copies[:5]:
        found.append(
            f"{copy.kind} of {copy.bytes / 2**30:.2f} GiB, {copy.executed:,.0f} times: {copy.shape} from "
            f"{copy.op_name or copy.name}"
        )
    if own.replicated:
        size = sum(own.replicated.values())
        names = sorted(own.replicated, key=lambda name: -own.replicated[name])
        found.append(f"every device has whole {size / 1e9:.1f} GB of parameters: {', '.join(names)}")
    arguments = compiled.memory.arguments
    if arguments > 1.01 * own.total:
        found.append(
            f"padding to tiles takes {(arguments - own.total) / 2**30:.2f} GiB of the {arguments / 2**30:.2f} GiB of "
            "arguments"
        )
    return found
