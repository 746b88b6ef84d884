"""Several plans of which some may be refused: each is tried, and one that is refused ends nothing but itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from glm52_jax.errors import InputError

Asked = TypeVar("Asked")
Made = TypeVar("Made")


def each(
    asked: Sequence[Asked], make: Callable[[Asked], Made], named: Callable[[Asked], str], note: Callable[[str], None]
) -> list[Made]:
    """What `make` gives for all that it does not refuse, in order; only one that is asked alone is simply raised.

    Args:
        make: raises InputError, or whatever the compiler raises.
        named: what to call one in a note.
        note: is told of each refusal, in one line.

    Raises:
        Exception: the first refusal, where nothing is left.
    """
    found, first = [], None
    for one in asked:
        try:
            found.append(make(one))
        except Exception as error:  # a slice that the compiler cannot make must not hide the others
            if len(asked) == 1:
                raise
            first = first or error
            note(f"{named(one)}: {_sentence(error)}")
    if first is not None and not found:
        raise first
    return found


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "refused"
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
