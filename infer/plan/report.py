"""Plans as text for people: one in full, several in a table, and both as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from glm52_jax.errors import InputError
from glm52_jax.lengths import short_length
from infer.plan.plan import Plan

GIB = 2**30
_WORDS = ("of", "shape", "axes", "network", "layout", "binds")  # columns that are no numbers


def show(console: Console, plan: Plan) -> None:
    """Everything of one plan."""
    console.print(_headline(plan), style="bold", soft_wrap=True)
    console.print(_verdict(plan), style="green" if plan.fits else "red", soft_wrap=True)
    console.print(_memory(plan))
    if plan.temporaries:
        console.print(_temporaries(plan))
    if plan.collectives:
        console.print(_collectives(plan))
    if plan.floors:
        console.print(_floors(plan))
        console.print(_binding(plan), soft_wrap=True)
    if plan.kernels:
        console.print(_kernels(plan))
    for warning in plan.warnings:
        console.print(f"note: {warning}", style="yellow", soft_wrap=True)
    if plan.seconds:
        lower, compiled = plan.seconds["lower"], plan.seconds["compile"]
        console.print(f"lowered in {lower:.1f} s, compiled in {compiled:.1f} s", style="dim")


def _headline(plan: Plan) -> str:
    r = plan.request
    sizes = f"data {r['data']} x expert {r['expert']} x tensor {r['tensor']}"
    size = f", chunk {short_length(r['chunk'])}" if r["chunk"] else ""
    size += f", {r['draft_tokens']} drafts" if r["draft_tokens"] else ""
    return (
        f"{r['step']} on {r['topology']}: {r['devices']} devices, {r['layout']} ({sizes}), batch {r['batch']}, context "
        f"{short_length(r['context'])}{size}, weights {r['weights']}, cache {r['kv']}"
    )


def _verdict(plan: Plan) -> str:
    free = plan.memory["free"]
    how = "" if plan.compiled else " by the account alone"
    if plan.fits:
        return f"fits{how}: {free / GIB:.2f} GiB of {plan.memory['limit'] / GIB:.2f} GiB free on each device"
    return f"does not fit{how}: {-free / GIB:.2f} GiB more than the {plan.memory['limit'] / GIB:.2f} GiB of each device"


def _memory(plan: Plan) -> Table:
    table = _table("bytes on a device", "GiB")
    own = plan.account
    for part, size in sorted(own.parameters.items(), key=lambda item: -item[1]):
        table.add_row(f"parameters: {part}", _gib(size))
    table.add_row("latent cache", _gib(own.latent))
    table.add_row("index keys", _gib(own.index_keys))
    if plan.compiled:
        other = plan.memory["total"] - own.total - plan.memory["temporaries"]
        table.add_row("temporaries", _gib(plan.memory["temporaries"]))
        table.add_row("other state, outputs, padding", _gib(own.state + other))
        table.add_row("total", _gib(plan.memory["total"]), style="bold")
    else:
        table.add_row("total of these", _gib(own.total), style="bold")
    return table


def _temporaries(plan: Plan) -> Table:
    table = _table("largest temporaries", "MiB", "shape")
    for place in plan.temporaries:
        table.add_row(place["name"], f"{place['bytes'] / 2**20:,.1f}", place["shape"])
    return table


def _collectives(plan: Plan) -> Table:
    table = _table("collectives", "axes", "network", "MB sent", "times", "overlapped")
    for row in plan.collectives:
        axes = ", ".join(row["axes"]) or "?"
        times = f"{row['executed']:,.0f}", f"{row['overlapped']:,.0f}"
        table.add_row(row["kind"], axes, row["network"].upper(), f"{row['bytes'] / 1e6:,.1f}", *times)
    return table


def _kernels(plan: Plan) -> Table:
    """What kernels state of themselves; a custom call of the compiler's own states nothing."""
    table = _table("kernels", "times", "GFLOP", "MB moved")
    for kernel in plan.kernels:
        stated = [
            "-" if value is None else f"{value / unit:,.1f}"
            for value, unit in ((kernel["flops"], 1e9), (kernel["hbm_bytes"], 1e6))
        ]
        table.add_row(kernel["name"], f"{kernel['executed']:,.0f}", *stated)
    return table


