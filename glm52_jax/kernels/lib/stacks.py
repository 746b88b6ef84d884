"""One layer out of stacks of weights."""

from __future__ import annotations

from typing import Any, TypeVar

import jax

from glm52_jax.kernels import Target
from glm52_jax.params.quantization import BlockQuantized, StackedWeight

Tree = TypeVar("Tree")


def layer_of(stack: Tree, *index: Any, backend: str = "reference") -> Tree:
    """One layer (or the gate of one expert of one layer) of every array in `stack`; an index may be traced.

    All indices are taken in one slice: XLA does not join a slice of a slice, and would copy the larger one too.

    Args:
        backend: where it has a kernel for weights in codes, those stay in their stack, see `quant.StackedWeight`.
    """

    def one(array: jax.Array) -> jax.Array:
        rest = array.shape[len(index) :]
        part = jax.lax.dynamic_slice(array, (*index, *[0] * len(rest)), (*[1] * len(index), *rest))
        return part.reshape(rest)

    def matrix(leaf: Any) -> Any:
        if isinstance(leaf, BlockQuantized) and Target.of(backend) is not None:
            return StackedWeight.of(leaf, index, backend)
        return jax.tree.map(one, leaf)

    return jax.tree.map(matrix, stack, is_leaf=lambda leaf: isinstance(leaf, BlockQuantized))
