"""Several plans: what is asked for, as lists, and each tried, so that one that is refused ends nothing but itself."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sharding.errors import InputError, printable

Asked = TypeVar("Asked")
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Refused:
    """One that could not be planned.

    Attributes:
        topology, layout: as they were asked for.
        why: one sentence.
    """

    topology: str
    layout: str
    why: str

    def as_json(self) -> dict[str, Any]:
        return {"request": {"topology": self.topology, "layout": self.layout}, "refused": self.why}


def each(
    request: Sequence[Asked], make: Callable[[Asked], Made], named: Callable[[Asked], tuple[str, str]]
) -> tuple[list[Made], list[Refused]]:
    """What `make` gives for all that it does not refuse, in order, and the others; one asked alone is simply raised.

    Args:
        make: raises InputError, or whatever the compiler raises.
        named: topology and layout of one.

    Raises:
        Exception: the first refusal, where nothing is left.
    """
    found, refused, first = [], [], None
    for one in request:
        try:
            found.append(make(one))
        except Exception as error:  # a slice that the compiler cannot make must not hide the others
            if len(request) == 1:
                raise
            first = first or error
            refused.append(Refused(*named(one), _sentence(error)))
    if first is not None and not found:
        raise first
    return found, refused


def names(texts: Sequence[str]) -> list[str]:
    """The names in lists with commas or semicolons."""
    return [name.strip() for text in texts for name in re.split("[,;]", text)]


def layouts(texts: Sequence[str]) -> list[str]:
    """The layouts in lists: `throughput,expert=16,tensor=4;expert=64` are three.

    A semicolon, or another text, always ends a layout; a comma does where a preset or a file comes before or after it,
    and where the size that follows is one that the layout has already.
    """
    found: list[str] = []
    for text in texts:
        for part in text.split(";"):
            found += _layouts(re.sub(r"\s*([,=])\s*", r"\1", part.strip()).split(","))
    return found


def _layouts(parts: list[str]) -> list[str]:
    found: list[list[str]] = []
    keys: set[str] = set()  # of the sizes of the last one; empty where it is a preset or a file
    for part in parts:
        key = part.partition("=")[0] if "=" in part and not part.endswith(".toml") else ""
        if key and keys and key not in keys:
            found[-1].append(part)
            keys.add(key)
        else:
            found.append([part])
            keys = {key} - {""}
    return [",".join(one) for one in found]


def _sentence(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = printable(lines[0] if lines else "refused")
    return text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
