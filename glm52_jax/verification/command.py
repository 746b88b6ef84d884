"""`glm52 verify`: options and what is printed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from glm52_jax.checkpoint.commands import HELP, jobs_option, layer_numbers
from glm52_jax.inputs.sizes import short_size
from glm52_jax.io.progress import progressing
from glm52_jax.io.terminal import screen
from sharding.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from glm52_jax.checkpoint.sources.open_source import Checkpoint
    from glm52_jax.verification.layerwise import StageDifference

_MOST_DIFFERENCES = 20


@click.command(context_settings=HELP)
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--against", "source", required=True, help="What it was made from.")
@click.option("--quick", is_flag=True, help="Names, types, shapes, sizes and totals only; no value is read.")
@click.option(
    "--layers",
    help="In place of values, run these layers, such as 0,3,6,78 (the MTP layer is the last), and those of transformers"
    " on the source's weights, and say where they first differ beyond rounding. Needs torch and transformers.",
)
@click.option("--tokens", type=int, help="With --layers: how many tokens.  [default: index_topk and 64 more]")
@jobs_option
def verify(target: Path, source: str, quick: bool, layers: str | None, tokens: int | None, jobs: int) -> None:
    """Compare a converted or exported checkpoint with its source: every tensor by value, or layers by what they do.

    The exit code is 0 where they are equal, 1 where they differ, 2 where one of them cannot be read.
    """
    from glm52_jax.checkpoint.sources.open_source import open_checkpoint, opened
    from glm52_jax.verification import verify as verification

    if tokens is not None and layers is None:
        raise InputError("--tokens is for --layers, which is not given")
    if quick and layers is not None:
        raise InputError("--quick and --layers are given, expected one of them")
    numbers = layer_numbers(layers)
    console = screen(stderr=True, soft_wrap=True)
    if numbers is not None:
        from sharding.jax_settings import start_devices

        start_devices()
    quick = quick or numbers is not None
    with opened(source) as checkpoint, progressing(console, "verifying") as meter:
        found = open_checkpoint(target)
        report = verification.verify(found, checkpoint, quick=quick, jobs=jobs, meter=meter)
        for note in (*report.notes, *report.changed):
            console.print(note, style="yellow")
        if numbers is not None and not report.differences:
            _verify_layers(found, checkpoint, numbers, tokens, console)
            return
    if report.account is not None:
        console.print(report.account.line())
    for difference in report.differences[:_MOST_DIFFERENCES]:
        click.echo(difference)
    if len(report.differences) > _MOST_DIFFERENCES:
        click.echo(f"and {len(report.differences) - _MOST_DIFFERENCES:,} more")
    if report.differences:
        raise SystemExit(1)
    how = "names, types, shapes and sizes are" if quick else "every value is"
    click.echo(f"{report.tensors:,} tensors, {short_size(report.bytes)}: {how} as {source} gives them")


def _verify_layers(
    target: Checkpoint, source: Checkpoint, layers: tuple[int, ...], tokens: int | None, console: Console
) -> None:
    """Prints a table of stages and a verdict on standard output; the exit code is 1 where they differ."""
    from glm52_jax.verification import layerwise

    planned, plural = layerwise.plan(target, source, layers, tokens=tokens), "s" * (len(layers) > 1)
    for note in planned.notes:
        console.print(note, style="yellow")
    console.print(
        f"{len(layers)} layer{plural}, {len(planned.tokens):,} tokens, one layer in memory at a time; at most "
        f"{planned.memory_bound / 2**20:,.0f} MiB of anonymous memory"
    )
    findings = []
    for found in layerwise.compare(planned, said=console.print):
        _print_layer(found, header=not findings)
        findings += found
    click.echo(f"rounding: float32; {layerwise.BOUND:g} of a value and of the RMS of its token's values")
    first = next((finding for finding in findings if finding.beyond), None)
    if first is not None:
        click.echo(f"first difference beyond rounding: {first.sentence}")
        raise SystemExit(1)
    click.echo(f"layer{plural} {', '.join(map(str, layers))}: no difference beyond rounding")


def _print_layer(findings: Sequence[StageDifference], *, header: bool) -> None:
    """A layer's rows of the table, as soon as it is done; those of the next one go on below them."""
    terminal = sys.stdout.isatty()
    table = Table(box=SIMPLE_HEAD if terminal else None, show_header=header, pad_edge=False)
    for name, width in (("layer", 8), ("stage", 19)):
        table.add_column(name, min_width=width, no_wrap=True)
    for name in ("max |d|", "of RMS", "of bound"):
        table.add_column(name, min_width=8, justify="right", no_wrap=True)
    table.add_column("")
    for f in findings:
        figures = (f"{f.largest:.0f} rows", "", "") if f.is_choice else tuple(f"{v:.1e}" for v in f.figures)
        table.add_row(f.where, f.stage, *figures, f.note, style="bold red" if f.beyond else None)
    screen(width=120).print(table)
