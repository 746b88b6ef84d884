"""What the generating commands share: options, loading with progress, text as it comes, the line of figures."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from glm52_jax.cache.cache_format import CACHE_FORMATS
from glm52_jax.checkpoint.load.loader import load_with_report
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.config import ModelConfig, load_config
from glm52_jax.inputs.values import SEED
from glm52_jax.io.files import is_there
from glm52_jax.io.terminal import progress_bar, screen
from glm52_jax.params.init import abstract_params
from glm52_jax.text import StopStrings, Tokenizer, check_stops
from infer.commands.on_hosts import choose_layout, fingerprint
from infer.generate import STOP, Generation, GenerationStats
from infer.memory_check import refuse_too_large
from infer.sampling import Sampling
from infer.speculative import MAX_DRAFT_TOKENS
from sharding.errors import InputError
from sharding.hosts.process_group import ALONE, ProcessGroup
from sharding.layout import Layout

Command = Callable[..., Any]


def model_options(command: Command) -> Command:
    """How to load the checkpoint."""
    for option in (
        click.option(
            "--fp8",
            type=click.Choice(["keep", "dequantize"]),
            default="keep",
            show_default=True,
            help="FP8 weights stay codes and scales in memory, or become plain ones at load.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(["bfloat16", "float32"]),
            help="Type of the plain weights and of the computation.  [default: as stored]",
        ),
    ):
        command = option(command)
    return command


def sampling_options(command: Command) -> Command:
    """How to choose tokens."""
    for option in (
        click.option("--ignore-eos", is_flag=True, help="Go on past the ids that end a text."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text; up to four times."),
        click.option(
            "--kv",
            type=click.Choice(list(CACHE_FORMATS)),
            default="plain",
            show_default=True,
            help="Cache rows as computed, in FP8 with group scales, or in FP8 with a scale a layer.",
        ),
        click.option("--chunk", type=int, default=512, show_default=True, help="Prompt tokens a prefill step."),
        click.option(
            "--draft-tokens",
            type=click.IntRange(0, MAX_DRAFT_TOKENS),
            default=0,
            show_default=True,
            help="Drafts a step by the MTP layer; a greedy text stays the same.",
        ),
        click.option(
            "--top-k", type=click.IntRange(0), help="How many of the likeliest tokens to sample from; 0 is all."
        ),
        click.option("--seed", type=SEED, default=0, show_default=True, help="Seed of the sampling."),
    ):
        command = option(command)
    return command


def check_options(temperature: float, top_p: float, top_k: int, seed: int, chunk: int, stops: Sequence[str]) -> None:
    """Refuses what no checkpoint could make right, before one is opened."""
    Sampling.of(1, temperature, top_p, [seed], top_k)
    check_stops(stops)
    if chunk < 1:
        raise InputError(f"--chunk is {chunk}, expected at least 1")


@dataclasses.dataclass
class Session:
    """A checkpoint with its tokenizer, on all devices of `layout`.

    Opening one reads no weight. What is asked of it is checked on shapes, by a `generation` before `load`.

    Of several hosts the first prints: to `console` for people, on standard error, and by `write` what was generated.

    Attributes:
        config: of the model as the folder has it, without an MTP layer where there is no tensor of it.
        params: shapes, and the weights after `load`.
    """

    config: ModelConfig
    params: dict[str, Any]
    tokenizer: Tokenizer
    console: Console
    layout: Layout
    hosts: ProcessGroup
    _load: Callable[[], dict[str, Any]]

    @classmethod
    def open(
        cls, checkpoint: str, dtype: str | None, fp8: str, layout: str | None = None, hosts: ProcessGroup = ALONE
    ) -> Session:
        """Opens a folder in the published layout or a converted one, and compares its headers with the model's."""
        folder = Path(checkpoint)
        if not (is_there(folder) and folder.is_dir()):
            raise InputError(f"{checkpoint}: no such folder, expected a checkpoint in the published layout")
        console = screen(stderr=True, quiet=not hosts.first)
        config = load_config(folder)
        tokenizer = Tokenizer.load(folder)
        if tokenizer.vocab_size > config.vocab_size:
            raise InputError(
                f"{folder / 'tokenizer.json'}: has {tokenizer.vocab_size} tokens, more than the {config.vocab_size} "
                "rows of the embedding (vocab_size)"
            )
        hosts.agree(f"the checkpoint in {checkpoint}", fingerprint(folder))
        chosen = choose_layout(layout, config, fp8, hosts)
        found = open_checkpoint(folder).check(config).config
        stored = found if fp8 == "keep" else dataclasses.replace(found, quantization=None)
        return cls(
            config=found,
            params=abstract_params(stored, dtype=dtype),
            tokenizer=tokenizer,
            console=console,
            layout=chosen,
            hosts=hosts,
            _load=lambda: load_with_progress(folder, config, dtype, fp8, console, chosen),
        )

    def generation(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options: Any) -> Generation:
        """A generation with the session's model and layout; its options are those of `Generation`.

        Raises:
            InputError: the request is wrong, or can never fit into memory; before the weights are there, too.
        """
        made = Generation(self.params, self.config, prompts, max_new_tokens, layout=self.layout, **options)
        refuse_too_large(made.provider, self.params)
        return made

    def load(self) -> None:
        """Loads the weights, for generations that are made from now on."""
        self.params = self._load()

    def write(self, text: str) -> None:
        """Text to standard output at once, whatever its encoding; of several hosts, on the first."""
        if self.hosts.first:
            sys.stdout.write(text)
            sys.stdout.flush()


