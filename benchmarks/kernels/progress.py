"""How far a run is: a bar on a terminal, a line for each case elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def progress(console: Console, total: int) -> Generator[Callable[[str], None]]:
    """Gives what to call with a line on each case that is done."""
    begin = time.monotonic()
    ended = 0

    def rate() -> str:
        return f"{(time.monotonic() - begin) / max(ended, 1):.1f} s a case"

    if not console.is_terminal:

        def line(text: str) -> None:
            nonlocal ended
            ended += 1
            left = round((time.monotonic() - begin) / ended * (total - ended))
            console.print(f"{ended} of {total}, {rate()}, {left // 60}:{left % 60:02} left: {text}", soft_wrap=True)

        yield line
        return
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=total, rate="")

        def advance(text: str) -> None:
            nonlocal ended
            ended += 1
            bar.update(task, advance=1, description=text, rate=rate())

        yield advance
