"""Signature of the selection."""

from __future__ import annotations

import jax

from glm52_jax.kernels import form
from glm52_jax.kernels.topk.cpu import topk_mask_bisect
from glm52_jax.kernels.topk.reference import topk_indices_reference, topk_mask_reference

_INDICES = {"reference": topk_indices_reference}
_MASK = {"reference": topk_mask_reference, "cpu": topk_mask_bisect}


def topk_indices(scores: jax.Array, k: int, *, backend: str) -> jax.Array:
    """Positions of the `k` best scores of each row.

    Higher score first, then lower position: one rule for ties in every form. Minus infinity is never chosen.

    Args:
        scores: float32 `[..., positions]` without NaN and without -0.0 (as `index_scores` gives them).
        k: how many to choose, at most `positions`.
        backend: see `kernels.resolve_backend`.

    Returns:
        int32 `[..., k]`, -1 where fewer than `k` scores are finite.
    """
    return form(_INDICES, backend)(scores, k)


def topk_mask(scores: jax.Array, k: int, *, backend: str) -> jax.Array:
    """The same choice as `topk_indices` as a mask, bool `[..., positions]`."""
    return form(_MASK, backend)(scores, k)
