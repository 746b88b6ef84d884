"""Signature of sparse attention over the latent cache."""

from __future__ import annotations

import jax

from glm52_jax.cache.row_formats import RowStack
from glm52_jax.kernels import Target, implementation
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.sparse_mla.reference import sparse_mla_reference

_IMPLEMENTATIONS = {"reference": sparse_mla_reference, "tpu": "glm52_jax.kernels.sparse_mla.tpu:sparse_mla"}


def sparse_mla(
    queries: jax.Array,
    latent: RowStack,
    layer: jax.Array | int,
    page_table: jax.Array,
    positions: jax.Array,
    selection: Selection,
    scale: float,
    *,
    kv_lora_rank: int,
    expected: int | None = None,
    backend: str,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention of absorbed queries to exactly the selected rows of the latent cache.

    Args:
        queries: `[batch, tokens, heads, latent_width]`: query times the key up-projection, then the rotated part.
        latent: stack of latent rows `[layers, pages, page_size, latent_width]`, plain or quantised.
        layer: which layer of the stack.
        page_table: int32 `[batch, pages_per_sequence]`.
        positions: int32 `[batch, tokens]` of the queries, -1 for padding.
        selection: what each query attends to, in either form; entries of -1, and at or past the capacity of the table,
            are skipped, order is free.
        scale: factor of the scores.
        kv_lora_rank: how many values of a row are the latent that is averaged.
        expected: how many positions a query selects on average, by which a form is chosen where there are several; as
            many as a list has room for when None.
        backend: see `kernels.resolve_backend`.

    Returns:
        out: `[batch, tokens, heads, kv_lora_rank]` in the dtype of `queries`; zeros where nothing is selected.
        lse: float32 `[batch, tokens, heads]`, log of the sum of exponentials, minus infinity where nothing is selected.
    """
    attend = implementation(_IMPLEMENTATIONS, backend)
    hint = {} if Target.of(backend) is None else {"expected": expected}
    return attend(queries, latent, layer, page_table, positions, selection, scale, kv_lora_rank, **hint)
