"""Bytes done and time left: a bar on a terminal, a line now and then elsewhere. It must not know what is done."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

from rich.console import Console

from glm52_jax.inputs.sizes import short_size
from glm52_jax.io.terminal import progress_bar

_SECONDS = 10.0  # between two lines


class _Bar:
    def __init__(self, console: Console, what: str, total: int, done: int):
        self.progress = progress_bar(console, what)
        self.task = self.progress.add_task(what, total=total, completed=done)
        self.progress.start()

    def advance(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def close(self) -> None:
        self.progress.stop()


class _Lines:
    def __init__(self, console: Console, what: str, total: int, done: int):
        self.console, self.what, self.total = console, what, total
        self.before = self.done = done
        self.begin = self.last = time.monotonic()

    def advance(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if now - self.last < _SECONDS:
            return
        self.last = now
        rate = (self.done - self.before) / (now - self.begin)
        left = (self.total - self.done) / rate
        self.console.print(
            f"{self.what} {short_size(self.done)} of {short_size(self.total)}, {short_size(int(rate))}/s, "
            f"{int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02} left"
        )

    def close(self) -> None:
        pass


class Progressing:
    """Makes the meter of a run once the run knows how much there is to do."""

    def __init__(self, console: Console, what: str):
        self.console, self.what = console, what
        self._open: list[_Bar | _Lines] = []

    def __call__(self, total: int, done: int = 0) -> _Bar | _Lines:
        kind = _Bar if self.console.is_terminal else _Lines
        self._open.append(kind(self.console, self.what, total, done))
        return self._open[-1]

    def close(self) -> None:
        while self._open:
            self._open.pop().close()


@contextlib.contextmanager
def progressing(console: Console, what: str) -> Generator[Progressing]:
    """Ends the bar however the run ends, so that an error is on a line of its own."""
    shown = Progressing(console, what)
    try:
        yield shown
    finally:
        shown.close()
