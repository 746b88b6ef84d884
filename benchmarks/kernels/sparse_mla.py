"""Cases of sparse attention that gathers: decode steps and a prefill chunk, each query with 2,048 rows of its own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import OURS, Built, Case
from glm52_jax.cache.row_formats import LanePaddedFormat, RowFormat, TensorScaledFormat, UnquantizedFormat, empty_stack
from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.selection import Selection

HEADS, WIDTH, RANK, SELECTED, PAGE = 64, 576, 512, 2048, 64
BF16 = jnp.dtype(jnp.bfloat16)
FORMATS: dict[str, RowFormat] = {
    "bf16": UnquantizedFormat(WIDTH, BF16, 128),
    "fp8": LanePaddedFormat(RANK, WIDTH - RANK, BF16, lanes=128),
    "fp8 tensor": TensorScaledFormat(WIDTH, (1.0, 1.0), 128),
}
K, M = 2**10, 2**20
SHAPES = {
    (batch, tokens, context): f"decode b{batch} x{tokens} {name}"
    for batch, tokens, context, name in (
        (1, 1, 128 * K, "128k"),
        (1, 6, M, "1m"),
        (8, 1, 32 * K, "32k"),
        (8, 1, 128 * K, "128k"),
        (8, 6, 128 * K, "128k"),
        (64, 1, 32 * K, "32k"),
        (64, 6, 128 * K, "128k"),
    )
}
SHAPES[1, 2048, 128 * K] = "prefill 2k 128k"
_COMPARED = (8, 1, 128 * K)  # where all forms and formats are


def cases() -> list[Case]:
    """The rows form at all shapes, and at one the others: blocks, float8 rows, and what XLA makes of the plain form."""
    found = []
    for shape, name in SHAPES.items():
        formats = FORMATS if shape == _COMPARED else {"bf16": FORMATS["bf16"]}
        for kind, rows in formats.items():
            forms = {OURS: "rows"}
            if shape == _COMPARED:
                forms |= {f"{OURS} blocks": "blocks", "xla": "reference"}
            for title, form in forms.items():
                batch, tokens, context = shape
                queries = batch * tokens
                found.append(
                    Case(
                        op="sparse_mla",
                        shape=f"{kind} {name}",
                        form=title,
                        build=functools.partial(_build, batch, tokens, context, rows, form),
                        hbm_bytes=queries * (SELECTED * rows.row_bytes + HEADS * (WIDTH + RANK) * 2 + HEADS * 4),
                        flops=2 * queries * HEADS * SELECTED * (WIDTH + RANK),
                        copies=queries * SELECTED * len(rows.parts()),
                        measured=queries <= 64,
                    )
                )
    return found


def _build(batch: int, tokens: int, context: int, rows: RowFormat, form: str, chip: str) -> Built:
    pages = batch * context // PAGE
    stack = jax.eval_shape(functools.partial(empty_stack, rows, (2, pages, PAGE)))
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    selected = integers((batch, tokens, SELECTED))
    unit = 8 if form == "blocks" else max(4 // np.dtype(dtype).itemsize for _, dtype in rows.parts().values())
    queries = jax.ShapeDtypeStruct((batch, tokens, HEADS, WIDTH), BF16)
    arguments = (queries, stack, integers(()), integers((batch, pages // batch)), integers((batch, tokens)))

    def run(queries: Any, stack: Any, layer: Any, table: Any, positions: Any, indices: Any, units: Any) -> Any:
        from glm52_jax.kernels.sparse_mla.reference import sparse_mla_reference
        from glm52_jax.kernels.sparse_mla.tpu import sparse_mla

        attend: Any = functools.partial(sparse_mla, target=Target.of(f"tpu:{chip}"), form=form)
        if form == "reference":
            attend = sparse_mla_reference
        selection = Selection(indices, None, units, unit)
        return attend(queries, stack, layer, table, positions, selection, WIDTH**-0.5, RANK)

    return Built(
        run, (*arguments, selected, selected), scalars=_scalars(batch, tokens, context, unit, len(rows.parts()))
    )


def _scalars(batch: int, tokens: int, context: int, unit: int, parts: int) -> dict[tuple[str, int], Any]:
    """Lists of units of selections that are spread evenly over full contexts, in pages at random places."""
    generator = np.random.default_rng(0)
    queries = batch * tokens
    units = np.zeros((queries, SELECTED), np.int32)
    for query in range(queries):
        numbers = np.unique(np.sort(generator.choice(context, SELECTED, replace=False)) // unit)
        units[query, : len(numbers)] = numbers
    count = np.count_nonzero(units, axis=1) + 1
    pages = context // PAGE
    table = generator.permutation(batch * pages).reshape(batch, 1, pages) - np.arange(pages)
    chunk = 128 if unit == 8 or parts > 1 else 256
    return {
        ("sparse_mla", 0): np.minimum(count, SELECTED).astype(np.int32),
        ("sparse_mla", 2): units.reshape(-1, 1, chunk),
        ("sparse_mla", 3): (table * (PAGE // unit)).astype(np.int32),
    }
