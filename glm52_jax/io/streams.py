"""The standard streams of a process, such that no input, encoding or device breaks a run without a word.

It must not know of commands, and imports neither JAX nor rich.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from sharding.errors import InputError

STDIN, STDOUT, STDERR = 0, 1, 2
STDOUT_NAME = "standard output"
_NAMES = {STDIN: "standard input", STDOUT: STDOUT_NAME, STDERR: "standard error"}
# Ways to write a character that the encoding lacks which cannot fail.
_TOTAL = {"backslashreplace", "ignore", "namereplace", "replace", "xmlcharrefreplace"}


class _Stream(io.FileIO):
    """A standard stream whose errors say which one it is, or are kept for the end.

    Attributes:
        failed: what could not be written was left out.
    """

    failed = False

    def __init__(self, descriptor: int, number: int, *, writes: bool):
        super().__init__(descriptor, "w" if writes else "r", closefd=False)
        self._number = number

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if self._number == STDERR:  # there is no other place to say it, and no reason to end the run
                self.failed = True
                return len(data)
            raise self._named(error) from None

    def readinto(self, buffer: Any, /) -> int:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise self._named(error) from None

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            raise self._named(error) from None

    def _named(self, error: OSError) -> OSError:
        if error.errno == errno.EBADF:
            return OSError(error.errno, "closed", _NAMES[self._number])
        return OSError(error.errno, error.strerror, _NAMES[self._number])


def secure_streams() -> None:
    """Replaces the standard streams of this process; those that something else stands in for are left alone.

    A stream that is closed is opened on nothing, so that no file gets its number: reading finds the end, writing to
    standard output is an error that names it. Characters that the encoding of standard output lacks become escapes.
    Errors on standard error are kept until `finish`.
    """
    for number in _NAMES:
        try:
            os.fstat(number)
        except OSError:
            # Read only for standard output: what is written there would be lost, and must be noticed.
            os.open(os.devnull, os.O_WRONLY if number == STDERR else os.O_RDONLY)
    if sys.stdin is sys.__stdin__:
        raw = _Stream(STDIN, STDIN, writes=False)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(raw), encoding=_encoding(sys.stdin), errors="surrogateescape")
    if sys.stdout is sys.__stdout__:
        sys.stdout = writer(STDOUT, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = writer(STDERR, sys.stderr, STDERR)


def writer(descriptor: int, like: TextIO | None, number: int = STDOUT) -> TextIO:
    """A stream to an open file descriptor in place of a standard one, with the encoding of what it replaces."""
    errors = getattr(like, "errors", None)
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(descriptor, number, writes=True)),
        encoding=_encoding(like),
        errors=errors if errors in _TOTAL else "backslashreplace",
        line_buffering=number == STDERR or os.isatty(descriptor),
        write_through=getattr(like, "write_through", False),
    )


def _encoding(like: TextIO | None) -> str:
    return getattr(like, "encoding", None) or "utf-8"


def read_all() -> str:
    """All of standard input.

    Raises:
        InputError: it is not in the stream's encoding.
    """
    return _checked(_stdin().read())


def read_line(read: Callable[[], str] = input) -> str:
    """A line of standard input without its end.

    Args:
        read: how to read it, for instance with a prompt.

    Raises:
        EOFError: there is none.
        InputError: it is not in the stream's encoding; the next line can be read.
    """
    _stdin()
    return _checked(read())


def _stdin() -> TextIO:
    """Standard input, which gives bytes that are not in its encoding as lone surrogates, so that lines stay lines."""
    stream = sys.stdin
    if stream is None:
        raise EOFError
    if isinstance(stream, io.TextIOWrapper) and stream.errors != "surrogateescape":
        with contextlib.suppress(io.UnsupportedOperation):  # somebody has read from it
            stream.reconfigure(errors="surrogateescape")
    return stream


def _checked(text: str) -> str:
    place = next((n for n, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
    if place is None:
        return text
    byte = ord(text[place]) - 0xDC00
    raise InputError(f"standard input is not {_encoding(sys.stdin)}: byte 0x{byte:02x} at character {place + 1}")


def finish() -> bool:
    """Writes out what the streams still hold; whether all that was said on standard error arrived.

    Raises:
        OSError: standard output cannot be written; nothing is left in it that the end of the process would try again.
    """
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        _drop_output()
        raise
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None:
            sys.stderr.flush()
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    return not (isinstance(raw, _Stream) and raw.failed)


def _drop_output() -> None:
    """Gives up standard output with what it holds, which the end of the process would else try to write."""
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Stream):
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, raw.fileno())
    os.close(nowhere)
