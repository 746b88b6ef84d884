"""Which values of a parameter the quick tests take; the others are slow, and `make test-all` runs them."""

from collections.abc import Iterable
from typing import Any

import pytest


def quickly(values: Iterable[Any], *quick: Any) -> list[Any]:
    """`values` for `pytest.mark.parametrize`, of which only the `quick` ones are no slow test."""
    values = list(values)
    assert all(value in values for value in quick)
    return [
        value
        if value in quick
        else pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.slow)
        for value in values
    ]