def _floors(plan: Plan) -> Table:
    table = _table("floors of the time of a step", "ms", "of")
    for floor in plan.floors:
        table.add_row(floor.resource, f"{floor.seconds * 1e3:,.3f}", floor.of)
    return table


def _binding(plan: Plan) -> str:
    longest = plan.floors[0]
    rate = plan.tokens_per_second_per_device or 0.0
    chips = plan.request["devices"] / plan.request["chips"]
    return (
        f"{longest.resource} binds: no less than {longest.seconds * 1e3:,.2f} ms a step, so at most "
        f"{rate * chips:,.1f} tokens a second and chip; a floor, not a prediction"
    )


def show_many(console: Console, plans: Sequence[Plan]) -> None:
    """One row a plan."""
    sizes = "data x expert x tensor"
    table = _table("slice", "layout", sizes, "batch", "context", "fits", "GiB free", "binds", "ms", "tok/s/chip")
    for plan in plans:
        r = plan.request
        longest = plan.floors[0] if plan.floors else None
        chips = r["devices"] / r["chips"]
        table.add_row(
            r["topology"],
            r["layout"],
            f"{r['data']} x {r['expert']} x {r['tensor']}",
            str(r["batch"]),
            short_length(r["context"]),
            "yes" if plan.fits else "no",
            f"{plan.memory['free'] / GIB:.2f}",
            longest.resource if longest else "-",
            f"{longest.seconds * 1e3:,.2f}" if longest else "-",
            f"{(plan.tokens_per_second_per_device or 0) * chips:,.1f}" if longest else "-",
        )
    console.print(table)
    console.print("ms and tokens are those of the longest floor: at least, and at most; not a prediction", style="dim")


def draw(path: Path, plans: Sequence[Plan]) -> None:
    """A picture of memory by part and of the floors, one bar a plan.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("--plot needs matplotlib: pip install 'glm52-jax[plan]'") from None
    mpl.rcParams["font.size"] = 9
    names = [f"{p.request['topology']}\n{p.request['layout']}, b {p.request['batch']}" for p in plans]
    figure = Figure(figsize=(max(7.0, 1.5 * len(plans) + 3), 7.5), layout="constrained")
    memory, floors = figure.subplots(2, 1)
    parts = {
        "experts": lambda p: p.account.parameters.get("routed experts", 0),
        "other parameters": lambda p: (
            sum(p.account.parameters.values()) - p.account.parameters.get("routed experts", 0)
        ),
        "latent cache": lambda p: p.account.latent,
        "index keys": lambda p: p.account.index_keys,
        "temporaries": lambda p: p.memory.get("temporaries", 0),
    }
    bottom = [0.0] * len(plans)
    for label, size in parts.items():
        heights = [size(p) / GIB for p in plans]
        memory.bar(names, heights, 0.6, bottom=bottom, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for place, plan in enumerate(plans):
        limit = plan.memory["limit"] / GIB
        memory.plot([place - 0.4, place + 0.4], [limit, limit], color="black", linewidth=1.5, label=None)
    memory.set_ylabel("GiB on a device (line: what there is)")
    memory.legend(fontsize=8)
    resources = list(dict.fromkeys(floor.resource for plan in plans for floor in plan.floors))
    width = 0.8 / max(1, len(resources))
    for number, resource in enumerate(resources):
        heights = [sum(f.seconds for f in plan.floors if f.resource == resource) * 1e3 for plan in plans]
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(plans))]
        floors.bar(places, heights, width, label=resource)
    floors.set_xticks(range(len(plans)), names)
    floors.set_yscale("log")
    floors.set_ylabel("floor of a step's time, ms")
    floors.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}"
