"""What processes of one run do in `test_hosts`; their places are in the environment, as `sharding.hosts` reads them.

python -m tests.infer.on_several_hosts TASK CHECKPOINT LAYOUT
"""

import functools
import io
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import click
import jax
import jax.numpy as jnp

from glm52_jax.checkpoint.sources.open_source import PublishedFiles
from infer.commands import on_hosts
from infer.commands.chat import chat
from infer.commands.generate import generate
from infer.commands.session import Session
from infer.steps import Step
from sharding.errors import InputError
from sharding.hosts import process_group
from sharding.hosts.process_group import ProcessGroup

# Whatever their lengths, prompts of up to 55 tokens share compiled steps.
LINES = "hello\n/think\nyou\n/new\nonce more\n/exit\nnever read\n"
INTERRUPTED = "hello\nyou\n"
READ: Counter = Counter()


def count_reads() -> None:
    pread = PublishedFiles.pread

    def counting(self: PublishedFiles, name: str, offset: int, out: memoryview) -> None:
        READ[name] += len(out)
        pread(self, name, offset, out)

    PublishedFiles.pread = counting  # type: ignore[method-assign]


def run(command: click.Command, here: ProcessGroup, arguments: list[str]) -> None:
    """A command as its parser calls it, but for joining: one process joins once."""
    context = command.make_context(command.name, list(arguments))
    options = {k: v for k, v in context.params.items() if k not in JOINING}
    command.callback.__wrapped__(**options, hosts=here)  # type: ignore[union-attr]


JOINING = ("coordinator", "processes", "process", "start_timeout", "host_timeout")


def texts(here: ProcessGroup, checkpoint: str, layout: str | None, thorough: bool = False) -> None:
    """Every way to make texts; only the first process prints them, and each reads what its devices hold."""
    count_reads()
    opened = Session.open(checkpoint, None, "keep", layout, here)
    opened.load()
    if here.processes > 1:
        on_hosts.only_our_output()
        experts = {name: size for name, size in READ.items() if ".mlp.experts." in name and size}
        numbers = {int(name.split(".experts.")[1].split(".")[0]) for name in experts}
        share = opened.config.n_routed_experts // here.processes
        assert numbers == set(range(here.process * share, (here.process + 1) * share)), numbers
    # Loaded once is enough: the commands only differ in what they do then.
    Session.open = lambda *_: opened  # type: ignore[method-assign]
    Session.load = lambda _: None  # type: ignore[method-assign]
    common = [checkpoint, "--ignore-eos", "-n", "9", "--chunk", "16"]
    drafted = [*common, "--draft-tokens", "1"]
    sys.stdin = io.StringIO("from standard input, once")
    run(generate, here, [*drafted, "-"])
    sys.stdin = io.StringIO(LINES)
    run(chat, here, [*drafted, "-t", "0"])
    stop_early(here)
    sys.stdin = io.StringIO(INTERRUPTED)
    run(chat, here, [*drafted, "-t", "0"])
    if thorough:
        several = ["Hello, you", "And another one", "third"]
        run(generate, here, [*common, *several])
        run(generate, here, [*common, *several, "-t", "1", "--seed", "5"])
        run(generate, here, [*drafted, *several, "-t", "1", "--seed", "5"])


def stop_early(here: ProcessGroup) -> None:
    """Ctrl-C at the first piece of the next answer."""
    write, pieces = Session.write, []

    def interrupting(self: Session, text: str) -> None:
        write(self, text)
        pieces.append(text)
        if len(pieces) == 1 and here.first:
            signal.raise_signal(signal.SIGINT)  # to this thread, so at this piece

    Session.write = interrupting  # type: ignore[method-assign]


def collectives(here: ProcessGroup, *_: Any) -> None:
    """Collectives until somebody is gone."""
    mesh = jax.sharding.Mesh(jax.devices(), "all")
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("all"))
    values = jax.make_array_from_callback((len(jax.devices()),), whole, lambda part: jnp.ones(1))
    total = jax.jit(lambda x: x.sum())
    total(values).block_until_ready()
    print("up", flush=True)
    while True:
        total(values).block_until_ready()


def programs(here: ProcessGroup, *_: Any) -> None:
    """Each process traces a step of its own."""
    step = jax.jit(lambda params, state, tokens: state + tokens * here.process)
    Step(step, (), ("params", "state", "tokens"), (), step)(0, 1, 2)


def at_start(action: Callable[[], Any]) -> Callable[..., None]:
    """Process 1 does that instead of starting JAX."""

    def task(*_: Any) -> None:
        raise AssertionError("this run must not begin")

    start = process_group._start_jax

    def instead(terms: Any, *rest: Any) -> None:
        if terms.process == 1:
            action()
        start(terms, *rest)

    def prepare() -> None:
        process_group._start_jax = instead

    task.prepare = prepare  # type: ignore[attr-defined]
    return task


TASKS: dict[str, Callable[..., None]] = {
    "texts": texts,
    "more texts": functools.partial(texts, thorough=True),
    "collectives": collectives,
    "programs": programs,
    "dies": at_start(lambda: os._exit(9)),
    "stalls": at_start(lambda: time.sleep(60)),
}


def main() -> None:
    task, checkpoint, layout, start, silence = sys.argv[1:6]
    getattr(TASKS[task], "prepare", lambda: None)()
    try:
        with process_group.join(start_seconds=float(start), silence_seconds=float(silence), program="glm52") as here:
            TASKS[task](here, checkpoint, layout if layout != "none" else None)
    except InputError as error:
        print(f"glm52: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
