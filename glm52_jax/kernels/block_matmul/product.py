"""The inner product of the kernels that multiply rows by weights `[out, in]`, plain or in codes with block scales.

Codes are widened to bfloat16, exactly, in vector memory; the float32 product of every block of columns is multiplied by
that block's scale and summed. So the weights themselves are never rounded, unlike in the plain form, which rounds
`codes * scale` to bfloat16, and no wide copy of them is written anywhere.

Chips whose vector units do not know FP8 convert it slowly, through float32. There, four codes of a word are spread into
two words of two bfloat16 each by masks and shifts: sign, exponent and mantissa keep their order, so that what comes out
is `2 ** -120` times the code, which rows multiplied by `2 ** 64` (exact) bring back into float32's range. Two things
follow. A code below the least normal one, at most 1/64 of the rounding error that the plain form allows the largest
weight of its block, may count as zero, where the chip takes subnormal bfloat16 for zero. And the even rows of a block
come before its odd ones, which a product with a permutation puts back in order, exactly.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import LANES, SUBLANES
from glm52_jax.params.quantization import FLOAT8, BlockQuantized

_INFINITE, _NAN = 255 * 2.0**120, 254 * 2.0**120  # the largest numbers of bfloat16, in the order of a tile's columns
_UP, _BACK = 2.0**64, 2.0**56  # rows by the first, sums by the second: together the 2 ** 120 that widening took away
_PLAIN_COLUMNS = 512  # of one product of plain weights; the compiler cuts it to what the units take
_TURN = 4096  # columns in all of one turn of a loop over groups
_WORD_ROWS = 32  # rows of bytes in a tile, what `pltpu.bitcast` to words wants whole


Stack = jax.Array | BlockQuantized
"""Weights of all layers, plain or in blocks."""


@dataclasses.dataclass(frozen=True)
class WeightEncoding:
    """How the weights of one stack are multiplied.

    Attributes:
        block: (rows, columns) of a scale block; None for plain weights.
        group: rows of the weight in one product.
        spread: whether FP8 codes are widened by masks and shifts, rows of even number first.
        dtype: of the operands of the products.
    """

    block: tuple[int, int] | None
    group: int
    spread: bool
    dtype: Any

    @classmethod
    def of(cls, weight: Stack, x: jax.Array, rows: int, target: Target) -> WeightEncoding:
        """For a tile of that many rows of the weight."""
        group = target.chip.mxu_width
        group = group if rows % group == 0 else 128 if rows % 128 == 0 else rows
        if not isinstance(weight, BlockQuantized):
            exact = jnp.float32 in (x.dtype, weight.dtype)
            return cls(None, group, False, jnp.float32 if exact else x.dtype)
        spread = (
            weight.codes.dtype == FLOAT8
            and x.dtype == jnp.bfloat16
            and "fp8" not in target.chip.peak_flops
            and group % _WORD_ROWS == 0
        )
        return cls(weight.block, group, spread, x.dtype)

    @property
    def precision(self) -> jax.lax.Precision | None:
        return jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None

    def prepare(self, x: jax.Array) -> jax.Array:
        """Rows as `sums` takes them."""
        return (x * jnp.asarray(_UP, x.dtype) if self.spread else x).astype(self.dtype)

    def groups(self, rows: int) -> list[tuple[int, int]]:
        """First row and number of rows of each product with a tile of the weight."""
        return [(first, min(self.group, rows - first)) for first in range(0, rows, self.group)]

    def each_group(self, rows: int, run: Callable[[Any, int], None], inner: int) -> None:
        """Calls `run` with each of `groups`, of weights that are `inner` wide.

        In a loop where there are many. One turn of it has some thousand columns of weights at least, since the units
        run dry between turns.
        """
        turn = self.group * max(1, _TURN // inner)
        if rows % turn or rows <= 2 * turn:
            for first, size in self.groups(rows):
                run(first, size)
            return

        def one(number: Any, carry: Any) -> Any:
            for first in range(0, turn, self.group):
                run(pl.multiple_of(number * turn + first, self.group), self.group)
            return carry

        jax.lax.fori_loop(0, rows // turn, one, None)

    def sums(self, x: Any, weight: Any, scale: Callable[[int, int], Any]) -> jax.Array:
        """Float32 `x @ weight.T`, with the even columns first where `spread` says so.

        Args:
            x: `[rows, in]`, an array or a reference, from `prepare`.
            weight: `[out, in]`, one group, an array or a reference.
            scale: the scale of a block by its number within the group, and its number along the columns.
        """
        out, inner = weight.shape
        step = self.block[1] if self.block else _PLAIN_COLUMNS
        total = jnp.zeros((x.shape[0], out), jnp.float32)
        for number, first in enumerate(range(0, inner, step)):
            columns = slice(first, min(first + step, inner))
            part = jax.lax.dot_general(
                x[:, columns],
                self._widen(weight[:, columns]),
                (((1,), (1,)), ((), ())),
                precision=self.precision,
                preferred_element_type=jnp.float32,
            )
            total += part * self._scales(scale, number, part.shape) if self.block else part
        return total * _BACK if self.spread else total

    def in_order(self, values: jax.Array) -> jax.Array:
        """Columns of `sums`, or what was made of them value by value, in the order of the weight's rows.

        A product with a permutation of bfloat16 is exact; float32 goes in the three parts that it is the sum of. Since
        zero times infinity is NaN, the largest two numbers of bfloat16 stand for infinity and NaN: what is as large as
        the first counts as infinite.
        """
        if not self.spread:
            return values
        width, dtype = values.shape[-1], values.dtype
        wide = values.astype(jnp.float32)
        values = jnp.where(wide != wide, _NAN, jnp.minimum(jnp.maximum(wide, -_INFINITE), _INFINITE)).astype(dtype)
        source = jax.lax.broadcasted_iota(jnp.int32, (width, width), 0)
        place = jax.lax.broadcasted_iota(jnp.int32, (width, width), 1)
        move = (source == place // 2 + place % 2 * (width // 2)).astype(jnp.bfloat16)
        product = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
        total = jnp.zeros(values.shape, jnp.float32)
        for _ in range(1 if dtype == jnp.bfloat16 else 3):
            part = values.astype(jnp.bfloat16)
            values -= part.astype(dtype)
            total += product(part, move)
        total = jnp.where(total == _NAN, jnp.nan, jnp.where(jnp.abs(total) < _INFINITE, total, total * 2))
        return total.astype(dtype)

    def _widen(self, codes: jax.Array) -> jax.Array:
        if not self.spread:
            return codes.astype(self.dtype)
        words = pltpu.bitcast(codes, jnp.uint32)
        sign, rest = jnp.uint32(0x80008000), jnp.uint32(0x7F007F00)
        even = ((words << 8) & sign) | ((words << 4) & (rest >> 4))
        odd = (words & sign) | ((words & rest) >> 4)
        return jnp.concatenate([pltpu.bitcast(half, jnp.bfloat16) for half in (even, odd)])

    def _scales(self, scale: Callable[[int, int], Any], number: int, shape: Sequence[int]) -> Any:
        """The scales of a product's columns: one number, or several side by side."""
        assert self.block is not None
        held, width = -(-shape[1] // self.block[0]), shape[1]
        values = scale(0, number)
        if held == 1:
            return values
        lane = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        row = lane % (width // 2) * 2 + lane // (width // 2) if self.spread else lane
        for block in range(1, held):
            values = jnp.where(row >= block * self.block[0], scale(block, number), values)
        return jnp.broadcast_to(values, shape)


def values_of(weight: Stack) -> jax.Array:
    """The weights, or their codes."""
    return weight.codes if isinstance(weight, BlockQuantized) else weight


def scales_of(weight: Stack) -> Scales | None:
    """The scales of the codes; None for plain weights."""
    if not isinstance(weight, BlockQuantized):
        return None
    rows, columns = weight.scales.shape[-2:]
    # A TPU keeps an array in the layout that pads less, and would copy it for a kernel that wants the other one.
    flipped = _padded(columns, rows) < _padded(rows, columns)
    return Scales(jnp.swapaxes(weight.scales, -1, -2) if flipped else weight.scales, flipped)


@dataclasses.dataclass(frozen=True)
class Scales:
    """Scales as a kernel takes them, a whole matrix of them at a time in scalar memory.

    Attributes:
        array: `[..., rows, columns]` of blocks, or with these two exchanged.
        flipped: whether they are.
    """

    array: jax.Array
    flipped: bool

    def spec(self, index: Callable[..., tuple[Any, ...]], pieces: Sequence[int] = ()) -> pl.BlockSpec:
        """Those of one matrix, or of some side by side; `index` gives the first numbers, up to those of `pieces`."""
        last = (*pieces, *self.array.shape[-2:])
        zeros = (0,) * len(last)
        squeezed = (None,) * (self.array.ndim - len(last))
        return pl.BlockSpec((*squeezed, *last), lambda *numbers: (*index(*numbers), *zeros), memory_space=pltpu.SMEM)

    @property
    def rows(self) -> int:
        """Of blocks in a matrix."""
        return self.array.shape[-1 if self.flipped else -2]

    def reshaped(self, pieces: int) -> Scales:
        """As `[layers, pieces, ...]`."""
        return Scales(self.array.reshape(-1, pieces, *self.array.shape[-2:]), self.flipped)

    def of(self, reference: Any, row: Any, column: Any, *piece: Any) -> Any:
        """One scale, from what the kernel was given."""
        return reference[(*piece, column, row) if self.flipped else (*piece, row, column)]


def _padded(rows: int, columns: int) -> int:
    return -(-rows // SUBLANES) * -(-columns // LANES)
