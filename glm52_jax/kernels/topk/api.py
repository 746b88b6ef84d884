"""Signatures of the selection.

Higher score first, then lower position: one rule for ties in every form. -0.0 is 0.0, and neither NaN nor minus
infinity is ever chosen.
"""

from __future__ import annotations

import jax

from glm52_jax.kernels import implementation
from glm52_jax.kernels.topk.cpu import topk_mask_bisect
from glm52_jax.kernels.topk.reference import (
    kth_best_reference,
    topk_indices_reference,
    topk_mask_reference,
    topk_reference,
)

_PALLAS = "glm52_jax.kernels.topk.tpu"
_TOPK = {"reference": topk_reference, "tpu": f"{_PALLAS}:topk"}
_INDICES = {"reference": topk_indices_reference, "tpu": f"{_PALLAS}:topk_indices"}
_MASK = {"reference": topk_mask_reference, "cpu": topk_mask_bisect, "tpu": f"{_PALLAS}:topk_mask"}
_CLOSED = {"reference": lambda indices: indices, "tpu": f"{_PALLAS}:compact"}
_LAST = {"reference": kth_best_reference, "tpu": f"{_PALLAS}:kth_best"}


def topk(scores: jax.Array, k: int, *, backend: str) -> tuple[jax.Array, jax.Array]:
    """Positions and scores of the `k` best scores of each row, in any order.

    The order is the form's own: only that positions ascend, with -1 at the end, where the backend is one for TPUs.

    Args:
        scores: float32 `[..., positions]`.
        k: how many to choose, at most `positions`.
        backend: see `kernels.resolve_backend`.

    Returns:
        int32 `[..., k]`, -1 where fewer than `k` can be chosen; float32 `[..., k]`, minus infinity there.
    """
    return implementation(_TOPK, backend)(scores, k)


def topk_indices(scores: jax.Array, k: int, *, backend: str) -> jax.Array:
    """The first part of `topk`."""
    return implementation(_INDICES, backend)(scores, k)


def topk_mask(scores: jax.Array, k: int, *, backend: str) -> jax.Array:
    """The same choice as `topk` as a mask, bool `[..., positions]`."""
    return implementation(_MASK, backend)(scores, k)


def compact(indices: jax.Array, *, backend: str) -> jax.Array:
    """Lists without the gaps that -1 leaves, where the backend has kernels that go through them.

    Args:
        indices: int32 `[..., k]`, numbers below 2 ** 24 in ascending order, or -1, anywhere.
        backend: see `kernels.resolve_backend`.

    Returns:
        int32 of the same shape, the numbers first.
    """
    return implementation(_CLOSED, backend)(indices)


def kth_best(scores: jax.Array, positions: jax.Array, k: int, *, backend: str) -> tuple[jax.Array, jax.Array]:
    """Score and position of the k-th of some candidates: what comes no later in the order is chosen too.

    Args:
        scores: float32 `[..., candidates]` in any order, minus infinity for none.
        positions: int32 of the same shape, each once among the candidates of a row that there are.
        k: which one.
        backend: see `kernels.resolve_backend`.

    Returns:
        float32 `[...]`, minus infinity where there are fewer than `k`, and int32 `[...]`, any number there.
    """
    return implementation(_LAST, backend)(scores, positions, k)
