"""Latent rows as they are stored, for kernels that copy them themselves: their parts, and rows of the parts' values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.cache.row_formats import LanePaddedFormat, PackedStack, RowStack, TensorScaledFormat, UnquantizedFormat


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """How a kernel reads a stack.

    Attributes:
        width: of the rows that `decode` makes, at least that of the rows of the format; what is beyond is any number.
        decode: rows `[n, width]` in the type of the queries, from the values of each part.
        scale: float32 factor that the decoded rows still lack; 1 for most formats.
    """

    width: int
    decode: Callable[[Sequence[jax.Array]], jax.Array]
    scale: jax.Array | float = 1.0


def stored_rows(stack: RowStack, layer: jax.Array | int, dtype: Any) -> tuple[list[jax.Array], StoredRows] | None:
    """The parts of a stack and how to read one layer of it; None for a format that is none of TPUs.

    Args:
        dtype: of the queries.
    """
    if not isinstance(stack, PackedStack):
        return [stack], StoredRows(stack.shape[-1], lambda parts: parts[0].astype(dtype))
    form = stack.format
    if isinstance(form, UnquantizedFormat):
        values = stack.parts["values"]
        return [values], StoredRows(values.shape[-1], lambda parts: parts[0].astype(dtype))
    if isinstance(form, TensorScaledFormat):
        codes = stack.parts["codes"]
        scale = jnp.asarray(form.scales, jnp.float32)[layer]
        return [codes], StoredRows(codes.shape[-1], lambda parts: parts[0].astype(dtype), scale)
    if isinstance(form, LanePaddedFormat):
        tail = stack.parts["tail"]
        codes = stack.parts["codes"]
        width = form.coded + tail.shape[-1]
        return [codes, tail], StoredRows(width, lambda parts: _lane_rows(form, parts, dtype))
    return None


def _lane_rows(form: LanePaddedFormat, parts: Sequence[jax.Array], dtype: Any) -> jax.Array:
    """Codes times the scales of their groups, exact since those are powers of two; the tail as it is behind them.

    A product with ones brings the scale of its group to every code: matrix units do it faster than lanes are spread.
    """
    codes, tail = parts
    place = jax.lax.broadcasted_iota(jnp.int32, (tail.shape[1], codes.shape[1]), 0) - form.plain
    group = jax.lax.broadcasted_iota(jnp.int32, (tail.shape[1], codes.shape[1]), 1) // form.group
    scales = jnp.dot(
        tail,
        (place == group).astype(tail.dtype),
        precision=jax.lax.Precision.HIGHEST if tail.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    coded = (codes.astype(jnp.float32) * scales).astype(dtype)
    return jnp.concatenate([coded[:, : form.coded], tail.astype(dtype)], axis=1)
