"""The parity checks go red when a cache, a step or the draft layer is broken; see `test_faults`."""

import jax
import jax.numpy as jnp
import pytest

from glm52_jax.cache import pages
from glm52_jax.kernels.cache_write import api as write_api
from glm52_jax.kernels.index_scores import api as scores_api
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.kernels.sparse_mla import reference as mla_reference
from glm52_jax.model import decoder_layer, mtp, transformer
from tests.model.cases import Case, all_cases
from tests.model.faults import Patch, everywhere, fresh_decode, fresh_drafts, fresh_trace, mentions, wrap

pytestmark = pytest.mark.slow  # they try the tests, not the model


@pytest.fixture
def case(released: Case) -> Case:
    return released


# --- the cache


def test_padding_is_a_token(padded: Case, monkeypatch: Patch) -> None:
    """Positions count the padding, which is cached and selected."""
    monkeypatch.setattr(
        transformer, "_positions", lambda mask: jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape)
    )
    monkeypatch.setattr(
        transformer,
        "_real_first",
        lambda mask: jnp.broadcast_to(jnp.arange(mask.shape[1], dtype=jnp.int32), mask.shape),
    )
    mentions(fresh_trace(padded), "padding", "topk")


def test_padding_is_written(padded: Case, monkeypatch: Patch) -> None:
    """A padding token's row goes to where -1 points, into the first slot."""

    def write(original, stack, layer, rows, table, positions, **kw):
        return original(stack, layer, rows, table, jnp.maximum(positions, 0), **kw)

    wrap(monkeypatch, decoder_layer, "write_rows", write)
    mentions(fresh_decode(padded), "departs first")


def test_minus_one_gathers(case: Case, monkeypatch: Patch) -> None:
    """An unused entry of a selection reads a row all the same."""
    wrap(
        monkeypatch,
        mla_reference,
        "masked_softmax",
        lambda original, scores, mask: original(scores, jnp.ones_like(mask)),
    )
    mentions(fresh_decode(case), "layer 0 departs first")


def test_unwritten_slots_are_scored(case: Case, monkeypatch: Patch) -> None:
    """Keys are not masked by position, and a NaN outranks every number."""

    def scores(queries, weights, keys, layer, table, positions):
        full = jnp.full(table.shape[0], table.shape[1] * keys.shape[2])
        context = pages.context_rows(keys, layer, table, full)
        products = jnp.einsum("bshd,btd->bsht", queries, context, precision="highest")
        return jnp.sum(weights[..., None] * jax.nn.relu(products), axis=2)

    everywhere(monkeypatch, scores_api, scores)
    mentions(fresh_decode(case), "topk")


def test_decode_one_position_too_high(case: Case, monkeypatch: Patch) -> None:
    """Decode rotates by a position one too high; alone it would cancel out, after a prefill it does not."""
    original = Rotary.at

    def at(positions, dim, theta):
        return original(positions + (positions.shape[1] == 1), dim, theta)

    monkeypatch.setattr(Rotary, "at", staticmethod(at))
    mentions(fresh_decode(case), "departs first")


def test_decode_does_not_store(case: Case, monkeypatch: Patch) -> None:
    """A decoded token's row is used but never written: the first token is right, the rest is not."""

    def write(original, stack, layer, rows, table, positions, **kw):
        return stack if rows.shape[1] == 1 else original(stack, layer, rows, table, positions, **kw)

    wrap(monkeypatch, decoder_layer, "write_rows", write)
    mentions(fresh_decode(case), "departs first")


def test_page_table_ignored(case: Case, monkeypatch: Patch) -> None:
    """Rows are read in the order of the pool."""

    def rows(original, stack, layer, table, positions):
        return original(stack, layer, jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape), positions)

    wrap(monkeypatch, mla_reference, "gather_rows", rows)
    mentions(fresh_decode(case), "departs first")


