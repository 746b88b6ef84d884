"""`plan`: compiles a step of the full model for a slice of TPUs and says what the compiler made of it.

Times here are floors: what the work would take at least if one resource were used perfectly and nothing else took any
time. None of them is a prediction.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from glm52_jax.config import FULL, SPARSE, ModelConfig
from glm52_jax.params import abstract_params
from infer.plan.account import Account
from infer.plan.request import Request, accounted, described, request
from sharding.layout import Layout

LARGE = 64 * 10**6
"""Bytes from which on a copy or an array that every device has is worth a warning."""
LARGEST_TEMPORARIES = 5


@dataclasses.dataclass(frozen=True)
class Floor:
    """A time that the step takes at least, by one resource.

    Attributes:
        resource: "compute", "HBM", "ICI", "DCN" or "row copies".
        seconds: of one step.
        of: what it is made of, in words.
    """

    resource: str
    seconds: float
    of: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a slice makes of a step; bytes are those of one device.

    Attributes:
        request: in words, by field.
        account: bytes by arithmetic.
        compiled: whether the compiler was asked; without libtpu the account is all there is.
        fits: whether it fits; by the account alone where nothing was compiled.
        memory: bytes: "arguments", "outputs", "temporaries", "total", "limit", "free", "code".
        temporaries: the largest places of the working memory: name, shape, bytes.
        collectives: kind, mesh axes, network, bytes sent, how often, how many overlap with computation.
        flops: operations by type.
        hbm_bytes: moved to and from HBM.
        floors: of the time of a step, the longest first.
        tokens_per_second_per_device: at the longest floor.
        kernels: custom calls by name: how often they run, and the operations and bytes that they state, all together.
        warnings: sentences.
        seconds: of lowering and compiling, here.
        refusal: what the compiler said where it does not fit.
    """

    request: dict[str, Any]
    account: Account
    compiled: bool
    fits: bool
    memory: dict[str, int]
    temporaries: list[dict[str, Any]]
    collectives: list[dict[str, Any]]
    flops: dict[str, float]
    hbm_bytes: float
    floors: list[Floor]
    tokens_per_second_per_device: float | None
    kernels: list[dict[str, Any]]
    warnings: list[str]
    seconds: dict[str, float]
    refusal: str | None = None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"total_of_account": self.account.total}

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Plan:
        fields = {f.name for f in dataclasses.fields(cls)}
        raw = {name: value for name, value in raw.items() if name in fields}
        return cls(**raw | {"account": Account(**raw["account"]), "floors": [Floor(**f) for f in raw["floors"]]})


def compile_plan(asked: Request) -> Plan:
    """Compiles the step of a request.

    Raises:
        InputError: libtpu is not installed.
    """
    from sharding.compiled import compile_for

    placed = asked.topology.mesh(asked.layout)
    provider = asked.provider(placed.mesh)
    step = getattr(provider, asked.step)(abstract_params(asked.config))
    compiled = compile_for(
        step.function,
        step.arguments,
        placed,
        donate=[step.names.index(name) for name in step.donated],
        names=step.names,
        shares=shares(asked.config),
        copies_from=LARGE,
        options=provider.compiler_options,
    )
    memory, program = compiled.memory, compiled.program
    own = accounted(asked)
    floors = sorted(_floors(asked, program), key=lambda floor: -floor.seconds)
    longest = floors[0].seconds if floors else 0.0
    return Plan(
        request=described(asked) | {"placement": placed.placement},
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
        collectives=_collectives(program),
        flops={name: float(count) for name, count in program.flops.items()},
        hbm_bytes=float(program.hbm_bytes),
        floors=floors,
        tokens_per_second_per_device=asked.tokens / longest / asked.layout.devices if longest else None,
        kernels=[
            {"name": k.name, "executed": k.executed, "flops": k.flops, "hbm_bytes": k.hbm_bytes}
            for k in program.kernels
        ],
        warnings=_warnings(own, compiled),
        seconds={"lower": compiled.lower_seconds, "compile": compiled.compile_seconds},
        refusal=compiled.refusal,
    )


def analytic_plan(asked: Request, why: str) -> Plan:
    """What can be said without the compiler."""
    own, limit = accounted(asked), asked.topology.chip.hbm_bytes
    return Plan(
        request=described(asked),
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
        warnings=[f"{why}; this is the account alone, without temporaries, collectives and floors"],
        seconds={},
    )


