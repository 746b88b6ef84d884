"""CaseStats as tables, for people on a terminal and as Markdown."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.kernels.catalogue import ours
from benchmarks.kernels.stats import BYTES, COPIES, FLOPS, CaseStats
from benchmarks.schedule.chips import CAL, IDEAL

MIB = 2**20
_WORDS = frozenset({"shape", "chip", "form", "blocks", "binds", "notes", "why"})


@dataclasses.dataclass(frozen=True)
class Sheet:
    """A table: rows of as many cells as there are columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def show(console: Console, sheets: Iterable[Sheet], markdown: bool) -> None:
    """Prints tables; Markdown has no colours and lines of any length."""
    for sheet in sheets:
        if markdown:
            console.print(as_markdown(sheet), markup=False, highlight=False, soft_wrap=True)
            continue
        table = Table(title=sheet.title, box=SIMPLE_HEAD, title_justify="left")
        for column in sheet.columns:
            table.add_column(column, justify="left" if column in _WORDS else "right", overflow="fold")
        for row in sheet.rows:
            table.add_row(*map(escape, row))
        console.print(table)


def as_markdown(sheet: Sheet) -> str:
    lines = [f"### {sheet.title}", "", "| " + " | ".join(sheet.columns) + " |"]
    lines.append("|" + "|".join("---" if column in _WORDS else "---:" for column in sheet.columns) + "|")
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in sheet.rows]
    return "\n".join([*lines, ""])


_COLUMNS = ("shape", "chip", "form", "compile s", "VMEM MiB", "bundles", "hot loop", "MXU", "HBM MiB")
_COLUMNS += (
    "bytes us",
    "FLOPs us",
    "copies us",
    "binds",
    "ideal us",
    "ratio",
    "cal us",
    "around us",
    "to ours",
    "notes",
)


def measured(stats: Sequence[CaseStats]) -> list[Sheet]:
    """A table for each operation; forms that do the same work are in rows one after another, ours first."""
    sheets = []
    for op, group in itertools.groupby(stats, key=lambda one: one.op):
        found = list(group)
        shapes = list(dict.fromkeys(one.shape for one in found))
        chips = list(dict.fromkeys(one.chip for one in found))
        found.sort(key=lambda one: (shapes.index(one.shape), chips.index(one.chip), not ours(one.form)))
        rows = []
        for _, same in itertools.groupby(found, key=lambda one: (one.shape, one.chip)):
            forms = list(same)
            best = fastest(one for one in forms if ours(one.form))
            rows += [_row(one, best) for one in forms]
        sheets.append(Sheet(op, _COLUMNS, tuple(rows)))
    return sheets


def fastest(stats: Iterable[CaseStats]) -> CaseStats | None:
    """The one with the least ideal estimate, of those that have one."""
    return min(
        (one for one in stats if IDEAL.name in one.estimates),
        key=lambda one: one.estimates[IDEAL.name],
        default=None,
    )


def _row(one: CaseStats, best: CaseStats | None) -> tuple[str, ...]:
    head = (one.shape, one.chip, one.form)
    if one.refusal:
        return (*head, *[""] * (len(_COLUMNS) - 4), f"refused: {one.refusal}")
    whole, against = one.whole, ""
    if whole and best and best is not one and best.whole:
        against = _three(whole / best.whole)
    return (
        *head,
        f"{one.compile_s:.1f}",
        f"{one.vmem / MIB:.1f}" if one.vmem else "",
        f"{one.bundles:,}" if one.bundles else "",
        f"{one.loop:,} x {one.trips:,}" if one.trips else "",
        f"{one.mxu:.0%}" if one.mxu else "",
        f"{one.hbm_bytes / MIB:.1f}",
        *(_us(one.floors.get(name)) for name in (BYTES, FLOPS, COPIES)),
        one.binds,
        _us(one.estimates.get(IDEAL.name)) or "no figure",
        _three(one.ratio(IDEAL.name)),
        _us(one.estimates.get(CAL.name)),
        ("no figure" if one.around_s is None else _us(one.around_s)) if one.bundles else "",
        against,
        notes(one),
    )


def notes(one: CaseStats) -> str:
    """What to know of a case beside its figures."""
    said = [*one.notes]
    if one.copied:
        said.append(f"copies {one.copied / MIB:.0f} MiB")
    if one.temporaries >= MIB:
        said.append(f"{one.temporaries / MIB:.0f} MiB temporaries")
    return "; ".join(said)


def _us(seconds: float | None) -> str:
    """Microseconds."""
    return _three(None if seconds is None else seconds * 1e6)


def _three(value: float | None) -> str:
    """Three figures, or those before the point."""
    if value is None:
        return ""
    for least, digits in ((100, 0), (10, 1), (1, 2), (0.1, 3)):
        if value >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.2g}"


def sweep(stats: Sequence[CaseStats]) -> list[Sheet]:
    """The best blocks for each shape and chip, and all that were tried, the fastest first."""
    found = sorted(stats, key=lambda one: (one.op, one.shape, one.chip))
    best, rows = [], []
    for (op, shape, chip), same in itertools.groupby(found, key=lambda one: (one.op, one.shape, one.chip)):
        tried = sorted(same, key=lambda one: one.estimates.get(IDEAL.name, float("inf")))
        for one in tried:
            figure = _us(one.estimates.get(IDEAL.name)) or "no figure"
            ratio, vmem = _three(one.ratio(IDEAL.name)), f"{one.vmem / MIB:.1f}" if one.vmem else ""
            said = f"refused: {one.refusal}" if one.refusal else notes(one)
            rows.append(
                (shape, chip, one.blocks, figure, ratio, one.binds, _us(one.estimates.get(CAL.name)), vmem, said)
            )
        if (first := fastest(tried)) is not None:
            best.append(
                (
                    f"{op}, {shape}",
                    chip,
                    first.blocks,
                    _us(first.estimates[IDEAL.name]),
                    _three(first.ratio(IDEAL.name)),
                )
            )
    columns = ("shape", "chip", "blocks", "ideal us", "ratio", "binds", "cal us", "VMEM MiB", "notes")
    return [
        Sheet("tried", columns, tuple(rows)),
        Sheet("best", ("shape", "chip", "blocks", "ideal us", "ratio"), tuple(best)),
    ]
