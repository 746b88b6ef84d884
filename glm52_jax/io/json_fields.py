"""A JSON object's fields, read with types: each refusal is one sentence that names the file and the field.

It must not know what any field means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm52_jax.io.files import dead_link
from sharding.errors import InputError

LARGEST = 2**31 - 1
"""Of a size or id: what an int32 holds."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; one sentence naming the file when it is not there or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except FileNotFoundError:
        raise InputError(f"{path}: {dead_link(path) or 'no such file'}; a checkpoint folder needs it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {dead_link(path) or f'cannot be read ({error})'}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: holds a JSON {type(value).__name__}, expected an object")
    return value


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dictionary; of two values under one name, none is the right one to take."""
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in value if names.count(name) > 1)
        raise ValueError(f"{shown(twice)} is in one object twice")
    return value


def shown(value: Any) -> str:
    """A value as an error quotes it: on one line and not longer than one."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


class Fields:
    """Typed access to a raw config; every refusal names the source and the field.

    Attributes:
        notes: sentences a user should read; those of an inner object are kept with the outer one's.
    """

    def __init__(self, raw: Mapping[str, Any], source: str, notes: list[str] | None = None):
        self.raw, self.source = raw, source
        self.notes: list[str] = [] if notes is None else notes

    def note(self, sentence: str) -> None:
        """Keeps what is read otherwise than a user may think, or not at all."""
        self.notes.append(f"{self.source}: {sentence}")

    def error(self, field: str, problem: str) -> InputError:
        return InputError(f"{self.source}: {field} {problem}")

    def has(self, field: str) -> bool:
        return self.raw.get(field) is not None

    def integer(self, field: str, default: int | None = None, *, minimum: int = 1, maximum: int = LARGEST) -> int:
        value: Any = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(field, f"is {shown(value)}, expected an integer of at least {minimum}")
        if value > maximum:
            raise self.error(field, f"is {shown(value)}, expected at most {maximum}")
        return value

    def number(self, field: str, default: float | None = None, *, zero: bool = False) -> float:
        value = self.raw.get(field)
        if value is None:
            value = default
        if value is None:
            raise self.error(field, "is missing")
        expected = "a number of at least 0" if zero else "a positive number"
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise self.error(field, f"is {shown(value)}, expected {expected}")
        try:
            number = float(value)
        except OverflowError:
            raise self.error(field, f"is {shown(value)}, more than a float holds") from None
        if number == 0 and not zero:
            raise self.error(field, f"is {shown(value)}, expected {expected}")
        return number

    def boolean(self, field: str, default: bool) -> bool:
        value = self.raw.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, f"is {shown(value)}, expected true or false")
        return value

    def inner(self, field: str) -> Fields | None:
        """An object within this one."""
        value = self.raw.get(field)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(field, f"is {shown(value)}, expected an object")
        return Fields(value, f"{self.source}: {field}", self.notes)

    def only(self, field: str, *accepted: Any) -> None:
        """Refuses a value that names another model than this one; an absent field means the accepted one."""
        value = self.raw.get(field)
        if value is not None and value not in accepted:
            choice = " or ".join(repr(a) for a in accepted)
            raise self.error(field, f"is {shown(value)}, but this model needs {choice}")
