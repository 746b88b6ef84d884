"""`glm52 selftest`: options, progress, the report; what is checked is in the other files."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from infer.selftest.checks import FAIL, PASS, SKIP, Outcome, Section, run_sections
from infer.selftest.report import DEFAULT_NAME, Report, checked_path, line

_STYLES = {PASS: "green", FAIL: "bold red", SKIP: "yellow"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--layout",
    default="throughput",
    show_default=True,
    help="throughput, latency, long_context, sizes such as expert=4,tensor=2, or a TOML file.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value=DEFAULT_NAME,
    metavar="[FILE]",
    help=f"Write everything to this .json or .md file, to attach to an issue; {DEFAULT_NAME} where none is named.",
)
@click.option("--quick", is_flag=True, help="Leave out the layers of real width.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; progress goes to standard error.")
@click.option("--cpu-devices", type=click.IntRange(1), metavar="N", help="Run on the CPU, as N devices.")
def selftest(layout: str, report: Path | None, quick: bool, as_json: bool, cpu_devices: int | None) -> None:
    """Check this machine: kernels, collectives, a tiny model and layers of real width, beside what they should be.

    Each check runs even if others fail. The exit code is 1 if any failed. The report holds no names of hosts, users or
    folders.
    """
    path = checked_path(report) if report else None
    if cpu_devices:
        _use_cpu(cpu_devices)
    from infer.selftest.machine import Machine

    machine = Machine.of(layout, quick=quick)
    options = {"layout": layout, "quick": quick, "cpu devices": cpu_devices}
    made = run(sections(machine), Report(options), path, Console(stderr=as_json, highlight=False))
    if as_json and _speaks():
        click.echo(json.dumps(made.as_json(), indent=1, default=str))
    raise SystemExit(1 if made.failed else 0)


def _use_cpu(count: int) -> None:
    """Makes the CPU that many devices; JAX must not have looked for devices yet."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def sections(machine: Any) -> Mapping[str, Section]:
    """All sections by name, in the order in which they make sense: each needs what those before it show."""
    from infer.selftest.collectives import collectives
    from infer.selftest.environment import environment
    from infer.selftest.kernels import kernels
    from infer.selftest.real_width import real_width
    from infer.selftest.tiny_model import tiny_model

    found = (environment, kernels, collectives, tiny_model, real_width)
    return {section.__name__.replace("_", " "): functools.partial(section, machine) for section in found}


def run(checks: Mapping[str, Section], report: Report, path: Path | None, console: Console) -> Report:
    """Runs the sections with a line for each check, and keeps the report's file up to date.

    It is written before every check: should one hang, the file says which.
    """
    speaks = _speaks()
    status = console.status("starting") if speaks and console.is_terminal else None

    def before(section: str, name: str) -> None:
        report.running = f"{section}: {name}" if name else section
        if status:
            status.update(report.running)
        if path and speaks:
            report.write(path)

    shown: AbstractContextManager[Any] = status or nullcontext()
    with shown:
        for outcome in _agreed(run_sections(checks, before)):
            report.outcomes.append(outcome)
            if speaks:
                console.print(Text(line(outcome), style=_STYLES[outcome.status]), soft_wrap=True)
    report.running = None
    if path and speaks:
        report.write(path)
    if speaks:
        console.print(report.summary(), style=_STYLES[FAIL if report.failed else PASS], soft_wrap=True)
        if path:
            console.print(f"report: {path}", soft_wrap=True)
    return report


def _speaks() -> bool:
    """Whether this process prints: one of them does."""
    import jax

    return jax.process_index() == 0


def _agreed(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    """What became of each check on all processes: one failure is a failure."""
    import jax

    if jax.process_count() == 1:
        yield from outcomes
        return
    import dataclasses

    import numpy as np
    from jax.experimental import multihost_utils

    for outcome in outcomes:
        failed = np.asarray(multihost_utils.process_allgather(np.array([outcome.status == FAIL]))).reshape(-1)
        if failed.any() and outcome.status != FAIL:
            who = ", ".join(str(process) for process in np.flatnonzero(failed))
            outcome = dataclasses.replace(
                outcome, status=FAIL, figure=f"failed on process {who}; here: {outcome.figure}"
            )
        yield outcome
