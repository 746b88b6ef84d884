"""Plain masked attention: all scores, one softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from glm52_jax.kernels.lib.products import einsum
from glm52_jax.kernels.sparse_mla.reference import masked_softmax


def masked_attention_reference(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    positions: jax.Array,
    mask: jax.Array,
    scale: float,
) -> jax.Array:
    """See `api.masked_attention`."""
    scores = einsum("bshd,bthd->bhst", queries, keys, dtype=jnp.float32) * scale
    weights, _ = masked_softmax(scores, mask[:, None])
    return einsum("bhst,bthv->bshv", weights.astype(queries.dtype), values)
