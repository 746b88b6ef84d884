"""Lower bounds of a step's time, one for each resource, counted from the compiled program.

None of them is a prediction: each takes peak rates, and nothing else that takes time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from infer.planning.request import PlanRequest
from sharding.compiler.chips import Chip
from sharding.compiler.hlo.collectives import Collective
from sharding.compiler.hlo.program import Program
from sharding.compiler.links import seconds_by_dimension


@dataclasses.dataclass(frozen=True)
class LowerBound:
    """A time that the step takes at least, by one resource.

    Attributes:
        resource: "compute", "HBM", "ICI", "DCN" or "row copies".
        seconds: of one step.
        of: what it is made of, in words.
    """

    resource: str
    seconds: float
    of: str


def lower_bounds(request: PlanRequest, program: Program) -> list[LowerBound]:
    """Lower bounds of the time of a step, the longest first."""
    chip = request.topology.chip
    # What kernels state has no type: the fastest one is still a lower bound.
    peaks = {dtype: chip.peak("fp8" if dtype == "kernel" else dtype) for dtype in program.flops}
    compute = sum(count / peaks[dtype] for dtype, count in program.flops.items())
    operations = ", ".join(f"{count / 1e12:.3g} T of {dtype}" for dtype, count in program.flops.items())
    moved = f"{program.hbm_bytes / 1e9:,.1f} GB at {chip.hbm_bytes_per_s / 1e12:.3g} TB/s"
    found = [
        LowerBound("compute", compute, f"operations: {operations}"),
        LowerBound("HBM", program.hbm_bytes / chip.hbm_bytes_per_s, moved),
        *_networks(collectives(program, chip), chip),
        _row_copies(request),
    ]
    return sorted(found, key=lambda bound: -bound.seconds)


def collectives(program: Program, chip: Chip) -> list[dict[str, Any]]:
    """Collectives of one kind, axis, network and placement together, the most bytes first.

    Each has `kind`, `axes`, `network`, `placement` (how its groups lie on the torus), `links` (of a chip, that it can
    use) and by dimension `links_along`, `bytes` that a device sends and how many of them leave its chip
    (`link_bytes`), `seconds` that these take on those links, `executed` and `overlapped` times.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for one in program.collectives:
        if not one.executed:
            continue
        key = one.kind, one.axes, one.network, one.route and (one.route.words, tuple(one.route.links.items()))
        row = found.setdefault(key, _empty_row(one))
        leaving = one.leaving_bytes * one.executed
        row["bytes"] += one.sent_bytes * one.executed
        row["link_bytes"] += leaving
        row["seconds"] += leaving / _rate(one, chip) if leaving else 0.0
        row["executed"] += one.executed
        row["overlapped"] += one.executed * one.overlapped
    return sorted(found.values(), key=lambda row: -row["bytes"])


def _empty_row(one: Collective) -> dict[str, Any]:
    return {
        "kind": one.kind,
        "axes": list(one.axes),
        "network": one.network,
        "placement": one.route.words if one.route else None,
        "links": one.route.all_links if one.route else None,
        "links_along": dict(one.route.links) if one.route else {},
        **dict.fromkeys(("bytes", "link_bytes", "seconds", "executed", "overlapped"), 0.0),
    }


def _rate(one: Collective, chip: Chip) -> float:
    """Bytes a second that a device can send for a collective."""
    if one.network == "dcn":
        return chip.dcn_bytes_per_s
    return one.route.all_links * chip.link_bytes_per_s if one.route else chip.ici_bytes_per_s


def _networks(rows: list[dict[str, Any]], chip: Chip) -> list[LowerBound]:
    found = []
    ici, dcn = ([row for row in rows if row["network"] == network and row["seconds"]] for network in ("ici", "dcn"))
    if ici:
        # Where no torus is known, all links are one dimension.
        used = [(row["links_along"] or {"": chip.ici_links}, row["seconds"]) for row in ici]
        along = seconds_by_dimension(used)
        most = max(along.values())
        busiest = [dimension for dimension, seconds in sorted(along.items()) if math.isclose(seconds, most)]
        own = [row for row, (links, _) in zip(ici, used, strict=True) if busiest[0] in links]
        found.append(LowerBound("ICI", most, _sent_along(", ".join(busiest), own, chip)))
    if dcn:
        size = sum(row["link_bytes"] for row in dcn)
        of = f"{size / 1e9:.3g} GB at {chip.dcn_bytes_per_s / 1e9:.3g} GB/s"
        found.append(LowerBound("DCN", sum(row["seconds"] for row in dcn), of))
    return found


def _sent_along(along: str, rows: list[dict[str, Any]], chip: Chip) -> str:
    """What is sent over the links of a dimension, by axes and links."""
    sizes: dict[tuple[str, float], float] = {}
    for row in rows:
        key = "+".join(row["axes"]) or "?", row["links"] or chip.ici_links
        sizes[key] = sizes.get(key, 0.0) + row["link_bytes"]
    parts = [
        f"{size / 1e9:.3g} GB over {axes} on {links:.3g} link{'' if links == 1 else 's'}"
        for (axes, links), size in sorted(sizes.items(), key=lambda item: -item[1])
    ]
    each = f"{chip.link_bytes_per_s / 1e9:.3g} GB/s each"
    return f"{f'along {along}: ' if along else ''}{' + '.join(parts)}, {each}"


def _row_copies(request: PlanRequest) -> LowerBound:
    rows, cost, cores = _selected_rows(request), request.row_copy_cost, request.topology.chip.cores_per_device
    of = f"{rows:,.0f} rows of the cache at {cost:.3g} ns" + (f" on each of {cores} cores" if cores > 1 else "")
    return LowerBound("row copies", rows * cost / 1e9 / cores, of)


def _selected_rows(request: PlanRequest) -> float:
    """Rows of latents that a device's queries select in a step, when selections are even over the devices."""
    config, layout = request.config, request.layout
    each = {"prefill": request.chunk / layout.parts("tokens"), "verify": request.draft_tokens + 1}.get(request.step, 1)
    # Of the devices that have the most sequences: rows of padding are on others.
    queries = request.batch // layout.parts("batch") * each
    chosen = min(config.index_topk, request.context)
    return config.num_hidden_layers * queries * chosen / layout.parts("kv_pages")
