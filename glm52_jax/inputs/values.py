"""Token ids, counts and seeds as callers give them: brought to one form, or refused in one sentence before any work.

It knows neither JAX nor models. What NumPy makes of a list decides nothing by itself: it turns ragged lists into an
error of its own, `[1, True]` into integers and numbers beyond 64 bits into objects.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import click
import numpy as np

from sharding.errors import InputError

MAX_SEED = (1 << 32) - 1


def whole_number(value: Any, what: str, least: int = 0, most: int | None = None) -> int:
    """An integer of Python or NumPy within its limits; True, 2.0 and "2" are none.

    Args:
        what: it is, for the error.

    Raises:
        InputError: another type, or outside of the limits.
    """
    limits = f"of at least {least}" if most is None else f"from {least} to {most}"
    try:
        found = None if isinstance(value, bool | np.bool) else operator.index(value)
    except TypeError:
        found = None
    if found is None or found < least or (most is not None and found > most):
        raise InputError(f"{what} is {_shown(value)}, expected an integer {limits}")
    return found


def number(value: Any, what: str, expected: str) -> float:
    """A real number that is no NaN; `InputError` with what was expected for another type."""
    if isinstance(value, bool | np.bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise InputError(f"{what} is {_shown(value)}, expected {expected}")
    if math.isnan(value):
        raise InputError(f"{what} is {value}, expected {expected}")
    return float(value)


def seed_number(value: Any, what: str = "seed") -> int:
    """A seed, an integer of 32 bits."""
    return whole_number(value, what, 0, MAX_SEED)


def token_row(values: Any, vocab_size: int, what: str) -> np.ndarray:
    """The token ids of one text.

    Args:
        values: integers, in a list or an array of one dimension; at least one.

    Returns:
        int32 `[length]`.

    Raises:
        InputError: text, another type or shape, nothing, an id that the vocabulary has not.
    """
    expected = "expected a list of token ids"
    if isinstance(values, str | bytes | bytearray) or not _is_ordered(values):
        raise InputError(f"{what} is {_shown(values)}, {expected}")
    if hasattr(values, "dtype"):
        found = np.asarray(values)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise InputError(f"{what} has shape {found.shape} and dtype {found.dtype}, {expected}")
        values = found.tolist()
    if len(values) == 0:
        raise InputError(f"{what} is empty, expected at least one token")
    for value in values:
        if isinstance(value, bool | np.bool) or not isinstance(value, int | np.integer) or not 0 <= value < vocab_size:
            raise InputError(f"{what} holds {_shown(value)} as a token, but the vocabulary has {vocab_size} tokens")
    return np.array(list(values), np.int32)


def token_batch(values: Any, mask: Any, vocab_size: int, what: str = "tokens") -> tuple[np.ndarray, np.ndarray]:
    """Token ids of texts of one length, and which of them count.

    Args:
        values: integers `[batch, length]`, in lists or an array.
        mask: of the same shape, True or 1 where a token counts; None where all do. What does not count may be any id.

    Returns:
        int32 and bool `[batch, length]`.

    Raises:
        InputError: ragged lists, another type or shape, nothing, an id that the vocabulary has not.
    """
    tokens = _array(values, what, "integers [batch, length]")
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or 0 in tokens.shape:
        raise InputError(
            f"{what} has shape {tokens.shape} and dtype {tokens.dtype}, expected integers [batch, length], at least one"
        )
    counts = np.ones(tokens.shape, bool) if mask is None else token_mask(mask, tokens.shape)
    wrong = tokens[counts & ((tokens < 0) | (tokens >= vocab_size))]
    if wrong.size:
        raise InputError(f"{what} holds {wrong[0]}, but the vocabulary has {vocab_size} tokens")
    return np.where(counts, tokens, 0).astype(np.int32), counts


def token_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """bool of the stated shape from True and False, or from 1 and 0; another value is refused, such as -inf."""
    found = _array(mask, "mask", "booleans [batch, length]")
    if found.shape != shape:
        raise InputError(f"mask has shape {found.shape}, expected that of tokens, {shape}")
    if found.dtype.kind not in "biuf" or not np.all((found == 0) | (found == 1)):
        raise InputError(f"mask has dtype {found.dtype} or other values than 0 and 1, expected booleans")
    return found.astype(bool)


def _array(values: Any, what: str, expected: str) -> np.ndarray:
    if isinstance(values, Sequence) and any(isinstance(v, bool) for row in values if _is_list(row) for v in row):
        # [[True, 2]] would become [[1, 2]]; a mask of lists is all of one kind.
        kinds = {isinstance(v, bool) for row in values if _is_list(row) for v in row}
        if len(kinds) > 1:
            raise InputError(f"{what} mixes booleans with other values, expected {expected}")
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{what} has rows of different lengths or types, expected {expected}") from None


def _is_ordered(values: Any) -> bool:
    return hasattr(values, "__len__") and hasattr(values, "__getitem__") and not isinstance(values, dict)


def _is_list(row: Any) -> bool:
    return isinstance(row, Sequence) and not isinstance(row, str | bytes)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class _Seed(click.ParamType):
    """A click type for seeds; its error is the sentence of `seed_number`."""

    name = "integer"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        what = param.opts[0] if param is not None else "seed"
        try:
            return seed_number(int(value), what)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{what} is {_shown(value)}, expected an integer from 0 to {MAX_SEED}") from None


SEED = _Seed()
"""`click.option("--seed", type=SEED)`."""
