"""`glm52 selftest`: options, progress, the report; what is checked is in the other files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console
from rich.text import Text

from glm52_jax.io.terminal import screen, spinner
from infer.commands.on_hosts import on_hosts
from infer.selftest.checks import FAIL, PASS, SKIP, Section, run_sections
from infer.selftest.report import DEFAULT_NAME, SelftestReport, checked_path, line
from infer.selftest.together import agree_between_hosts
from sharding.hosts.process_group import ALONE, ProcessGroup
from sharding.jax_settings import with_project_settings

DEFAULT_LAYOUT = "throughput"
_STYLES = {PASS: "green", FAIL: "bold red", SKIP: "yellow"}


def on_cpu_devices(command: Callable[..., bool]) -> Callable[..., None]:
    """Makes the CPU as many devices as are asked for, before anything looks for devices; exits by the result.

    The exit is here since leaving a run of several hosts by an exception would be an accident to the others.
    """

    @functools.wraps(command)
    def run(cpu_devices: int | None, **options: Any) -> None:
        if cpu_devices:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        raise SystemExit(0 if command(cpu_devices=cpu_devices, **options) else 1)

    return run


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    is_flag=False,
    flag_value=DEFAULT_NAME,
    metavar="[FILE]",
    help=f"Write everything to this .json or .md file, to attach to an issue; {DEFAULT_NAME} where none is named.",
)
@click.option("--quick", is_flag=True, help="Leave out the layers of real width, and a check or two of the tiny model.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; progress goes to standard error.")
@click.option("--cpu-devices", type=click.IntRange(1, 1024), metavar="N", help="Run on the CPU, as N devices.")
@on_cpu_devices
@on_hosts
def selftest(
    layout: str | None, report: Path | None, quick: bool, as_json: bool, cpu_devices: int | None, hosts: ProcessGroup
) -> bool:
    """Check this machine: kernels, collectives, a tiny model and layers of real width, beside what they should be.

    All devices are used, in the layout throughput unless another is named. Each check runs even if others fail; the
    exit code is 1 if any failed. The report holds no names of hosts, users or folders.
    """
    from infer.selftest.machine import Machine

    path = checked_path(report) if report and hosts.first else None
    layout = layout or DEFAULT_LAYOUT
    machine = Machine.of(layout, quick=quick)
    options = {"layout": layout, "quick": quick, "cpu devices": cpu_devices}
    console = screen(stderr=as_json, quiet=not hosts.first)
    made = run(sections(machine), SelftestReport(options), path, console, hosts)
    if as_json and hosts.first:
        click.echo(json.dumps(made.as_json(), indent=1, default=str))
    return not made.failed


# The other commands run on one device unless they are told otherwise; here that would leave most of a machine out.
next(option for option in selftest.params if isinstance(option, click.Option) and option.name == "layout").help = (
    "How all devices share the work: throughput, latency or long_context, sizes as in data=1,expert=4,tensor=2, or a "
    f".toml file.  [default: {DEFAULT_LAYOUT}]"
)


def sections(machine: Any) -> Mapping[str, Section]:
    """All sections by name, in the order in which they make sense: each needs what those before it show."""
    from infer.selftest.collectives import collectives
    from infer.selftest.environment import environment
    from infer.selftest.kernels import kernels
    from infer.selftest.real_width import real_width
    from infer.selftest.tiny_model import tiny_model

    found = (environment, kernels, collectives, tiny_model, real_width)
    return {section.__name__.replace("_", " "): functools.partial(section, machine) for section in found}


@with_project_settings
def run(
    checks: Mapping[str, Section],
    report: SelftestReport,
    path: Path | None,
    console: Console,
    hosts: ProcessGroup = ALONE,
) -> SelftestReport:
    """Runs the sections with a line for each check, and keeps the report's file up to date.

    It is written before every check: should one hang, the file says which.
    """
    shown: AbstractContextManager[Any] = (
        spinner(console, "starting") if console.is_terminal and not console.quiet else nullcontext(lambda _: None)
    )

    def before(section: str, name: str) -> None:
        report.running = f"{section}: {name}" if name else section
        now(report.running)
        if path:
            report.write(path)

    with shown as now:
        for outcome in agree_between_hosts(run_sections(checks, before), hosts):
            report.outcomes.append(outcome)
            console.print(Text(line(outcome), style=_STYLES[outcome.status]), soft_wrap=True)
    report.running = None
    if path:
        report.write(path)
    console.print(report.summary(), style=_STYLES[FAIL if report.failed else PASS], soft_wrap=True)
    if path:
        console.print(f"report: {path}", soft_wrap=True)
    return report
