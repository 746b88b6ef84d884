"""What the kernel does to new rows in vector memory: norm, rotation, codes; `new_rows` and `row_formats` on tiles.

Everything goes through references, a slab of rows at a time, since a store may begin at any lane and a value may not.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.cache.row_formats import GroupScaledFormat, LanePaddedFormat, RowFormat, TensorScaledFormat
from glm52_jax.kernels.cache_write.new_rows import IndexKeyTransform, LatentRowTransform, RowTransform
from glm52_jax.kernels.lib.layers import hadamard_matrix
from glm52_jax.params.quantization import clamp_to_float8, group_scales


def tables(transform: RowTransform | None, room: int) -> tuple[list[jax.Array], list[jax.Array]]:
    """What the making needs besides the values, in the shapes that `make` takes.

    Args:
        room: width of a made row with its padding.

    Returns:
        Arrays that all rows share, `[1 or width, width]`, and arrays with a row for each token
        `[batch, tokens, width]`.
    """
    if transform is None:
        return [], []
    shared = [transform.norm.astype(jnp.float32)[None]]
    if isinstance(transform, IndexKeyTransform):
        shared.append(transform.bias.astype(jnp.float32)[None])
        if transform.hadamard_rotated:
            shared.append(hadamard_matrix(transform.norm.shape[0]))
    cos, sin = transform.rotary.cos, transform.rotary.sin
    if transform.interleave:
        cos, sin = (jnp.repeat(table, 2, axis=-1) for table in (cos, sin))
        sign = jnp.tile(jnp.array([-1.0, 1.0], jnp.float32), sin.shape[-1] // 2)
    else:
        half = sin.shape[-1]
        cos, sin = (jnp.concatenate([table, table], axis=-1) for table in (cos, sin))
        sign = jnp.repeat(jnp.array([-1.0, 1.0], jnp.float32), half)
    width = transform.norm.shape[0]
    hadamard_rotated = room - width if isinstance(transform, LatentRowTransform) else width
    pad = ((0, 0), (0, 0), (0, hadamard_rotated - cos.shape[-1]))
    # Values that are not rotated are kept, with an angle of zero.
    return shared, [jnp.pad(cos, pad, constant_values=1.0), jnp.pad(sin * sign, pad)]


def make(made: Any, at: Any, transform: RowTransform, dtype: Any, shared: list[Any], angles: list[jax.Array]) -> None:
    """Turns values into rows, in place.

    Args:
        made: float32 reference `[rows, width with padding]`, zeros in the padding.
        at: slab of rows.
        dtype: that values come in, to which a latent row is rounded before it is stored in codes.
        shared, angles: references and slabs of arrays, of `tables`.
    """
    width = transform.norm.shape[0]
    if isinstance(transform, LatentRowTransform):
        latent = made[at, :width]
        latent = latent * jax.lax.rsqrt(jnp.mean(jnp.square(latent), -1, keepdims=True) + transform.eps)
        made[at, :width] = (latent * shared[0][...]).astype(dtype).astype(jnp.float32)
        rope = _rotated(made[at, width:], transform, angles)
        made[at, width:] = rope.astype(dtype).astype(jnp.float32)
        return
    keys = made[at, :width]
    keys = keys - jnp.mean(keys, -1, keepdims=True)
    keys = keys * jax.lax.rsqrt(jnp.mean(jnp.square(keys), -1, keepdims=True) + transform.eps)
    keys = _rotated(keys * shared[0][...] + shared[1][...], transform, angles)
    if transform.hadamard_rotated:
        keys = jax.lax.dot(keys, shared[2][...], precision=jax.lax.Precision.HIGHEST)
    made[at, :width] = keys


def _rotated(values: jax.Array, transform: RowTransform, angles: list[jax.Array]) -> jax.Array:
    width, pairs = values.shape[-1], transform.rotary.cos.shape[-1]
    lane = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    step = 1 if transform.interleave else pairs
    first = lane % 2 == 0 if transform.interleave else lane < pairs
    partner = jnp.where(first, _roll(values, width - step), _roll(values, step))
    return values * angles[0] + partner * angles[1]


def _roll(values: jax.Array, shift: int) -> jax.Array:
    return pltpu.roll(values, shift % values.shape[-1], 1)


def encode(parts: dict[str, Any], at: Any, form: RowFormat | None, rows: jax.Array, scale: jax.Array) -> None:
    """Stores rows in parts, as float32 that the part's type only has to round.

    Args:
        parts: float32 references `[rows, width of the part]`, zeros where a part has padding.
        at: slab of rows.
        form: of the stack, None for a plain array.
        rows: float32 `[rows of the slab, width]`, padded or not.
        scale: of the layer, for `TensorScaledFormat`.
    """
    if isinstance(form, GroupScaledFormat):
        _encode_groups(parts, at, form, rows)
    elif isinstance(form, TensorScaledFormat):
        parts["codes"][at, : form.width] = clamp_to_float8(rows[:, : form.width] / scale)
    else:
        width = min(rows.shape[1], parts["values"].shape[1])
        parts["values"][at, :width] = rows[:, :width]


def _encode_groups(parts: dict[str, Any], at: Any, form: GroupScaledFormat, rows: jax.Array) -> None:
    in_tail = isinstance(form, LanePaddedFormat)
    scales, first = (parts["tail"], form.plain) if in_tail else (parts["scales"], 0)
    if form.plain:
        parts["tail" if in_tail else "plain"][at, : form.plain] = rows[:, form.coded : form.coded + form.plain]
    for number, start in enumerate(range(0, form.coded, form.group)):
        stop = min(start + form.group, form.coded)
        group = rows[:, start:stop]
        own, inverse = group_scales(jnp.max(jnp.abs(group), axis=-1, keepdims=True))
        parts["codes"][at, start:stop] = clamp_to_float8(group * inverse)
        scales[at, first + number : first + number + 1] = own
