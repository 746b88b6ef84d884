"""Measures the kernels for TPUs without a TPU: compiles each case and reads the compiler's final schedule.

    .venv/bin/python -m benchmarks.kernels [--op OP] [--shape TEXT] [--chip CHIP] [--markdown] [--json FILE]
    .venv/bin/python -m benchmarks.kernels --grid [--short]
    .venv/bin/python -m benchmarks.kernels --sweep OP

`make plan` installs the compiler, libtpu. docs/kernels.md says what the figures mean and how far to trust them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.kernels import catalogue, grid, table
from benchmarks.kernels.catalogue import CASES, SWEEP, Entry
from benchmarks.kernels.progress import progress
from benchmarks.kernels.stats import CaseStats
from benchmarks.kernels.store import Store
from benchmarks.kernels.work import Job, done
from benchmarks.schedule.dump import use_compiler_alone
from sharding.compiler.chips import CHIPS
from sharding.errors import InputError

_WIDE = 230  # columns of a table that no terminal shows


def main() -> int:
    """Runs the command; the exit code is 1 where a case is refused or the grid finds a fault, 2 for wrong input."""
    asked = _arguments()
    log = Console(stderr=True)
    use_compiler_alone()
    try:
        if importlib.util.find_spec("libtpu") is None:
            raise InputError("libtpu, the TPU compiler, is not installed: make plan")
        store = Store(asked.json, asked.keep or asked.stored)
        broken, jobs = _jobs(asked, log)
        stats = _figures(jobs, store, asked, log)
    except InputError as error:
        log.print(f"benchmarks.kernels: {error}", markup=False)
        return 2
    screen = Console(width=None if sys.stdout.isatty() else _WIDE)
    table.show(screen, _sheets(asked, stats), asked.markdown)
    wrong = any(grid.fault(one) for one in stats) if asked.grid else any(one.refusal for one in stats)
    return int(broken or wrong)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--op", default="", help="only this operation; several with commas")
    add("--shape", default="", help="only shapes with this text")
    add("--form", default="", help="only forms with this text: 'glm52' for ours")
    add("--chip", default="", help=f"only this chip of {', '.join(CHIPS)}; several with commas")
    add("--grid", action="store_true", help="only compile, all cases, and fail on refusals and large copies of ours")
    add("--short", action="store_true", help="of the grid only what covers the shapes that generation and plans choose")
    add("--sweep", metavar="OP", default="", help="measure an operation with all blocks that its cases offer")
    add("--markdown", action="store_true", help="tables for a document")
    add("--json", type=Path, help="file of all figures, from which an interrupted run goes on")
    add("--keep", action="store_true", help="take figures from that file though the sources have changed since")
    add("--stored", action="store_true", help="only print what that file has, of any sources, and compile nothing")
    add("--processes", type=int, help="that compile at the same time (2 for --grid, else 1)")
    add("--limit", type=float, default=900, metavar="SECONDS", help="after which a case is given up (900)")
    return parser.parse_args()


def _jobs(asked: argparse.Namespace, log: Console) -> tuple[bool, list[Job]]:
    """Whether a module could not be read, and what is to be done."""
    chips = [name for name in asked.chip.split(",") if name]
    for name in chips:
        if name not in CHIPS:
            raise InputError(f"--chip {name!r}, expected one of {', '.join(CHIPS)}")
    found: list[Entry] = []
    broken = False
    for module in catalogue.modules():
        try:
            found += catalogue.entries(module, SWEEP if asked.sweep else CASES)
        except Exception as error:  # one operation's cases must not hide the others
            log.print(f"benchmarks/kernels/{module}.py: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
            broken = True
    ops = [name for name in (asked.sweep or asked.op).split(",") if name]
    known = sorted({entry.case.op for entry in found})
    for name in ops:
        if name not in known:
            kind = "sweep" if asked.sweep else "cases"
            raise InputError(f"no {kind} of {name!r}, there are those of {', '.join(known) or 'nothing'}")
    found = [entry for entry in found if not ops or entry.case.op in ops]
    if asked.short and not asked.grid:
        raise InputError("--short is of --grid, which was not asked for")
    selected = catalogue.selected(found, asked.shape, asked.form, not asked.grid, chips, short=asked.short)
    return broken, [Job(entry, chip, measure=not asked.grid) for entry, chip in selected]


def _figures(jobs: Sequence[Job], store: Store, asked: argparse.Namespace, log: Console) -> list[CaseStats]:
    """CaseStats of all jobs, in their order, from the store where it has them."""
    digests = {module: catalogue.digest(module) for module in {job.entry.module for job in jobs}}
    named = {job.refused("").key: job for job in jobs}
    found: dict[str, CaseStats] = {}
    for key, job in named.items():
        if (stored := store.get(key, digests[job.entry.module])) is not None:
            found[key] = stored
    left = [] if asked.stored else [job for key, job in named.items() if key not in found]
    if found:
        log.print(f"{len(found)} of {len(named)} are in {asked.json}", markup=False)
    try:
        with progress(log, len(left)) as advance:
            for job, stats in done(left, asked.processes or (2 if asked.grid else 1), asked.limit):
                made = dataclasses.replace(stats, digest=digests[job.entry.module])
                store.put(made)
                found[made.key] = made
                advance(f"{made.key}{f': refused: {made.refusal}' if made.refusal else ''}")
    except KeyboardInterrupt:
        log.print(f"interrupted, {len(found)} of {len(named)} are done", markup=False)
    return [found[key] for key in named if key in found]


def _sheets(asked: argparse.Namespace, stats: Sequence[CaseStats]) -> list[table.Sheet]:
    if asked.grid:
        return grid.sheets(stats, [name for name in CHIPS if any(one.chip == name for one in stats)])
    return table.sweep(stats) if asked.sweep else table.measured(stats)


if __name__ == "__main__":
    sys.exit(main())