def shares(config: ModelConfig) -> dict[str, tuple[float, float]]:
    """How often each branch of the two conditionals of a layer is taken (`lax.cond`: False first)."""
    layers = config.num_hidden_layers
    full = sum(kind == FULL for kind in config.indexer_types) / layers
    sparse = sum(kind == SPARSE for kind in config.mlp_layer_types) / layers
    return {"attention/cond": (1 - full, full), "mlp/cond": (sparse, 1 - sparse)}


def _floors(asked: Request, program: Any) -> list[Floor]:
    chip = asked.topology.chip
    # What kernels state has no type: the fastest one is still a floor.
    peaks = {dtype: chip.peak("fp8" if dtype == "kernel" else dtype) for dtype in program.flops}
    compute = sum(count / peaks[dtype] for dtype, count in program.flops.items())
    operations = ", ".join(f"{count / 1e12:.3g} T of {dtype}" for dtype, count in program.flops.items())
    sent = {"ici": 0.0, "dcn": 0.0}
    for (_, _, network), size in program.sent_bytes().items():
        sent[network] += size
    floors = [
        Floor("compute", compute, f"operations: {operations}"),
        Floor(
            "HBM",
            program.hbm_bytes / chip.hbm_bytes_per_s,
            f"{program.hbm_bytes / 1e9:,.1f} GB at {chip.hbm_bytes_per_s / 1e12:.3g} TB/s",
        ),
    ]
    for network, rate in (("ici", chip.ici_bytes_per_s), ("dcn", chip.dcn_bytes_per_s)):
        if sent[network]:
            floors.append(
                Floor(network.upper(), sent[network] / rate, f"{sent[network] / 1e9:.3g} GB at {rate / 1e9:.3g} GB/s")
            )
    rows = _selected_rows(asked)
    cost = asked.row_copy_cost
    cores = chip.cores_per_device
    of = f"{rows:,.0f} rows of the cache at {cost:.3g} ns" + (f" on each of {cores} cores" if cores > 1 else "")
    floors.append(Floor("row copies", rows * cost / 1e9 / cores, of))
    return floors


def _selected_rows(asked: Request) -> float:
    """Rows of latents that a device's queries select in a step, when selections are even over the devices."""
    config, layout = asked.config, asked.layout
    each = {"prefill": asked.chunk / layout.parts("tokens"), "verify": asked.draft_tokens + 1}.get(asked.step, 1)
    # Of the devices that have the most sequences: rows of padding are on others.
    queries = asked.batch // layout.parts("batch") * each
    chosen = min(config.index_topk, asked.context)
    return config.num_hidden_layers * queries * chosen / layout.parts("kv_pages")


def _collectives(program: Any) -> list[dict[str, Any]]:
    """Collectives of one kind, axis and network together, the most bytes first."""
    found: dict[tuple[str, tuple[str, ...], str], dict[str, Any]] = {}
    for one in program.collectives:
        if not one.executed:
            continue
        row = found.setdefault(
            (one.kind, one.axes, one.network),
            {
                "kind": one.kind,
                "axes": list(one.axes),
                "network": one.network,
                "bytes": 0.0,
                "executed": 0.0,
                "overlapped": 0.0,
            },
        )
        row["bytes"] += one.sent_bytes * one.executed
        row["executed"] += one.executed
        row["overlapped"] += one.executed * one.overlapped
    return sorted(found.values(), key=lambda row: -row["bytes"])


def _warnings(own: Account, compiled: Any) -> list[str]:
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


def plan(
    config: ModelConfig,
    topology: str,
    layout: str | Layout = "throughput",
    step: str = "decode",
    *,
    batch: int = 1,
    context: int = 128 * 1024,
    **options: Any,
) -> Plan:
    """Whether and how a step of the model runs on a slice, by the TPU compiler; see `request` for the arguments.

    Plans are kept on disk by what they are made of, and found again. Without libtpu the analytic account is given.

    Raises:
        InputError: as `request`.
    """
    from infer.plan.stored import planned

    return planned(request(config, topology, layout, step, batch=batch, context=context, **options))
