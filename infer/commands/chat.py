"""`glm52 chat`: a conversation in the terminal, in the checkpoint's own chat format."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from glm52_jax.cache.cache_format import CACHE_FORMATS
from glm52_jax.inputs.values import MAX_SEED
from glm52_jax.io.streams import read_line
from glm52_jax.text import REASONING_EFFORTS, ChatFormat
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

END_OF_THINKING = "</think>"

HELP = "/new starts over, /think turns thinking on or off, /exit or Ctrl-D leaves; Ctrl-C stops an answer"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint")
@click.option("--system", help="System message.")
@click.option("--thinking/--no-thinking", default=True, show_default=True, help="Whether the model thinks first.")
@click.option(
    "--effort", type=click.Choice([e for e in REASONING_EFFORTS if e]), help="Reasoning effort.  [default: max]"
)
@click.option("--keep-thinking", is_flag=True, help="Earlier thinking stays in the prompt (clear_thinking false).")
@click.option("--max-new-tokens", "-n", type=click.IntRange(1), default=1024, show_default=True)
@click.option("--temperature", "-t", type=float, help="0 is greedy.  [default: the checkpoint's]")
@click.option("--top-p", type=float, help="Nucleus that is sampled from.  [default: the checkpoint's]")
@sampling_options
@model_options
@on_hosts
def chat(
    checkpoint: str,
    system: str | None,
    thinking: bool,
    effort: str | None,
    keep_thinking: bool,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
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
    """Talk to the checkpoint in folder CHECKPOINT. Lines are read from standard input, so a file can be piped in."""
    check_options(temperature or 0.0, 1.0 if top_p is None else top_p, top_k or 0, seed, chunk, stop)
    session = Session.open(checkpoint, dtype, fp8, layout, hosts)
    format_ = ChatFormat.load(Path(checkpoint), session.tokenizer)
    start = [{"role": "system", "content": system}] if system else []

    def answering(messages: list[dict[str, Any]], turn: int, thinking: bool) -> Generation:
        prompt = format_.encode(
            messages,
            enable_thinking=thinking,
            reasoning_effort=effort,
            clear_thinking=False if keep_thinking else None,
        )
        return session.generation(
            [prompt],
            max_new_tokens,
            temperature=session.config.temperature if temperature is None else temperature,
            top_p=session.config.top_p if top_p is None else top_p,
            top_k=session.config.top_k if top_k is None else top_k,
            draft_tokens=draft_tokens,
            seed=(seed + turn) % (MAX_SEED + 1),
            stop_ids=() if ignore_eos else None,
            chunk=chunk,
            cache_format=CACHE_FORMATS[kv],
        )

    answering([*start, {"role": "user", "content": "?"}], 0, thinking)  # what is wrong with any line is wrong now
    session.load()
    if not hosts.first:
        # Ctrl-C in a terminal that several hosts share is for the first, which tells the others what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    session.console.print(f"chat format: {format_.source}. {HELP}", style="dim", soft_wrap=True)
    messages: list[dict[str, Any]] = list(start)
    turn = 0
    while (line := _read_line(session)) is not None:
        if line == "/exit":
            break
        if line == "/new":
            messages = list(start)
            continue
        if line == "/think":
            thinking = not thinking
            session.console.print(f"thinking {'on' if thinking else 'off'}", style="dim")
            continue
        if line.startswith("/"):
            session.console.print(HELP, style="dim", soft_wrap=True)
            continue
        messages.append({"role": "user", "content": line})
        try:
            generation = answering(messages, turn, thinking)
        except InputError as error:
            messages.pop()
            session.console.print(str(error), style="red", soft_wrap=True)
            continue
        messages.append(_answer(session, generation, stop, thinking))
        turn += 1


def _read_line(session: Session) -> str | None:
    """A line that is not empty; None at the end. Of several hosts the first reads, and all go on with it."""
    return session.hosts.tell(_read_own_line(session) if session.hosts.first else None)


def _read_own_line(session: Session) -> str | None:
    prompt = Text("> ", "bold") if session.console.is_terminal else ""
    while True:
        try:
            line = read_line(lambda: session.console.input(prompt)).strip()
        except InputError as error:
            session.console.print(f"{error}; this line is left out", style="red", soft_wrap=True)
            continue
        except (EOFError, KeyboardInterrupt):
            return None
        if line:
            return line


@contextlib.contextmanager
def _between_steps(hosts: ProcessGroup) -> Generator[list[int]]:
    """A list that the first Ctrl-C makes true: with several hosts, all must stop after the same step."""
    interrupted: list[int] = []

    def note(number: int, _: Any) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(number)

    if hosts.processes == 1 or not hosts.first:
        yield interrupted
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _answer(session: Session, generation: Generation, stops: tuple[str, ...], thinking: bool) -> dict[str, Any]:
    """Streams an answer, and returns it as a message with its reasoning apart."""
    text = ""
    try:
        with _between_steps(session.hosts) as interrupted:
            for _, piece in stream_texts(generation, session.tokenizer, 1, stops):
                text += piece
                session.write(piece)
                if session.hosts.tell(bool(interrupted)):
                    generation.end(0)
                    break
    except KeyboardInterrupt:
        if session.hosts.processes > 1:
            raise
        generation.end(0)
    finally:
        session.write("\n")
    session.console.print(f"{stats_line(generation.stats)}; ended: {generation.reasons[0]}", style="dim")
    if not thinking:
        return {"role": "assistant", "content": text}
    # The prompt opened the think block, so the text begins inside of it.
    reasoning, closed, content = text.partition(END_OF_THINKING)
    return {"role": "assistant", "content": content if closed else "", "reasoning_content": reasoning}
