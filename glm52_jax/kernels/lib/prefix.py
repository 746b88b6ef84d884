"""Work that grows with what is there and not with the room for it, under static shapes.

How many positions a block of queries may see, or how many tokens an expert has, is known when the step runs. A few
branches are compiled, each for a fixed part of the room, and the smallest that reaches far enough is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

_BRANCHES = 8  # at most an eighth of the room is worked on in vain


def over_prefix(last: jax.Array, capacity: int, smallest: int, run: Callable[..., Any], *operands: Any) -> Any:
    """`run(length, *operands)` with the smallest compiled `length` that holds number `last`.

    Args:
        last: int32 scalar, the last number needed, counted from 0; -1 for none.
        capacity: the longest `length`.
        smallest: the shortest one worth a branch of its own.
        run: gets a Python int; its result must have the same shape for every one.
    """
    step = max(smallest, -(-capacity // _BRANCHES))
    lengths = [*range(step, capacity, step), capacity]
    if len(lengths) == 1:
        return run(capacity, *operands)
    branches = [lambda *args, length=length: run(length, *args) for length in lengths]
    return jax.lax.switch(jnp.maximum(last, 0) // step, branches, *operands)
