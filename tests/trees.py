"""Trees of arrays, compared leaf by leaf with the path of what differs."""

from typing import Any

import chex
import jax
import numpy as np


def assert_same(found: Any, expected: Any) -> None:
    """Equal structure, shapes and types, and values to the bit."""
    chex.assert_trees_all_equal_structs(found, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(found, expected)
    chex.assert_trees_all_equal(_bits(found), _bits(expected), strict=True)


def _bits(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: np.atleast_1d(np.asarray(leaf)).view(np.uint8), tree)
