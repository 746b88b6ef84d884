"""Order between collectives, where a platform has none of its own; the rest is checked on devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sharding.collectives import order_after
from sharding.layout import SINGLE, Layout

LAYOUT = Layout(tensor=2)


@pytest.mark.parametrize("first", [np.nan, np.inf, -1, 0, False, np.iinfo(np.int32).min, jnp.float8_e4m3fn(np.nan)])
def test_what_comes_after_keeps_its_values(first):
    """Whatever is waited for, unwritten rows of a cache among it."""
    x = np.float32([1.5, np.nan, -0.0]), np.int32([3, -1])
    found = order_after(LAYOUT, x, {"rows": jnp.full((2, 3), first)})
    for mine, theirs in zip(found, x, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_only_a_cpu_waits():
    """The compiler for TPUs keeps the order itself, and may overlap."""
    step = jax.jit(lambda x, first: order_after(LAYOUT, x, first))
    traced = step.trace(jnp.ones(3), jnp.ones(2))
    assert "select" in traced.lower(lowering_platforms=("cpu",)).as_text()
    assert "select" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    assert order_after(SINGLE, "x", None) == "x"
