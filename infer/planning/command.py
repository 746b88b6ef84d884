"""`glm52 plan`: options and what is printed; the work is done elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from glm52_jax.config import FULL, ModelConfig, load_config
from glm52_jax.inputs.lengths import LENGTH, short_length
from glm52_jax.io.terminal import screen, spinner
from sharding.errors import InputError

if TYPE_CHECKING:
    from infer.planning.request import PlanRequest
    from infer.planning.slice_plan import SlicePlan
    from infer.planning.sweep import Refused


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model")
@click.option(
    "--topology",
    required=True,
    multiple=True,
    help="Slices, such as v5p:4x4x4, or 2xv6e:16x16; several for --sweep.",
)
@click.option(
    "--layout",
    default=["throughput"],
    show_default=True,
    multiple=True,
    help="throughput, latency, long_context, sizes such as expert=16,tensor=4, or a TOML file; several for --sweep.",
)
@click.option("--step", type=click.Choice(["decode", "verify", "prefill"]), default="decode", show_default=True)
@click.option("--batch", type=click.IntRange(1, 2**31 - 1), default=64, show_default=True, help="Sequences.")
@click.option("--context", type=LENGTH, default="128k", show_default=True, help="Positions of each sequence.")
@click.option(
    "--chunk",
    type=LENGTH,
    help="Tokens of a sequence in a prefill step.  [default: 4k, or the context if that is less]",
)
@click.option("--draft-tokens", type=click.IntRange(1, 7), default=3, show_default=True, help="Of a verify step.")
@click.option("--kv", type=click.Choice(["plain", "fp8", "fp8-tensor"]), default="plain", show_default=True)
@click.option("--kernels", help="Backend of the kernels.  [default: the best for TPUs]")
@click.option("--row-copy-ns", type=float, help="Cost of issuing the copy of one cache row.  [default: the chip's]")
@click.option("--halves", is_flag=True, help="Exchange rows with experts in two halves, one under the other's compute.")
@click.option("--all-full", is_flag=True, help="An indexer on every layer, to see what IndexShare saves.")
@click.option("--fit", is_flag=True, help="The largest batch for the context and the largest context for the batch.")
@click.option(
    "--sweep",
    is_flag=True,
    help="Every slice with every layout, in one table, the most tokens a second and chip first; see docs/plan.md.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw memory and lower bounds to this PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--fresh", is_flag=True, help="Compile even what has been planned before.")
def plan(
    model: str,
    topology: tuple[str, ...],
    layout: tuple[str, ...],
    step: str,
    batch: int,
    context: int,
    chunk: int | None,
    draft_tokens: int,
    kv: str,
    kernels: str | None,
    row_copy_ns: float | None,
    halves: bool,
    all_full: bool,
    fit: bool,
    sweep: bool,
    plot: Path | None,
    as_json: bool,
    fresh: bool,
) -> None:
    """Compile a step of MODEL for TPUs that are not here, and say whether it fits and what binds it.

    MODEL is a built-in name such as glm-5.2 or glm-5.2-fp8, a config.json, or a checkpoint folder. No weight is read.
    """
    config = load_config(model)
    config = _every_layer_full(config) if all_full else config
    options: dict[str, Any] = {"kv": kv, "kernels": kernels, "row_copy_ns": row_copy_ns, "halves": halves}
    options |= {"chunk": chunk} if step == "prefill" else {}
    options |= {"draft_tokens": draft_tokens} if step == "verify" else {}
    if plot:
        from infer.planning.picture import check

        check(plot)
    from infer.planning.report import ranked
    from infer.planning.request import plan_request
    from infer.planning.sweep import each

    request, refused = each(
        _pairs(topology, layout, sweep=sweep),
        lambda pair: plan_request(config, *pair, step, batch=batch, context=context, **options),
        lambda pair: pair,
    )
    _note(refused)
    plans, uncompiled = each(
        request,
        lambda one: _fitted(one, fresh) if fit else [_made(one, fresh)],
        lambda one: (one.topology.name, one.layout.name),
    )
    _note(uncompiled)
    refused += uncompiled
    made = [one for some in plans for one in some]
    made = ranked(made) if sweep else made
    if plot:
        from infer.planning.picture import draw

        draw(plot, made)
    if as_json:
        click.echo(json.dumps([one.as_json() for one in [*made, *refused]], indent=2))
    else:
        _print(made, refused, table=sweep or fit)
    if not any(one.fits for one in made):
        raise SystemExit(1)


def _pairs(topologies: Sequence[str], layouts: Sequence[str], *, sweep: bool) -> list[tuple[str, str]]:
    """Each slice with each layout."""
    from infer.planning import sweep as several

    if sweep:
        topologies, layouts = several.names(topologies), several.layouts(layouts)
    elif len(several.names(topologies)) > 1 or len(layouts) > 1 or _lists(layouts[0]):
        named = " ".join(
            [*(f"--topology {one}" for one in topologies), *(f"--layout {one}" for one in layouts)],
        )
        raise InputError(f"{named}: expected one slice and one layout; several are for --sweep")
    return [(one, name) for one in topologies for name in layouts]


def _lists(layout: str) -> bool:
    from infer.planning.sweep import layouts

    return not layout.endswith(".toml") and len(layouts([layout])) > 1


def _note(refused: Sequence[Refused]) -> None:
    for one in refused:
        text = f"not planned: {one.topology}, layout {one.layout}: {one.why}"
        screen(stderr=True, soft_wrap=True).print(text, style="yellow")


def _made(request: PlanRequest, fresh: bool) -> SlicePlan:
    from infer.planning.stored_plans import stored_plan

    made = stored_plan(request, fresh=fresh, compiling=lambda: _compiling(request))
    console = screen(stderr=True, soft_wrap=True)
    if made.compiled and not made.stored and not console.is_terminal:
        free = made.memory["free"] / 2**30
        console.print(f"{'fits' if made.fits else 'does not fit'}, {free:,.2f} GiB free")
    return made


@contextlib.contextmanager
def _compiling(request: PlanRequest) -> Generator[None]:
    """Says what is compiled: beside a spinner, or as a line where nobody would see it turn."""
    context = short_length(request.context)
    what = (
        f"compiling {request.step} for {request.topology.name}, {request.layout.name}, batch {request.batch}, {context}"
    )
    console = screen(stderr=True, soft_wrap=True)
    if console.is_terminal:
        with spinner(console, what):
            yield
    else:
        console.print(what)
        yield


def _fitted(request: PlanRequest, fresh: bool) -> list[SlicePlan]:
    """The largest batch of a request, then its largest context."""
    from infer.planning.fit import largest_batch, largest_context

    return [largest(request, lambda sized: _made(sized, fresh)).plan for largest in (largest_batch, largest_context)]


def _print(made: list[SlicePlan], refused: Sequence[Refused], *, table: bool) -> None:
    from infer.planning.report import show, show_many

    console = screen(width=160)
    if table:
        show_many(console, made, refused)
    else:
        for one in made:
            show(console, one)


def _every_layer_full(config: ModelConfig) -> ModelConfig:
    if not config.num_hidden_layers:
        raise InputError("--all-full: the model has no layers")
    return dataclasses.replace(config, indexer_types=(FULL,) * config.num_hidden_layers)
