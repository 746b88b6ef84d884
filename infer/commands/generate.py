"""`glm52 generate`: continues prompts as they are, without a chat format."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from glm52_jax.cache.cache_format import CACHE_FORMATS
from glm52_jax.io.files import check_folder
from glm52_jax.io.streams import read_all
from infer.commands.on_hosts import on_hosts
from infer.commands.session import (
    Session,
    check_options,
    model_options,
    sampling_options,
    stats_line,
    stream_texts,
)
from infer.generate import Generation
from sharding.errors import InputError
from sharding.hosts.process_group import ProcessGroup


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option("--max-new-tokens", "-n", type=click.IntRange(0), default=128, show_default=True)
@click.option("--temperature", "-t", type=float, default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Nucleus that is sampled from.")
@click.option("--special", is_flag=True, help="Read special tokens such as <|user|> in the prompts as tokens.")
@click.option(
    "--profile",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write a trace of the steps to this folder, for xprof or TensorBoard.",
)
@sampling_options
@model_options
@on_hosts
def generate(
    checkpoint: str,
    prompts: tuple[str, ...],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    special: bool,
    profile: Path | None,
    top_k: int | None,
    seed: int,
    draft_tokens: int,
    chunk: int,
    kv: str,
    stop: tuple[str, ...],
    ignore_eos: bool,
    dtype: str | None,
    fp8: str,
    layout: str | None,
    hosts: ProcessGroup,
) -> None:
    """Continue each PROMPT with the checkpoint in folder CHECKPOINT; "-" is read from standard input.

    Several prompts run as one batch. The text goes to standard output, figures to standard error.
    """
    check_options(temperature, top_p, top_k or 0, seed, chunk, stop)
    _check_profile(profile)
    texts = [_read_prompt(hosts) if prompt == "-" else prompt for prompt in prompts]
    session = Session.open(checkpoint, dtype, fp8, layout, hosts)
    generation = session.generation(
        [session.tokenizer.encode(text, special=special) for text in texts],
        max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k or 0,
        draft_tokens=draft_tokens,
        seed=seed,
        stop_ids=() if ignore_eos else None,
        chunk=chunk,
        cache_format=CACHE_FORMATS[kv],
    )
    session.load()
    generation.params = session.params
    with _traced(profile):
        _write(session, generation, texts, stop)
    ended = ", ".join(str(reason) for reason in generation.reasons)
    session.console.print(f"{stats_line(generation.stats)}; ended: {ended}", style="dim", soft_wrap=True)


def _check_profile(folder: Path | None) -> None:
    """Makes the folder of a trace, so that one that cannot be written is known before the weights are loaded."""
    if folder is None:
        return
    try:
        check_folder(folder)
    except InputError as error:
        raise InputError(f"--profile {error}") from None


def _traced(folder: Path | None) -> AbstractContextManager[Any]:
    """A trace of what runs inside, where one is asked for; each host writes files of its own."""
    if folder is None:
        return nullcontext()
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # calls of Python are many, and most of them compile
    return jax.profiler.trace(str(folder), profiler_options=options)


def _write(session: Session, generation: Generation, texts: Sequence[str], stop: Sequence[str]) -> None:
    """One text as it comes, several when all are there."""
    pieces = stream_texts(generation, session.tokenizer, len(texts), stop)
    if len(texts) == 1:
        try:
            for _, piece in pieces:
                session.write(piece)
        finally:  # what ends it early is said on a line of its own
            session.write("\n")
    else:
        whole = [""] * len(texts)
        for row, piece in pieces:
            whole[row] += piece
        for row, text in enumerate(whole):
            session.write(f"--- prompt {row + 1}: {texts[row]!r} ({generation.reasons[row]})\n{text}\n")


def _read_prompt(hosts: ProcessGroup) -> str:
    """Standard input; of several hosts, that of the first."""
    return hosts.tell(read_all() if hosts.first else None)
