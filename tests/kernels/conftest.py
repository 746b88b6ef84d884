"""Kernels are interpreted once and compared: to compile what is interpreted well would take longer than to run it."""

from collections.abc import Iterator

import jax
import pytest

from tests.kernels.racing import racing

__all__ = ["racing"]


@pytest.fixture(autouse=True)
def quick_compiler(request: pytest.FixtureRequest) -> Iterator[None]:
    """No optimisation, but for tests of what a compiler makes of a kernel."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update(
        "jax_disable_most_optimizations", "compile" not in request.node.name and "in_place" not in request.node.name
    )
    yield
    jax.config.update("jax_disable_most_optimizations", before)
