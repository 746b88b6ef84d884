"""Cases of all kernels that work on the cache in one layer, at the numbers of pages and tokens that the engine chooses.

A capacity is rounded to an eighth of a power of two and has room for drafts (`infer/generate.py`), a plan takes any,
and pages are dealt to devices: so a device may have any number of pages a sequence. A step takes one token, two to
eight with drafts, or a chunk of any length. Most numbers of pages give a kernel the blocks that others give it, too:
`classes` finds those that differ, by the rules of the blocks themselves. Up to 2,048 positions all of them do, since
that many are selected. These cases are compiled only; what they cost is in the modules of the operations.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.cache.paged_cache import PAGE_SIZE
from glm52_jax.cache.row_formats import (
    LanePaddedFormat,
    RowFormat,
    TensorScaledFormat,
    UnquantizedFormat,
    empty_stack,
    parts_of,
)
from glm52_jax.kernels import Target
from glm52_jax.kernels.cache_write.api import write_rows
from glm52_jax.kernels.cache_write.new_rows import IndexKeyTransform, LatentRowTransform
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.index_scores.reference import map_tokens
from glm52_jax.kernels.index_topk.api import index_topk
from glm52_jax.kernels.lib.layers import Rotary
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.sparse_mla.api import sparse_mla
from glm52_jax.kernels.topk.api import compact, kth_best, topk_mask
from glm52_jax.model.indexer import BLOCK_SCORES, K_NORM_EPS
from sharding.compiler.chips import CHIPS

HEADS, WIDTH, RANK, ROPE = 64, 576, 512, 64
INDEX_HEADS, INDEX_WIDTH, SELECTED = 32, 128, 2048
LAYERS, MOST_PAGES = 2, (1 << 20) // PAGE_SIZE
PARTS = 16
"""Devices that pages are dealt to, where they are."""
BF16, F32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
FORMATS: dict[str, RowFormat] = {
    "bf16": UnquantizedFormat(WIDTH, BF16, 128),
    "fp8": LanePaddedFormat(RANK, ROPE, BF16, lanes=128),
    "fp8-tensor": TensorScaledFormat(WIDTH, (1.0,) * LAYERS, 128),
    "f32": UnquantizedFormat(WIDTH, F32, 128),
}
FEW = (1, 2, 3, 4, 5, 6, 7, 8)
"""Tokens of a step with up to seven drafts."""
CHUNKS = (9, 13, 16, 17, 32, 64, 100, 128, 256, 512, 960, 1000, 2048, 4096)
"""Tokens of a chunk: the powers of two that `generate` rounds to, and some of those that are asked for."""


COUNTS = (*range(1, 520), *(step + more for step in range(544, MOST_PAGES + 1, 32) for more in (-1, 0, 1)))[:-1]
"""Numbers of pages that `classes` are looked for in: all short ones, and the bounds of blocks among the others."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One step of one device.

    Attributes:
        pages: of a sequence, on this device.
        rows: format of the latents, of `FORMATS`.
        dealt: whether other devices have pages of the same sequences.
    """

    batch: int
    tokens: int
    pages: int
    rows: str = "bf16"
    heads: int = HEADS
    dealt: bool = False

    def __str__(self) -> str:
        dealt = " dealt" if self.dealt else ""
        heads = f" h{self.heads}" if self.heads != HEADS else ""
        return f"b{self.batch} x{self.tokens} p{self.pages} {self.rows}{heads}{dealt}"

    @property
    def capacity(self) -> int:
        return self.pages * PAGE_SIZE

    @property
    def selected(self) -> int:
        return min(SELECTED, self.capacity)

    @property
    def expected(self) -> int:
        """Rows of this device that a query attends to."""
        parts = PARTS if self.dealt else 1
        return -(-min(SELECTED, self.capacity * parts) // parts)

    @property
    def scored(self) -> int:
        """Tokens of which scores are there at a time."""
        return min(self.tokens, max(1, BLOCK_SCORES // (self.batch * self.capacity)))


@functools.cache
def cases() -> list[Case]:
    """Every class of every chip; the short grid has all numbers of pages up to 17, and the others in turn."""
    quick = _short()
    found: dict[Shape, set[str]] = {}
    for chip in CHIPS:
        for shape in (*quick.get(chip, ()), *_long(chip)):
            found.setdefault(shape, set()).add(chip)
    return [
        Case(
            op="layer",
            shape=str(shape),
            form=OURS,
            build=functools.partial(_build, shape),
            hbm_bytes=0,
            flops=0,
            chips=tuple(chip for chip in CHIPS if chip in chips),
            measured=False,
            short=tuple(chip for chip in CHIPS if shape in quick[chip]),
        )
        for shape, chips in found.items()
    ]


def _short() -> dict[str, list[Shape]]:
    """For each chip all short contexts of a decode step; formats, drafts, chunks and long contexts by turns."""
    formats, chips = list(FORMATS), list(CHIPS)
    found = {
        chip: [Shape(2, 1, pages, formats[(pages + turn) % 3]) for pages in range(1, 18)]
        for turn, chip in enumerate(chips)
    }
    turn = 0
    for tokens in (*FEW[1:], 9, 16, 100, 512, 960):
        for pages in (1, 3, 15):
            # Several sequences' queries of many tokens would have the size and the dimensions of a stack.
            batch = 1 + turn % 3 if tokens < 9 else 1
            shape = Shape(batch, tokens, pages, formats[turn % 3], (64, 16, 8)[turn % 3])
            found[chips[turn % len(chips)]].append(shape)
            turn += 1
    for shape in (
        Shape(1, 1, 1, "f32"),
        Shape(3, 4, 5, "f32"),
        Shape(2, 1, 33, dealt=True),
        Shape(1, 4, 7, "fp8", dealt=True),
        Shape(3, 1, 513),
        Shape(2, 4, 1025, "fp8"),
        Shape(1, 1, MOST_PAGES),
        Shape(3, 200, 1281),
    ):
        found[chips[turn % len(chips)]].append(shape)
        turn += 1
    return found


def _long(chip: str) -> list[Shape]:
    """All classes of numbers of pages for a token of two sequences, and other steps at fewer numbers."""
    found = classes(chip, Shape(2, 1, 1), COUNTS)
    powers = [1 << bits for bits in range(4, MOST_PAGES.bit_length())]
    found += [Shape(1, 1, pages + more) for pages in powers for more in (0, 1) if pages + more <= MOST_PAGES]
    found += [Shape(2, 4, pages + more) for pages in powers for more in (0, 1) if pages + more <= MOST_PAGES]
    found += [Shape(2, 1, pages, rows) for rows in list(FORMATS)[1:] for pages in (*range(1, 17), 33, 65, 511)]
    found += [Shape(2 if tokens < 9 else 1, tokens, pages) for tokens in (*FEW, *CHUNKS) for pages in (1, 3, 15, 129)]
    found += [Shape(2, tokens, pages, dealt=True) for tokens in (1, 4, 64) for pages in (1, 3, 32, 129, 1025)]
    found += [Shape(batch, 1, pages) for batch in (3, 8, 64, 100) for pages in (1, 3, 65)]
    found += [Shape(2, tokens, 3, heads=heads) for heads in (1, 2, 4, 8, 16, 32) for tokens in (1, 4, 64)]
    return list(dict.fromkeys(found))


def classes(chip: str, like: Shape, pages: Sequence[int]) -> list[Shape]:
    """The first and the last number of pages of each class: what no rule of blocks tells apart is of one."""
    first: dict[Any, int] = {}
    last: dict[Any, int] = {}
    for count in pages:
        key = blocks_of(chip, dataclasses.replace(like, pages=count))
        first.setdefault(key, count)
        last[key] = count
    counts = sorted({*first.values(), *last.values()})
    return [dataclasses.replace(like, pages=count) for count in counts]


def blocks_of(chip: str, shape: Shape) -> tuple[Any, ...]:
    """Everything static that the kernels of a step get, but for the number of blocks where there are several."""
    from glm52_jax.kernels.index_scores import tile_sizes as of_scores
    from glm52_jax.kernels.index_topk import tile_sizes as of_both
    from glm52_jax.kernels.sparse_mla import dense_tile_sizes
    from glm52_jax.kernels.sparse_mla import tile_sizes as of_rows
    from glm52_jax.kernels.topk import tile_sizes as of_selection

    target = Target(CHIPS[chip])
    form = form_of(chip, shape)
    scores = of_scores.choose(target, shape.scored, shape.capacity, PAGE_SIZE)
    steps = -(-shape.capacity // (scores.block * scores.cores))
    found: list[Any] = [form, shape.selected, scores, min(steps, 2), shape.capacity % scores.block == 0]
    if form == "mask":
        dense = dense_tile_sizes.choose(target, shape.tokens, shape.heads, shape.batch, shape.capacity)
        count = dense_tile_sizes.pages_of(target, dense, shape.pages, PAGE_SIZE)
        found += [dense, count, min(-(-shape.pages // count), 3), shape.pages % count == 0]
    else:
        row = of_rows.RowShape.of([jax.ShapeDtypeStruct((1, w), d) for w, d in FORMATS[shape.rows].parts().values()])
        unit = row.pack
        found.append(of_rows.choose(target.chip, unit, row.parts, shape.selected))
        key_bytes = INDEX_WIDTH * (4 if shape.rows == "f32" else 2)
        both = of_both.choose(target, shape.batch, shape.scored, shape.capacity, PAGE_SIZE, key_bytes, shape.selected)
        found.append(both and (dataclasses.replace(both, selection=_counted(both.selection))))
    rows = 1 if shape.scored == 1 else 8
    found.append(_counted(of_selection.choose(rows, shape.capacity, shape.selected)))
    return tuple(found)


def _counted(selection: Any) -> Any:
    """Blocks of a selection with the number of their chunks, up to two, in place of that of positions."""
    return dataclasses.replace(selection, positions=min(selection.positions // selection.chunk, 2))


def form_of(chip: str, shape: Shape) -> str:
    """What selections are made as: a mask, or lists of indices; as `Forms.for_cache` has it."""
    from glm52_jax.kernels.sparse_mla.tile_sizes import RowShape, choose_implementation

    stored = [jax.ShapeDtypeStruct((1, width), dtype) for width, dtype in FORMATS[shape.rows].parts().values()]
    found = choose_implementation(CHIPS[chip], shape.tokens, shape.expected, shape.capacity, RowShape.of(stored))
    return "mask" if found == "dense" and not shape.dealt else "indices"


def _build(shape: Shape, chip: str) -> Built:
    dtype = F32 if shape.rows == "f32" else BF16
    pool = shape.batch * shape.pages
    make, tokens = jax.ShapeDtypeStruct, (shape.batch, shape.tokens)
    latents = jax.eval_shape(functools.partial(empty_stack, FORMATS[shape.rows], (LAYERS, pool, PAGE_SIZE)))
    keys = jax.eval_shape(
        functools.partial(empty_stack, UnquantizedFormat(INDEX_WIDTH, dtype, 128), (LAYERS, pool, PAGE_SIZE))
    )
    positions = make(tokens, jnp.int32)
    rotary = jax.eval_shape(lambda p: Rotary.at(p, ROPE, 1e6), positions)
    arguments = (
        {name: make(part.shape, part.dtype) for name, part in parts_of(latents).items()},
        {name: make(part.shape, part.dtype) for name, part in parts_of(keys).items()},
        make((), jnp.int32),
        make((shape.batch, shape.pages), jnp.int32),
        positions,
        make((*tokens, shape.heads, WIDTH), dtype),
        make((*tokens, WIDTH), dtype),
        LatentRowTransform(make((RANK,), dtype), rotary, 1e-5, interleave=True),
        make((*tokens, INDEX_HEADS, INDEX_WIDTH), F32),
        make((*tokens, INDEX_HEADS), F32),
        make((*tokens, INDEX_WIDTH), F32),
        IndexKeyTransform(
            make((INDEX_WIDTH,), dtype), make((INDEX_WIDTH,), dtype), rotary, K_NORM_EPS, interleave=True
        ),
        make((*tokens, PARTS * shape.selected if shape.dealt else 1), F32),
        make((*tokens, PARTS * shape.selected if shape.dealt else 1), jnp.int32),
    )
    run = functools.partial(_run, shape, form_of(chip, shape), f"tpu:{chip}", latents, keys)
    return Built(run, arguments, donate=(0, 1))


def _run(shape: Shape, form: str, backend: str, latents: Any, keys: Any, *operands: Any) -> Any:
    """Rows written, scores of the context, the best of them, and attention to those."""
    own, own_keys, layer, table, positions, queries, values, transform = operands[:8]
    index_queries, weights, key_values, key_making, theirs, their_positions = operands[8:]
    latents, keys = latents.replace(parts=own), keys.replace(parts=own_keys)
    latents = write_rows(latents, layer, values, table, positions, transform=transform, backend=backend)
    keys = write_rows(keys, layer, key_values, table, positions, transform=key_making, backend=backend)
    stored = keys, layer, table

    def best(part: Any) -> Any:
        asked, heads, seen = part
        if form == "mask":
            scores = index_scores(asked, heads, *stored, seen, backend=backend)
            return topk_mask(scores, shape.selected, backend=backend)
        return index_topk(asked, heads, *stored, seen, shape.selected, backend=backend)

    found = map_tokens(best, (index_queries, weights, positions), shape.scored)
    if form == "mask":
        selection = Selection(mask=found)
    elif shape.dealt:
        indices, scores = found
        edge, place = kth_best(theirs, their_positions, SELECTED, backend=backend)
        better = (scores > edge[..., None]) | ((scores == edge[..., None]) & (indices <= place[..., None]))
        selection = Selection(indices=compact(jnp.where(better, indices, -1), backend=backend))
    else:
        selection = Selection(indices=found[0])
    out = sparse_mla(
        *(queries, latents, layer, table, positions, selection, WIDTH**-0.5),
        kv_lora_rank=RANK,
        expected=shape.expected,
        backend=backend,
    )
    return parts_of(latents), parts_of(keys), out
