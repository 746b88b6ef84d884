"""Sizes in bytes as people write them (`5GB`, `256MB`, `64MiB`): read, written, and as a click type."""

from __future__ import annotations

import re

import click

from sharding.errors import InputError

_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.ASCII | re.IGNORECASE)
_DIGITS = 30  # nothing is that large, and a float has no more than 308


def parse_size(text: str | int, what: str = "size") -> int:
    """A positive number of bytes; GB are 10^9 bytes, as `transformers` counts them, and GiB 2^30.

    Raises:
        InputError: not such a number, or less than one byte.
    """
    match = _SIZE.fullmatch(str(text).strip())
    size = int(float(match[1]) * _FACTORS[(match[2] or "").lower()]) if match and len(match[1]) <= _DIGITS else 0
    if size < 1:
        raise InputError(f"{what} is {str(text)!r}, expected a size such as 5GB, 256MB or 64MiB")
    return size


def short_size(count: int) -> str:
    """A number of bytes in three digits: 1.51 TB, 20.4 MB, 340 B."""
    value, unit = float(count), 0
    while value >= 999.5 and unit < 4:
        value, unit = value / 1000, unit + 1
    digits = 0 if unit == 0 else max(0, 2 - len(str(int(value))) + 1)
    return f"{value:.{digits}f} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


class Size(click.ParamType):
    """A click type for options that take a size; its error is the sentence of `parse_size`."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_size(value, param.opts[0] if param is not None else "size")

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "SIZE"


SIZE = Size()
"""`click.option("--shard-size", type=SIZE)`."""
