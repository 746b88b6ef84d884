"""How a row of the cache is stored: as it is, or in float8 codes with scales, in widths that suit a device.

A row is a latent (the normalised latent and the rotated rope key) or an index key. A stack of rows in a plain format is
an array; in another it is `PackedStack`, whose parts are arrays of the same pages. Which format a stack has is part
of its type, so that a step for one never runs on the other.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from glm52_jax.params.quantization import FLOAT8, dequantize_groups, quantize_groups, to_float8

GROUP_SIZE = 128
"""Values of a latent that share a scale."""


class RowFormat(abc.ABC):
    """What a row is stored as. Instances are frozen dataclasses, compared by value."""

    @abc.abstractmethod
    def parts(self) -> dict[str, tuple[int, Any]]:
        """Width and type of each part of a row."""

    @abc.abstractmethod
    def encode(self, rows: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
        """The parts `[..., width of the part]` of rows `[..., width]`."""

    @abc.abstractmethod
    def decode(self, parts: dict[str, jax.Array], layer: jax.Array | int) -> jax.Array:
        """float32 rows `[..., width]` of parts."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return sum(width * jnp.dtype(dtype).itemsize for width, dtype in self.parts().values())


@dataclasses.dataclass(frozen=True)
class UnquantizedFormat(RowFormat):
    """Rows as they are, in one type.

    Attributes:
        lanes: the width is padded to a multiple of it.
    """

    width: int
    dtype: Any
    lanes: int = 1

    def parts(self) -> dict[str, tuple[int, Any]]:
        return {"values": (_padded(self.width, self.lanes), self.dtype)}

    def encode(self, rows: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
        return {"values": _pad(rows.astype(self.dtype), self.lanes)}

    def decode(self, parts: dict[str, jax.Array], layer: jax.Array | int) -> jax.Array:
        return parts["values"][..., : self.width]


@dataclasses.dataclass(frozen=True)
class GroupScaledFormat(RowFormat):
    """Codes with a scale a group for the first `coded` values, the others in `dtype`.

    A latent row of GLM-5.2 is 512 codes, 4 scales and 64 bfloat16 values of the rope key, 656 bytes.

    Attributes:
        rotated: whether rows are turned by the Hadamard rotation before they are stored, and queries with them.
    """

    coded: int
    plain: int
    dtype: Any
    group: int = GROUP_SIZE
    rotated: bool = False

    def parts(self) -> dict[str, tuple[int, Any]]:
        plain = {"plain": (self.plain, self.dtype)} if self.plain else {}
        return {"codes": (self.coded, FLOAT8), "scales": (-(-self.coded // self.group), jnp.float32)} | plain

    def encode(self, rows: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
        codes, scales = quantize_groups(rows[..., : self.coded], self.group)
        plain = {"plain": rows[..., self.coded :].astype(self.dtype)} if self.plain else {}
        return {"codes": codes, "scales": scales} | plain

    def decode(self, parts: dict[str, jax.Array], layer: jax.Array | int) -> jax.Array:
        coded = dequantize_groups(parts["codes"], parts["scales"], self.group)
        return jnp.concatenate([coded, parts["plain"].astype(jnp.float32)], axis=-1) if self.plain else coded


@dataclasses.dataclass(frozen=True)
class LanePaddedFormat(GroupScaledFormat):
    """`GroupScaledFormat` in two parts of whole lanes: codes, and a tail of unquantized values and scales.

    The scales are powers of two, which every type of the plain values holds exactly. A latent row of GLM-5.2 is 512
    codes and a tail of 128 bfloat16 values, 68 of them in use: 768 bytes.
    """

    lanes: int = 128

    def parts(self) -> dict[str, tuple[int, Any]]:
        groups = -(-self.coded // self.group)
        return {
            "codes": (_padded(self.coded, self.lanes), FLOAT8),
            "tail": (_padded(self.plain + groups, self.lanes), self.dtype),
        }

    def encode(self, rows: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
        codes, scales = quantize_groups(rows[..., : self.coded], self.group)
        tail = jnp.concatenate([rows[..., self.coded :].astype(self.dtype), scales.astype(self.dtype)], axis=-1)
        return {"codes": _pad(codes, self.lanes), "tail": _pad(tail, self.lanes)}

    def decode(self, parts: dict[str, jax.Array], layer: jax.Array | int) -> jax.Array:
        groups = -(-self.coded // self.group)
        tail = parts["tail"].astype(jnp.float32)
        scales = tail[..., self.plain : self.plain + groups]
        coded = dequantize_groups(parts["codes"][..., : self.coded], scales, self.group)
        return jnp.concatenate([coded, tail[..., : self.plain]], axis=-1)


@dataclasses.dataclass(frozen=True)
class TensorScaledFormat(RowFormat):
    """Codes alone, with one scale for a whole layer: 576 bytes a latent row of GLM-5.2, rope key and all.

    Attributes:
        scales: one a layer of the stack. One is right for normalised latents, and what engines take where a checkpoint
            ships none.
        lanes: the width is padded to a multiple of it.
    """

    width: int
    scales: tuple[float, ...]
    lanes: int = 1

    def parts(self) -> dict[str, tuple[int, Any]]:
        return {"codes": (_padded(self.width, self.lanes), FLOAT8)}

    def encode(self, rows: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
        return {"codes": _pad(to_float8(rows.astype(jnp.float32) / self.scale(layer)), self.lanes)}

    def decode(self, parts: dict[str, jax.Array], layer: jax.Array | int) -> jax.Array:
        return parts["codes"][..., : self.width].astype(jnp.float32) * self.scale(layer)

    def scale(self, layer: jax.Array | int) -> jax.Array:
        """float32 scale of a layer."""
        return jnp.asarray(self.scales, jnp.float32)[layer]


@flax.struct.dataclass
class PackedStack:
    """A stack of rows in parts, each `[layers, pages, page_size, width of the part]`."""

    parts: dict[str, jax.Array]
    format: RowFormat = flax.struct.field(pytree_node=False)


RowStack = jax.Array | PackedStack


def empty_stack(form: RowFormat, shape: tuple[int, int, int]) -> RowStack:
    """Zeros for `[layers, pages, page_size]` rows."""
    parts = {name: jnp.zeros((*shape, width), dtype) for name, (width, dtype) in form.parts().items()}
    alone = isinstance(form, UnquantizedFormat) and form.lanes == 1
    return parts["values"] if alone else PackedStack(parts, form)


def parts_of(stack: RowStack) -> dict[str, jax.Array]:
    """The arrays of a stack."""
    return stack.parts if isinstance(stack, PackedStack) else {"values": stack}


def encode_rows(stack: RowStack, rows: jax.Array, layer: jax.Array | int) -> dict[str, jax.Array]:
    """New rows `[..., width]` in the parts of a stack."""
    return stack.format.encode(rows, layer) if isinstance(stack, PackedStack) else {"values": rows.astype(stack.dtype)}


def decode_rows(stack: RowStack, parts: dict[str, jax.Array], layer: jax.Array | int) -> jax.Array:
    """Rows `[..., width]` of parts taken from a stack; plain ones keep their type, others are float32."""
    return stack.format.decode(parts, layer) if isinstance(stack, PackedStack) else parts["values"]


def is_hadamard(stack: RowStack) -> bool:
    """Whether a stack's rows have been turned by the Hadamard rotation."""
    return isinstance(stack, PackedStack) and isinstance(stack.format, GroupScaledFormat) and stack.format.rotated


def _padded(width: int, lanes: int) -> int:
    return -(-width // lanes) * lanes


def _pad(rows: jax.Array, lanes: int) -> jax.Array:
    short = _padded(rows.shape[-1], lanes) - rows.shape[-1]
    return jnp.pad(rows, [*[(0, 0)] * (rows.ndim - 1), (0, short)]) if short else rows
