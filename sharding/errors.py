"""`InputError`, raised for wrong input in every package; one sentence for each error of the machine."""

from __future__ import annotations

import errno
import sys
from pathlib import Path


class InputError(ValueError):
    """Wrong input: a file, field, tensor or request that cannot be used as it is.

    The message is one sentence that names the thing, what was found and what was expected.
    """


def sentence(error: BaseException) -> str | None:
    """One line for an error that a user's input or the machine causes; None for a fault of the program.

    Files that cannot be used, full devices, memory that is not there, names and texts that are no UTF-8, and
    environment variables that JAX refuses are none of the program's faults. A `TypeError` is, and keeps its traceback.
    """
    if isinstance(error, InputError):
        return printable(str(error))
    if isinstance(error, OSError):
        return printable(_of_the_system(error))
    if isinstance(error, MemoryError):
        return printable(f"out of memory: {error}" if str(error) else "out of memory")
    if isinstance(error, UnicodeError):
        return printable(_of_an_encoding(error))
    if isinstance(error, ValueError) and "embedded null" in str(error):
        return "a file name holds a NUL byte, expected a name without one"
    if isinstance(error, ValueError) and "integer string conversion" in str(error):  # of a text, by a limit of Python's
        return f"a number has more than {sys.get_int_max_str_digits()} digits, expected one of a size that occurs"
    if isinstance(error, FloatingPointError):  # JAX's, under JAX_DEBUG_NANS
        return printable(f"a value is no finite number: {_first_line(error)}")
    if isinstance(error, RuntimeError) and str(error).startswith("RESOURCE_EXHAUSTED"):
        return printable(f"out of memory: {_first_line(error).removeprefix('RESOURCE_EXHAUSTED: ')}")
    return printable(f"JAX refuses its environment: {_first_line(error)}") if _of_jax_settings(error) else None


def printable(text: str) -> str:
    """The text on one line: control characters, line breaks and bytes that are no UTF-8 as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _of_the_system(error: OSError) -> str:
    """An `OSError` with the file that it is about; libraries also raise it with a text alone."""
    if error.errno is None:
        return _first_line(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    reason = error.strerror or errno.errorcode.get(error.errno, f"error {error.errno}")
    return f"{' -> '.join(names) or 'the system'}: {reason}"


def _of_an_encoding(error: UnicodeError) -> str:
    if not isinstance(error, UnicodeDecodeError | UnicodeEncodeError):
        return f"a text cannot be used: {_first_line(error)}"
    wrong = error.object[error.start : error.start + 8]
    return f"a text is not {error.encoding}: {wrong!r} at {error.start} ({error.reason})"


def _of_jax_settings(error: BaseException) -> bool:
    """Whether JAX raised it while it read its environment variables, which it does when it is imported."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not isinstance(error, ValueError):
        return False
    return Path(trace.tb_frame.f_code.co_filename).parts[-3:] == ("jax", "_src", "config.py")


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
