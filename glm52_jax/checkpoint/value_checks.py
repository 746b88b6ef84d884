"""Values that something is wrong with: not finite, beyond what a type holds, or no scale. Arithmetic on numpy arrays.

Loading, converting, exporting, verifying and writing all ask here, so that what one refuses is refused by the others.
It must not know files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from sharding.errors import InputError

_NAMED = 5
"""Tensors that a sentence names."""
# As integers without the sign: infinity, or where there is none the only NaN.
_SPECIAL = {
    np.dtype(np.float32): (np.uint32, 0x7FFFFFFF, 0x7F800000),
    np.dtype(np.float16): (np.uint16, 0x7FFF, 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.uint16, 0x7FFF, 0x7F80),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, 0x7F, 0x7F),
}
_NO_INFINITY = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class BadValueCounts:
    """Of the values of one tensor.

    Attributes:
        nan, infinite: not finite, where a cast has not made them so.
        zeroed: not zero before a cast, and zero after it.
        beyond: finite before a cast, and infinite after it; `most` is the largest of them.
    """

    nan: int = 0
    infinite: int = 0
    zeroed: int = 0
    beyond: int = 0
    most: float = 0.0

    def __add__(self, other: BadValueCounts) -> BadValueCounts:
        return BadValueCounts(
            self.nan + other.nan,
            self.infinite + other.infinite,
            self.zeroed + other.zeroed,
            self.beyond + other.beyond,
            max(self.most, other.most),
        )

    def as_json(self) -> dict[str, int]:
        """What is not zero of it."""
        return {name: count for name, count in dataclasses.asdict(self).items() if count}

    def refuse_beyond(self, name: str, dtype: np.dtype) -> None:
        """Refuses a cast that made finite values infinite.

        Raises:
            InputError: saying how many there are, and the largest.
        """
        if self.beyond:
            values = "1 value" if self.beyond == 1 else f"{self.beyond:,} values"
            raise InputError(
                f"{name} has {values} that {dtype} does not hold, {self.most:.6g} the largest, expected at most "
                f"{float(ml_dtypes.finfo(dtype).max):.6g}"
            )


def not_finite(values: np.ndarray) -> BadValueCounts:
    """Counts of NaN and infinite values; types without such values have none.

    The largest magnitude as an integer says in one pass whether there are any, at several gigabytes a second.
    """
    if values.dtype not in _SPECIAL or not values.size:
        return BadValueCounts()
    integers, mask, special = _SPECIAL[values.dtype]
    magnitudes = values.reshape(-1).view(integers) & integers(mask)
    if magnitudes.max() < special:
        return BadValueCounts()
    least = int(np.count_nonzero(magnitudes == special))
    more = int(np.count_nonzero(magnitudes > special))
    return BadValueCounts(least, 0) if values.dtype == _NO_INFINITY else BadValueCounts(more, least)


def cast(values: np.ndarray, dtype: np.dtype, *, finite: bool = False) -> tuple[np.ndarray, BadValueCounts]:
    """Values in another floating type, rounded to nearest, and the counts of them.

    Args:
        finite: that infinite values were finite before, as products of codes and scales were.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        made = values.astype(dtype, copy=False)
    counts = not_finite(made)
    if counts.infinite:
        lost = np.isinf(made) & ~(np.isinf(values) & (not finite))
        beyond = int(np.count_nonzero(lost))
        most = float(np.abs(values[lost].astype(np.float64)).max()) if beyond else 0.0
        counts = dataclasses.replace(counts, infinite=counts.infinite - beyond, beyond=beyond, most=most)
    if values.dtype == dtype:
        return made, counts
    if ml_dtypes.finfo(dtype).smallest_subnormal > ml_dtypes.finfo(values.dtype).smallest_subnormal:
        counts = dataclasses.replace(counts, zeroed=_zeros(made) - _zeros(values))
    return made, counts


def _zeros(values: np.ndarray) -> int:
    integers, mask, _ = _SPECIAL[values.dtype]
    magnitudes = np.ascontiguousarray(values).reshape(-1).view(integers) & integers(mask)
    return magnitudes.size - int(np.count_nonzero(magnitudes))


def refuse_scales(scales: np.ndarray, name: str) -> None:
    """Refuses scales of blocks that are no finite numbers of at least 0; that of a block of zeros may be 0.

    Raises:
        InputError: saying how many there are, and the first of them.
    """
    wrong = ~(scales >= 0) | np.isinf(scales)  # in this form NaN is wrong too
    if wrong.any():
        number = f" ({int(wrong.sum()):,} such of {scales.size:,})"
        raise InputError(f"{name} holds {scales[wrong][0]}, expected finite scales of at least 0{number}")


def sentences(counts: Mapping[str, BadValueCounts]) -> list[str]:
    """What a user should know of tensors by name: a sentence on those that are not finite, one on lost small values."""
    found = []
    bad = {name: _kinds(count) for name, count in counts.items() if count.nan or count.infinite}
    if bad:
        tensors = "1 tensor holds" if len(bad) == 1 else f"{len(bad):,} tensors hold"
        found.append(
            f"{tensors} values that are not finite, which make what is computed with them worthless: {_listed(bad)}"
        )
    small = {name: f"{count.zeroed:,}" for name, count in counts.items() if count.zeroed}
    if small:
        tensors = "1 tensor has" if len(small) == 1 else f"{len(small):,} tensors have"
        found.append(f"{tensors} values too small for their new type, which became 0: {_listed(small)}")
    return found


def _kinds(count: BadValueCounts) -> str:
    return ", ".join([f"{count.nan:,} NaN"] * bool(count.nan) + [f"{count.infinite:,} infinite"] * bool(count.infinite))


def _listed(found: Mapping[str, str]) -> str:
    named = [f"{name} ({what})" for name, what in sorted(found.items())[:_NAMED]]
    more = len(found) - len(named)
    return ", ".join(named) + f", and {more:,} more" * bool(more)
