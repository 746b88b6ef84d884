"""The compile grid: every case for every chip, and whether ours compile without large copies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from benchmarks.kernels.catalogue import ours
from benchmarks.kernels.stats import CaseStats
from benchmarks.kernels.table import MIB, Sheet


def fault(one: CaseStats) -> str:
    """What is wrong with a case of ours, or an empty text.

    A copy of half a layer and more of a stack, since nothing of its size may be copied. Smaller ones are of values that
    something else makes in a model: here they are arguments, in a layout that the compiler picks for arguments.
    """
    if not ours(one.form) or not one.fits:
        return ""
    if one.refusal:
        return f"does not compile: {one.refusal}"
    if one.copied_layer:
        return f"copies {one.copied_layer / MIB:.0f} MiB of a stack"
    return ""


def sheets(stats: Sequence[CaseStats], chips: Sequence[str]) -> list[Sheet]:
    """A row for each operation, shape and form with what became of it on each chip; then all refusals and faults."""

    def of(one: CaseStats) -> tuple[str, str, str]:
        return one.op, one.shape, one.form

    order = {key: number for number, key in enumerate(dict.fromkeys(map(of, stats)))}
    found = sorted(stats, key=lambda one: order[of(one)])
    rows = []
    for key, same in itertools.groupby(found, key=of):
        cells = {one.chip: _cell(one) for one in same}
        rows.append((*key, *(cells.get(chip, "-") for chip in chips)))
    wrong = [(*of(one), one.chip, fault(one) or f"does not compile: {one.refusal}") for one in found if _told(one)]
    made = [Sheet("compile grid: seconds, temporaries, largest copy", ("op", "shape", "form", *chips), tuple(rows))]
    if wrong:
        made.append(Sheet("refusals and copies", ("op", "shape", "form", "chip", "why"), tuple(wrong)))
    return made


def _told(one: CaseStats) -> bool:
    return bool(one.refusal or fault(one))


def _cell(one: CaseStats) -> str:
    if one.refusal:
        return "refused"
    parts = [f"{one.compile_s:.1f} s"]
    if one.temporaries >= MIB:
        parts.append(f"{one.temporaries / MIB:.0f} MiB")
    if one.copied >= MIB:
        parts.append(f"copies {one.copied / MIB:.0f} MiB")
    return ", ".join(parts)
