"""Lengths in tokens as people write them (`4096`, `128k`, `1m`): the parser and its click type; knows no command."""

from __future__ import annotations

import re

import click

from sharding.errors import InputError

_FACTORS = {"": 1, "k": 1024, "m": 1024**2}
_LENGTH = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?)([km]?)", re.ASCII | re.IGNORECASE)
_DIGITS = 30  # nothing is that long


def parse_length(text: str | int, what: str = "length") -> int:
    """A positive number of tokens; `k` stands for 1,024 and `m` for 1,048,576.

    Args:
        text: for instance 4096, "4096", "128k", "1M" or "0.5m".
        what: what to call the length in an error.

    Raises:
        InputError: not such a number, not whole, or zero.
    """
    match = _LENGTH.fullmatch(str(text).strip())
    if match is None or len(match[1]) > _DIGITS:
        raise InputError(f"{what} is {str(text)!r}, expected a number of tokens such as 4096, 128k or 1m")
    number, factor = match[1].replace("_", ""), _FACTORS[match[2].lower()]
    whole, _, decimals = number.partition(".")
    scale = 10 ** len(decimals)
    length, rest = divmod(int(whole + decimals) * factor, scale)
    if rest or length == 0:
        raise InputError(f"{what} is {str(text)!r}, expected a whole, positive number of tokens")
    return length


def short_length(tokens: int) -> str:
    """The inverse where it is exact: 131072 -> "128k", 1048576 -> "1m", 1000 -> "1000"."""
    for suffix in ("m", "k"):
        if tokens and tokens % _FACTORS[suffix] == 0:
            return f"{tokens // _FACTORS[suffix]}{suffix}"
    return str(tokens)


class Length(click.ParamType):
    """A click type for options that take a length; its error is the sentence of `parse_length`."""

    name = "length"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_length(value, param.opts[0] if param is not None else "length")

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "LENGTH"


LENGTH = Length()
"""`click.option("--context", type=LENGTH)`."""
