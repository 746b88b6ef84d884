"""Plans as text for people: one in full, or several in a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from glm52_jax.inputs.lengths import short_length
from infer.planning.slice_plan import SlicePlan
from infer.planning.sweep import Refused

GIB = 2**30
_WORDS = (
    "of",
    "shape",
    "axes",
    "network",
    "placement",
    "layout",
    "binds",
    "not planned because",
)  # columns that are no numbers


def show(console: Console, plan: SlicePlan) -> None:
    """Everything of one plan."""
    console.print(_headline(plan), style="bold", soft_wrap=True)
    console.print(_rules(plan), style="dim", soft_wrap=True)
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
        console.print(_made(plan), style="dim")


def _made(plan: SlicePlan) -> str:
    lower, compiled = plan.seconds["lower"], plan.seconds["compile"]
    if plan.stored:
        return (
            f"stored, made on {plan.made}: then lowered in {lower:.1f} s and compiled in {compiled:.1f} s "
            "(--fresh compiles again)"
        )
    return f"lowered in {lower:.1f} s, compiled in {compiled:.1f} s"


def _headline(plan: SlicePlan) -> str:
    r = plan.request
    sizes = f"data {r['data']} x expert {r['expert']} x tensor {r['tensor']}"
    size = f", chunk {short_length(r['chunk'])}" if r["chunk"] else ""
    size += f", {r['draft_tokens']} drafts" if r["draft_tokens"] else ""
    batch = f"batch {r['batch']:,}" + (f" ({r['sequences']:,} of them sequences)" if r["padding"] else "")
    other = ", rows exchanged in two halves" if r["halves"] else ""
    other += f", {r['kernels']} kernels" if r["kernels"] else ""
    placed = f", placement {r['placement']}" if r.get("placement") else ""
    devices = f"{r['devices']} device{'s' * (r['devices'] != 1)}"
    return (
        f"{r['step']} on {r['topology']}: {devices}, {r['layout']} ({sizes}), {batch}, context "
        f"{short_length(r['context'])}{size}, weights {r['weights']}, cache {r['kv']}{other}{placed}"
    )


def _rules(plan: SlicePlan) -> str:
    """The rules in force; an axis of one device divides nothing."""
    divided = {
        name: [axis for axis in axes if plan.request[axis] > 1] for name, axes in sorted(plan.request["rules"].items())
    }
    words = [f"{name} over {' and '.join(axes)}" for name, axes in divided.items() if axes]
    return f"rules: {'; '.join(words) or 'nothing is divided'}"


def _verdict(plan: SlicePlan) -> str:
    free = plan.memory["free"]
    how = "" if plan.compiled else " by the account alone"
    if plan.fits:
        return f"fits{how}: {_gib(free)} GiB of {_gib(plan.memory['limit'])} GiB free on each device"
    return f"does not fit{how}: {_gib(-free)} GiB more than the {_gib(plan.memory['limit'])} GiB of each device"


def _memory(plan: SlicePlan) -> Table:
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


def _temporaries(plan: SlicePlan) -> Table:
    table = _table("largest temporaries", "MiB", "shape")
    for place in plan.temporaries:
        table.add_row(place["name"], f"{place['bytes'] / 2**20:,.1f}", place["shape"])
    return table


def _collectives(plan: SlicePlan) -> Table:
    table = _table("collectives", "axes", "network", "placement", "links", "MB sent", "ms", "times", "overlapped")
    for row in plan.collectives:
        table.add_row(
            row["kind"],
            ", ".join(row["axes"]) or "?",
            row["network"].upper(),
            row["placement"] or "-",
            "-" if row["links"] is None else f"{row['links']:.3g}",
            f"{row['bytes'] / 1e6:,.1f}",
            f"{row['seconds'] * 1e3:,.3f}",
            f"{row['executed']:,.0f}",
            f"{row['overlapped']:,.0f}",
        )
    return table


def _kernels(plan: SlicePlan) -> Table:
    """What kernels state of themselves; a custom call of the compiler's own states nothing."""
    table = _table("kernels", "times", "GFLOP", "MB moved")
    for kernel in plan.kernels:
        stated = [
            "-" if value is None else f"{value / unit:,.1f}"
            for value, unit in ((kernel["flops"], 1e9), (kernel["hbm_bytes"], 1e6))
        ]
        table.add_row(kernel["name"], f"{kernel['executed']:,.0f}", *stated)
    return table


def _floors(plan: SlicePlan) -> Table:
    table = _table("lower bounds of the time of a step", "ms", "of")
    for bound in plan.floors:
        table.add_row(bound.resource, f"{bound.seconds * 1e3:,.3f}", bound.of)
    return table


def _binding(plan: SlicePlan) -> str:
    longest = plan.floors[0]
    return (
        f"{longest.resource} binds: no less than {longest.seconds * 1e3:,.2f} ms a step, so at most "
        f"{_rate(plan) or 0.0:,.1f} tokens a second and chip; a lower bound, not a prediction"
    )


def ranked(plans: Sequence[SlicePlan]) -> list[SlicePlan]:
    """What fits first, and of that the most tokens a second and chip."""
    return sorted(plans, key=lambda plan: (not plan.fits, -(_rate(plan) or 0.0)))


def _rate(plan: SlicePlan) -> float | None:
    """Tokens a second and chip, of sequences and not of padding."""
    rate = plan.tokens_per_second_per_device
    return None if rate is None else rate * plan.request["devices"] / plan.request["chips"]


def show_many(console: Console, plans: Sequence[SlicePlan], refused: Sequence[Refused] = ()) -> None:
    """One row a plan, and one each that could not be planned."""
    sizes = "data x expert x tensor"
    columns = ["layout", sizes, "batch", "context", "fits", "GiB free", "binds", "ms", "tok/s/chip"]
    table = _table("slice", *columns, *(["not planned because"] if refused else []))
    for plan in plans:
        r = plan.request
        longest, rate = plan.floors[0] if plan.floors else None, _rate(plan)
        table.add_row(
            r["topology"],
            r["layout"],
            f"{r['data']} x {r['expert']} x {r['tensor']}",
            f"{r['sequences']:,}" + (f" of {r['batch']:,}" if r["padding"] else ""),
            short_length(r["context"]),
            "yes" if plan.fits else "no",
            _gib(plan.memory["free"]),
            longest.resource if longest else "-",
            f"{longest.seconds * 1e3:,.2f}" if longest else "-",
            "-" if rate is None else f"{rate:,.1f}",
        )
    for one in refused:
        table.add_row(one.topology, one.layout, *["-"] * (len(columns) - 1), one.why)
    console.print(table)
    console.print(
        "ms and tokens are those of the largest lower bound: at least, and at most; not a prediction", style="dim"
    )
    for note in dict.fromkeys(warning for plan in plans for warning in plan.warnings if not plan.compiled):
        console.print(f"note: {note}", style="yellow", soft_wrap=True)
    if any(plan.request["padding"] for plan in plans):
        note = "of a batch `1 of 8` one row is a sequence, seven fill it up; tokens are those of sequences"
        console.print(f"note: {note}", style="yellow", soft_wrap=True)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="left" if column in _WORDS else "right")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
