"""Scores of one block of keys that is already in vector memory: what Pallas kernels call inside of their own bodies.

Keys are on lanes and heads on sublanes, so that the sum over heads is an addition of whole registers. Tokens go in
groups of up to eight: the rows of a group are its heads, and of each head its tokens. Every `lcm(8, tokens)` rows the
same tokens are on the same sublanes; such rows are added up, and the sums folded to the tokens. No token is padded.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from glm52_jax.kernels.lib.pallas import LANES, SUBLANES

_ROWS = 16
"""Rows of a register of two-byte values: heads are padded to a multiple of it, which 32 are."""


def token_groups(tokens: int) -> tuple[int, ...]:
    """Sizes of the groups of tokens, eight each but for the last."""
    rest = tokens % SUBLANES
    return (SUBLANES,) * (tokens // SUBLANES) + ((rest,) if rest else ())


def padded_heads(heads: int) -> int:
    """Heads as `query_rows` has them."""
    return -(-heads // _ROWS) * _ROWS


def query_rows(queries: jax.Array, dtype: jnp.dtype, width: int) -> jax.Array:
    """The queries as `score_block` takes them, for XLA to make before the kernel.

    Args:
        queries: `[..., tokens, heads, dim]`.
        dtype: that they are multiplied in, `operand_type` of the keys: bfloat16 rounds them.
        width: of the stored keys, `dim` or more.

    Returns:
        `[..., padded_heads * tokens, width]`.
    """
    heads, dim = queries.shape[-2:]
    none = [(0, 0)] * (queries.ndim - 2)
    padded = jnp.pad(queries.astype(dtype), [*none, (0, padded_heads(heads) - heads), (0, width - dim)])
    return _grouped(padded)


def weight_rows(head_weights: jax.Array) -> jax.Array:
    """The heads' weights `[..., tokens, heads]` as `score_block` takes them, float32 `[..., rows, LANES]`."""
    heads = head_weights.shape[-1]
    none = [(0, 0)] * (head_weights.ndim - 1)
    padded = jnp.pad(head_weights.astype(jnp.float32), [*none, (0, padded_heads(heads) - heads)])
    rows = _grouped(padded[..., None])
    return jnp.broadcast_to(rows, (*rows.shape[:-1], LANES))


def _grouped(values: jax.Array) -> jax.Array:
    """`[..., tokens, heads, width]` as rows, group after group, head after head."""
    *outer, tokens, heads, width = values.shape
    whole = tokens // SUBLANES * SUBLANES
    parts = []
    if whole:
        eights = values[..., :whole, :, :].reshape(*outer, whole // SUBLANES, SUBLANES, heads, width)
        parts.append(jnp.swapaxes(eights, -3, -2).reshape(*outer, whole * heads, width))
    if tokens > whole:
        parts.append(jnp.swapaxes(values[..., whole:, :, :], -3, -2).reshape(*outer, -1, width))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)


def score_block(
    q: jax.Array,
    w: jax.Array,
    keys: jax.Array,
    *,
    tokens: int,
    heads: int,
    scales: jax.Array | None = None,
) -> jax.Array:
    """`sum_h w_h * relu(q_h . k)` of a few tokens with a block of keys, inside of a Pallas kernel.

    Products have operands of the queries' type and float32 sums (float32 operands: precision HIGHEST); everything
    after them is float32. Nothing is masked: whoever calls takes away what is not seen, NaN, and the sign of zero.

    Args:
        q: `[padded_heads * tokens, width]` of `query_rows`, for a block of whole groups of tokens.
        w: float32 `[padded_heads * tokens, LANES]` of `weight_rows`, for the same tokens.
        keys: `[keys, width]`, of the queries' type or codes of eight bits, which it holds exactly. As many as fill
            whole lanes when compiled.
        tokens: how many; eight at a time suit the registers best.
        heads: without their padding.
        scales: what each key's codes are to be multiplied with, `[keys, any width]` with the scale in the first column
            and finite values in the others. Powers of two: a score is scaled, which rounds nothing.

    Returns:
        float32 `[tokens, keys]`.
    """
    dots = _dot(q, keys.astype(q.dtype))
    parts, row = [], 0
    for size in token_groups(tokens):
        rows = padded_heads(heads) * size
        group = dots[row : row + rows]
        if padded_heads(heads) != heads:
            # Zero queries would meet infinite keys.
            real = jax.lax.broadcasted_iota(jnp.int32, group.shape, 0) < heads * size
            group = jnp.where(real, group, 0.0)
        parts.append(_sum_heads(group, w[row : row + rows], size))
        row += rows
    scores = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=0)
    return scores if scales is None else scores * _first_column(scales)


def _sum_heads(dots: jax.Array, weights: jax.Array, size: int) -> jax.Array:
    """float32 `[size, keys]` of products `[heads * size, keys]` and weights `[heads * size, columns]`."""
    rows, keys = dots.shape
    columns = weights.shape[1]
    if keys % columns:  # not whole lanes: interpreted
        weights, columns = jnp.broadcast_to(weights[:, :1], (rows, keys)), keys
    period = math.lcm(SUBLANES, size)
    parts = []
    for start in range(0, keys, columns):
        terms = jnp.maximum(dots[:, start : start + columns], 0.0) * weights
        parts.append(jnp.sum(terms.reshape(rows // period, period, columns), axis=0))
    total = parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)
    height = period
    while height > size:
        height //= 2
        total = total[:height] + total[height : 2 * height]
    return total


def _first_column(scales: jax.Array) -> jax.Array:
    """float32 `[1, keys]` of the first column of `[keys, width]`, turned onto the lanes by a product, exactly."""
    first = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, scales.shape[1]), 1) == 0
    return _dot(jnp.where(first, 1.0, 0.0).astype(scales.dtype), scales)[:1]


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left . right^T`, float32."""
    return jax.lax.dot_general(
        left,
        right,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if left.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