def test_long_chunks_end_at_a_page(case: Case, monkeypatch: Patch) -> None:
    """A run that crosses more pages than its length suggests is cut short."""

    def write(stack, layer, values, table, positions, transform):
        first = jnp.min(jnp.where(positions >= 0, positions, 2**30), axis=1, keepdims=True)
        near = positions // stack.shape[2] <= first // stack.shape[2]
        return real_write(stack, layer, values, table, jnp.where(near, positions, -1), transform)

    real_write = write_api._IMPLEMENTATIONS["reference"]
    everywhere(monkeypatch, write_api, write)
    mentions(fresh_decode(case), "departs first")


# --- the draft layer


def test_halves_of_the_projection_swapped(case: Case) -> None:
    """The projection takes [hidden, embedding] instead of [embedding, hidden]."""
    params = case.params()
    swapped = jnp.roll(params["mtp"]["project"], case.config.hidden_size, axis=1)
    found = fresh_trace(case, params | {"mtp": params["mtp"] | {"project": swapped}}, drafts=True)
    mentions(found, "mtp_logits")
    assert len(found) == 1


def test_hidden_before_the_final_norm(case: Case, monkeypatch: Patch) -> None:
    """The draft layer gets the hidden state before the model's final norm."""
    raw = []

    def remember(original, x, *rest):
        raw.append(x)
        return original(x, *rest)

    def advance(original, params, config, hidden, *rest, **kw):
        return original(params, config, raw[-1][:, : hidden.shape[1]], *rest, **kw)

    wrap(monkeypatch, transformer, "rms_norm", remember)
    wrap(monkeypatch, mtp, "mtp_layer", advance)
    mentions(fresh_trace(case, drafts=True), "mtp_logits")


def test_token_at_the_same_position(case: Case, monkeypatch: Patch) -> None:
    """The embedding is that of the token itself, not of the next one."""

    def advance(original, params, config, hidden, tokens, *rest, **kw):
        return original(params, config, hidden, jnp.roll(tokens, 1, axis=1), *rest, **kw)

    wrap(monkeypatch, mtp, "mtp_layer", advance)
    mentions(fresh_trace(case, drafts=True), "mtp_logits")


@pytest.mark.quick(1)
@pytest.mark.parametrize("fault", ["raw state recycled", "positions stand still", "trunk's selection"])
def test_chain_of_drafts(monkeypatch: Patch, fault: str) -> None:
    """Later drafts get the state before its norm, the same position again, or the trunk's last set."""
    {"raw": _recycle_raw, "positions": _stand_still, "trunk's": _trunk_selection}[fault.split()[0]](monkeypatch)
    sharing = [c for c in all_cases().values() if c.config.index_share_for_mtp_iteration]
    assert not all(fresh_drafts(case) for case in sharing)


def _recycle_raw(patch: Patch) -> None:
    """The layer's output goes back in as it is, and is normed for the head alone."""
    calls, scales = [], []

    def norm(original, x, scale, eps):
        calls.append(x)
        if len(calls) % 3:
            return original(x, scale, eps)
        scales.append((scale, eps))
        return x

    wrap(patch, mtp, "rms_norm", norm)
    wrap(patch, mtp, "mtp_logits", lambda original, params, x, *rest: original(params, rms_norm(x, *scales[-1]), *rest))


def _stand_still(patch: Patch) -> None:
    def advance(original, params, config, hidden, tokens, positions, *rest, **kw):
        return original(params, config, hidden, tokens, positions - (positions.shape[1] == 1), *rest, **kw)

    wrap(patch, mtp, "mtp_layer", advance)


def _trunk_selection(patch: Patch) -> None:
    last = []

    def extend(original, *args, **kw):
        hidden, kept, layers = original(*args, **kw)
        last.append(jax.tree.map(lambda a: a[-1], layers.selection))
        return hidden, kept, layers

    def advance(original, *args, selection=None, **kw):
        return original(*args, selection=last[-1] if selection is None else selection, **kw)

    wrap(patch, transformer, "extend", extend)
    wrap(patch, mtp, "mtp_layer", advance)
