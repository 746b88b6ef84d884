"""Consoles that show every name as it is; the streams that they write to are in `streams.py`.

Whatever is printed may hold a name that a user gave: a folder `out[v2]`, a file `:+1:`. So consoles are made here only,
without markup and emoji codes; what is to be bold is a `rich.text.Text`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text


def screen(*, stderr: bool = False, quiet: bool = False, width: int | None = None, soft_wrap: bool = False) -> Console:
    """A console for standard output or standard error, in which brackets and colons are brackets and colons.

    Args:
        quiet: print nothing.
        width: columns where it is no terminal; as rich has it when None.
        soft_wrap: leave long lines to the terminal.
    """

    def made(width: int | None) -> Console:
        return Console(
            stderr=stderr,
            quiet=quiet,
            width=width,
            soft_wrap=soft_wrap,
            markup=False,
            emoji=False,
            highlight=False,
        )

    console = made(None)
    return console if width is None or console.is_terminal else made(width)


def progress_bar(console: Console, what: str, *, disable: bool = False) -> Progress:
    """A bar of bytes with their rate and the time left; it vanishes at its end."""
    columns: tuple[ProgressColumn, ...] = (
        TextColumn(what, markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=disable)


@contextlib.contextmanager
def spinner(console: Console, text: str) -> Generator[Callable[[str], None]]:
    """A spinner with a line of text, as long as the block runs; yields what changes the text."""
    with console.status(Text(text)) as status:
        yield lambda text: status.update(Text(text))