def load_with_progress(
    folder: Path, config: ModelConfig, dtype: str | None, fp8: str, console: Console, layout: Layout
) -> dict[str, Any]:
    """`load_params` with a bar on a terminal; elsewhere a line when it is done."""
    with progress_bar(console, "loading", disable=not console.is_terminal) as progress:
        task = progress.add_task("load", total=None)
        params, report = load_with_report(
            folder,
            config,
            dtype=dtype,
            fp8=fp8,  # type: ignore[arg-type]
            layout=layout,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for note in report.notes:
        console.print(note, style="yellow", soft_wrap=True)
    where = f" for layout {layout.name}: {layout.data} x {layout.expert} x {layout.tensor} devices"
    console.print(
        f"loaded {report.tensors:,} tensors, {report.bytes / 1e6:,.1f} MB{where if layout.devices > 1 else ''}",
        style="dim",
        soft_wrap=True,
    )
    return params


def stream_texts(
    generation: Generation, tokenizer: Tokenizer, rows: int, stops: Sequence[str], *, skip_special: bool = True
) -> Iterator[tuple[int, str]]:
    """(row, text) as it becomes certain: whole characters, and nothing of a stop string.

    A row that meets a stop string is ended in `generation` too.
    """
    decoders = [tokenizer.stream(skip_special=skip_special) for _ in range(rows)]
    filters = [StopStrings(stops) for _ in range(rows)]
    for row, tokens in generation:
        for token in tokens:
            text, stopped = filters[row].push(decoders[row].push(token))
            if text:
                yield row, text
            if stopped:
                generation.end(row)
                break
    for row in range(rows):
        if not filters[row].stopped:
            last, stopped = filters[row].push(decoders[row].flush())
            last += "" if stopped else filters[row].flush()
            if filters[row].stopped:
                generation.reasons[row] = STOP
            if last:
                yield row, last


def stats_line(stats: GenerationStats) -> str:
    """The line under a generation: tokens, rates without compilation, drafts that stood."""
    parts = [f"{stats.prompt_tokens} prompt tokens", f"{stats.new_tokens} new"]
    if stats.prefill_seconds:
        parts.append(f"prefill {stats.prefill_tokens / stats.prefill_seconds:,.0f} tok/s")
    if stats.decode_seconds:
        parts.append(f"decode {stats.decode_tokens / stats.decode_seconds:,.1f} tok/s")
    parts.append(f"first steps {stats.compile_seconds:.1f} s")
    if stats.rounds:
        shares = " ".join(f"{count / stats.rounds:.0%}" for count in stats.accepted)
        parts.append(f"{stats.tokens_per_round:.2f} tokens a step, drafts accepted {shares}")
    return "; ".join(parts)
