"""`glm52 convert` and `glm52 export`: options and what is printed; the work is done elsewhere."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from glm52_jax.checkpoint.convert.options import DTYPE_NAMES, KEEP, QUANTIZE, ConversionOptions
from glm52_jax.checkpoint.formats.orbax_layout import CHUNK_BYTES
from glm52_jax.inputs.sizes import SIZE, short_size
from glm52_jax.io.progress import progressing
from glm52_jax.io.terminal import screen
from sharding.errors import InputError

if TYPE_CHECKING:
    from glm52_jax.checkpoint.convert.conversion import ConversionPlan


HELP = {"help_option_names": ["-h", "--help"]}


# More than the processors, since a thread that flushes only waits.
_JOBS = max(4, min(16, 2 * (os.cpu_count() or 2)))


def jobs_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option `--jobs` of a command."""
    return click.option("--jobs", type=click.IntRange(1), default=_JOBS, show_default=True, help="Threads.")(command)


def _local_folder(context: click.Context, parameter: click.Parameter, value: Path) -> Path:
    """The destination of a command, which must be a folder here: another place would become a strange folder.

    Raises:
        InputError: it is an address, or a name that is not UTF-8, which libraries that read the result cannot open.
    """
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(value), re.IGNORECASE):
        raise InputError(f"{value} is an address, expected a folder; docs/pods.md says how to mount a bucket as one")
    if any("\ud800" <= character <= "\udfff" for character in str(value)):
        raise InputError(f"{value}: the name is not UTF-8, expected one that every reader of the result can open")
    return value


@click.command(context_settings=HELP)
@click.argument("source")
@click.argument("destination", type=click.Path(path_type=Path), callback=_local_folder)
@click.option(
    "--dtype",
    type=click.Choice([KEEP, *DTYPE_NAMES]),
    default=KEEP,
    show_default=True,
    help="Type of the plain weights; other than keep, weights in codes are dequantised to it.",
)
@click.option(
    "--quantize", type=click.Choice(list(QUANTIZE)), help="Store in blocks of codes what the published FP8 files do."
)
@click.option("--layers", help="Only these, such as 0,3,6-9,78 (the MTP layer is the last); to look at, not to run.")
@click.option("--without-mtp", is_flag=True, help="Go on without an MTP layer, or leave it out.")
@click.option("--process", default="1/1", metavar="I/N", help="The I-th of N processes that share the work.")
@click.option("--unit-size", type=SIZE, help="What a worker loses at most when it is stopped.  [default: 256MiB]")
@click.option(
    "--chunk-size", type=SIZE, default=CHUNK_BYTES, help="Largest file of a matrix that is cut.  [default: 64MiB]"
)
@jobs_option
def convert(
    source: str,
    destination: Path,
    dtype: str,
    quantize: str | None,
    layers: str | None,
    without_mtp: bool,
    process: str,
    unit_size: int | None,
    chunk_size: int,
    jobs: int,
) -> None:
    """Convert a published checkpoint to an Orbax checkpoint.

    SOURCE is a folder, a URL such as gs://bucket/GLM-5.2, or the id of a repository on the Hugging Face hub.

    The same command goes on where it was stopped, whatever stopped it. DESTINATION/params is what Orbax restores;
    manifest.json says what every tensor was made from.
    """
    from glm52_jax.checkpoint.convert import conversion as conversion
    from glm52_jax.checkpoint.sources.open_source import opened

    settings = ConversionOptions(dtype, quantize, layer_numbers(layers), without_mtp, chunk_size)
    part, unit_bytes = _process(process), unit_size or conversion.UNIT_BYTES
    options = ["--unit-size", str(unit_size)] if unit_size else []
    with opened(source) as checkpoint:
        _convert(conversion.plan(checkpoint, destination, settings), jobs, part, unit_bytes, [*options, *_given(jobs)])


def _given(jobs: int) -> list[str]:
    return ["--jobs", str(jobs)] if jobs != _JOBS else []


def _convert(
    planned: ConversionPlan, jobs: int, process: tuple[int, int], unit_bytes: int, options: Sequence[str]
) -> None:
    from glm52_jax.checkpoint.convert.conversion import convert

    console = screen(stderr=True, soft_wrap=True)
    for note in planned.notes:
        console.print(note, style="yellow")
    tensors = len(planned.outputs)
    console.print(
        f"{tensors:,} tensors, {short_size(planned.bytes)}, {len(planned.leaves):,} leaves; at most "
        f"{planned.memory_bound(jobs) / 2**20:,.0f} MiB of anonymous memory"
    )
    with progressing(console, "converting") as meter:
        result = convert(planned, jobs=jobs, process=process, unit_bytes=unit_bytes, meter=meter, options=options)
    for note in result.notes:
        console.print(note, style="yellow")
    if result.account.bytes:
        console.print(result.account.line())
    if result.left:
        console.print(f"{result.left:,} tensors are left to other processes; the last of them finishes the checkpoint")
    else:
        console.print(f"{planned.destination}: finished")


def _process(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if len(text) > 20 or not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise InputError(f"--process is {text!r}, expected the number of a process and how many there are, such as 2/4")
    return int(number), int(count)


def layer_numbers(text: str | None) -> tuple[int, ...] | None:
    """Layer numbers and ranges, both ends included."""
    if text is None:
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if (
            max(len(first), len(last)) > 6
            or not first.isdecimal()
            or (dash and not (last.isdecimal() and int(first) <= int(last) < 10**6))
        ):
            raise InputError(f"--layers is {text!r}, expected layer numbers and ranges such as 0,3,6-9")
        found |= set(range(int(first), int(last) + 1)) if dash else {int(first)}
    return tuple(sorted(found))


@click.command(context_settings=HELP)
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("destination", type=click.Path(path_type=Path), callback=_local_folder)
@click.option("--shard-size", type=SIZE, default="5GB", show_default=True, help="Largest size of a file's tensors.")
@click.option(
    "--dtype",
    type=click.Choice([KEEP, *DTYPE_NAMES]),
    default=KEEP,
    show_default=True,
    help="Type of the plain weights; other than keep, weights in codes are dequantised to it.",
)
@click.option("--fused-experts", is_flag=True, help="One tensor for all experts of a layer; not in FP8.")
@click.option("--without-mtp", is_flag=True, help="Leave the MTP layer out.")
@jobs_option
def export(
    source: Path, destination: Path, shard_size: int, dtype: str, fused_experts: bool, without_mtp: bool, jobs: int
) -> None:
    """Write a converted checkpoint in the published layout again.

    Says where values are not those of the source any more. The same command goes on where it was stopped.
    """
    from glm52_jax.checkpoint.export import export as exporting

    console = screen(stderr=True, soft_wrap=True)
    settings = ConversionOptions(dtype, without_mtp=without_mtp)
    planned = exporting.plan(source, destination, settings, shard_bytes=shard_size, fused_experts=fused_experts)
    for note in planned.notes:
        console.print(note, style="yellow")
    files = len(planned.shards)
    console.print(
        f"{planned.tensors:,} tensors, {short_size(planned.bytes)}, {files} file{'s' * (files > 1)}; at most "
        f"{planned.memory_bound(jobs) / 2**20:,.0f} MiB of anonymous memory"
    )
    with progressing(console, "exporting") as meter:
        account = exporting.export(planned, jobs=jobs, meter=meter, options=_given(jobs))
    for note in account.notes:
        console.print(note, style="yellow")
    console.print(account.line())
    console.print(f"{destination}: finished")
