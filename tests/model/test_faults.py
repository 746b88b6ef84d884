"""The parity checks go red when the model is broken: each test puts a known fault into the code and expects complaints.

The faults are those of public implementations of models of this class. Here are those of the layers, over whole texts.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.cache import pages
from glm52_jax.kernels.cache_write import new_rows
from glm52_jax.kernels.index_scores import api as scores_api
from glm52_jax.kernels.index_topk import reference as index_topk
from glm52_jax.kernels.lib.layers import rms_norm
from glm52_jax.kernels.lib.products import einsum
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.router import reference as router
from glm52_jax.model import attention, decoder_layer, indexer, moe, transformer
from glm52_jax.model.decoder_layer import LayerIndex
from tests.model.cases import Case, all_cases
from tests.model.faults import Patch, everywhere, fresh_decode, fresh_trace, mentions, rounded, wrap

pytestmark = pytest.mark.slow  # they try the tests, not the model


@pytest.fixture
def case(released: Case) -> Case:
    return released


def test_nothing_to_report_without_a_fault(padded: Case) -> None:
    assert not fresh_trace(padded)
    assert not fresh_decode(padded)


# --- the indexer


def test_indexer_rotates_halves(case: Case) -> None:
    """The indexer's rotation pairs the two halves; nothing shows before tokens are dropped."""
    found = fresh_trace(case, indexer_rope_interleave=False)
    mentions(found, "topk", "logits")
    first = next(f for f in found if f.startswith("topk"))
    column = int(first.partition("column ")[2].partition(":")[0])
    assert column >= case.config.index_topk


def test_indexer_rotates_the_last_dimensions(case: Case, monkeypatch: Patch) -> None:
    """The rotated part of an index head is taken to be the last one, as in the main heads."""

    def last(config, x, rotary):
        width = config.qk_rope_head_dim
        turned = rotary.rotate(x[..., -width:], interleave=True)
        return jnp.concatenate([x[..., :-width], turned], axis=-1)

    monkeypatch.setattr(indexer, "_rotate_first", last)
    mentions(fresh_trace(case), "topk")


def test_main_heads_rotate_halves(case: Case) -> None:
    """The main heads' rotation pairs the two halves."""
    mentions(fresh_trace(case, rope_interleave=False), "layer 0 departs first", "logits")


@pytest.mark.parametrize("forced", ["sinks", "self"])
def test_forced_positions(case: Case, monkeypatch: Patch, forced: str) -> None:
    """The first positions, or the query's own, are in every selection whatever their score."""

    def force(original, queries, weights, keys, layer, table, positions, **kw):
        scores = original(queries, weights, keys, layer, table, positions, **kw)
        place = jnp.arange(scores.shape[-1])
        chosen = place < 2 if forced == "sinks" else place == positions[..., None]
        return jnp.where(chosen & jnp.isfinite(scores), jnp.inf, scores)

    wrap(monkeypatch, index_topk, "index_scores", force)
    mentions(fresh_trace(case), "topk")


def test_scores_without_relu(case: Case, monkeypatch: Patch) -> None:
    """Negative products count."""

    def scores(queries, weights, keys, layer, table, positions):
        context = pages.context_rows(keys, layer, table, jnp.max(positions, axis=1) + 1)
        total = jnp.einsum("bshd,btd,bsh->bst", queries, context, weights, precision="highest")
        return jnp.where(jnp.arange(context.shape[1]) <= positions[..., None], total, -jnp.inf)

    everywhere(monkeypatch, scores_api, scores)
    mentions(fresh_trace(case), "topk")


def test_selection_of_one_head(case: Case, monkeypatch: Patch) -> None:
    """Heads do not vote together; a head's own favourites are taken."""
    wrap(monkeypatch, indexer, "head_weights", lambda original, *a: original(*a) * (jnp.arange(8) == 0))
    mentions(fresh_trace(case), "topk")


def test_head_weights_without_sign(case: Case, monkeypatch: Patch) -> None:
    """The heads' weights go through a softmax."""
    wrap(monkeypatch, indexer, "head_weights", lambda original, *a: jax.nn.softmax(original(*a), axis=-1))
    mentions(fresh_trace(case), "topk")


def test_key_norm_without_bias(case: Case, monkeypatch: Patch) -> None:
    """The bias of the key norm is dropped."""
    wrap(monkeypatch, new_rows, "layer_norm", lambda original, x, scale, bias, eps: original(x, scale, 0 * bias, eps))
    mentions(fresh_trace(case), "topk")


def test_key_norm_without_mean(case: Case, monkeypatch: Patch) -> None:
    """The key norm is an RMSNorm."""
    monkeypatch.setattr(new_rows, "layer_norm", lambda x, scale, bias, eps: rms_norm(x, scale, eps) + bias)
    mentions(fresh_trace(case), "topk")


def test_raw_latent_into_index_queries(case: Case, monkeypatch: Patch) -> None:
    """The index queries are made of the query latent before its norm."""

    def raw(original, weights, config, x, rotary):
        projected = original(weights, config, x, rotary)
        return projected._replace(q_latent=einsum("bsd,qd->bsq", x, weights["q_a"]))

    wrap(monkeypatch, decoder_layer, "project", raw)
    mentions(fresh_trace(case), "topk")


@pytest.mark.parametrize("name", ["head_weights", "index_keys", "index_queries"])
def test_scores_in_bfloat16(monkeypatch: Patch, name: str) -> None:
    """Something that the scores are made of is rounded to bfloat16; one case is enough to notice."""
    if name == "index_keys":
        make = new_rows.IndexKeyTransform.__call__
        monkeypatch.setattr(
            new_rows.IndexKeyTransform, "__call__", lambda transform, values: rounded(make(transform, values))
        )
    else:
        wrap(monkeypatch, indexer, name, lambda original, *a: rounded(original(*a)))
    assert any(fresh_trace(all_cases()[case]) for case in ("released_plan", "irregular_plan", "all_full"))


def test_selection_ignored(case: Case, monkeypatch: Patch) -> None:
    """Every layer attends to all it may see, and nobody notices on short texts."""
    _attend_to_all(monkeypatch, lambda place: jnp.bool_(True))
    assert not [f for f in fresh_trace(case) if f.startswith("topk differs") and "layer 0" in f]
    mentions(fresh_trace(case), "layer 0 departs first", "logits")


def test_shared_layers_attend_to_all(case: Case, monkeypatch: Patch) -> None:
    """Having an index cache is taken for being sparse, so that shared layers are dense."""
    _attend_to_all(monkeypatch, lambda place: jnp.logical_not(place.full))
    mentions(fresh_trace(case), "layer 3 departs first", "logits")


def _attend_to_all(monkeypatch: Patch, where: Callable[[LayerIndex], jax.Array]) -> None:
    places = []

    def remember(original, params, config, place, *rest):
        places.append(place)
        return original(params, config, place, *rest)

    def attend(original, weights, config, projected, kept, layer, standing, selection, **options):
        mask = jnp.arange(kept.capacity) <= standing.last_visible[..., None]
        listed = selection.indices[..., None] == jnp.arange(kept.capacity)
        chosen = jnp.where(where(places[-1]), mask, jnp.any(listed, axis=2))
        selection = Selection(mask=chosen)
        return original(weights, config, projected, kept, layer, standing, selection, **options)

    wrap(monkeypatch, transformer, "decoder_layer", remember)
    wrap(monkeypatch, decoder_layer, "attention", attend)


@pytest.mark.parametrize("name", ["released_plan", "irregular_plan"])
def test_shared_layers_take_an_older_set(monkeypatch: Patch, name: str) -> None:
    """A shared layer takes the set of the full layer before the last one."""

    def stale(original, params, config, place, x, rotary, positions, kept, selection, policy):
        x, kept, chosen, experts = original(params, config, place, x, rotary, positions, kept, selection, policy)
        older = jnp.where(place.full, selection.indices, chosen.indices)
        return x, kept, Selection(indices=older), experts

    wrap(monkeypatch, transformer, "decoder_layer", stale)
    mentions(fresh_trace(all_cases()[name]), "departs first", "logits")


def test_schedule_by_remainder(monkeypatch: Patch) -> None:
    """The layers with an indexer are those whose number is a multiple of four, whatever the config says."""
    case = all_cases()["irregular_plan"]

    def plan(original, config):
        place = original(config)
        full = np.arange(config.num_hidden_layers) % 4 == 0
        return place._replace(full=full, indexer=np.where(full, np.cumsum(full) - 1, 0).astype(np.int32))

    original = LayerIndex.plan
    monkeypatch.setattr(LayerIndex, "plan", staticmethod(partial(plan, original)))
    mentions(fresh_trace(case), "topk", "logits")


# --- attention and the latents


def test_latent_norms_with_another_epsilon() -> None:
    """The epsilon of the latent norms is that of the other norms, where the reference has 1e-6."""
    mentions(fresh_trace(all_cases()["all_full"], latent_norm_eps=1e-5), "logits")


def test_keys_and_values_swapped(monkeypatch: Patch) -> None:
    """Rows of `kv_b_proj` are read as values first."""
    case = all_cases()["all_full"]
    weights = case.params()["attention"]
    both = jnp.concatenate([weights["k_up"], weights["v_up"]], axis=2)
    value = case.config.v_head_dim
    swapped = weights | {"v_up": both[:, :, :value], "k_up": both[:, :, value:]}
    mentions(fresh_trace(case, case.params() | {"attention": swapped}), "layer 0 departs first")


def test_scale_of_the_value_width(case: Case, monkeypatch: Patch) -> None:
    """The softmax scale is that of the part of a head that is not rotated."""

    def scaled(original, queries, *rest, **kw):
        return original(queries * (case.config.qk_head_dim / case.config.qk_nope_head_dim) ** 0.5, *rest, **kw)

    wrap(monkeypatch, attention, "sparse_mla", scaled)
    mentions(fresh_trace(case), "layer 0 departs first")


def test_bias_of_the_projections_dropped(grouped: Case) -> None:
    """`attention_bias` is ignored."""
    params = grouped.params()
    weights = {k: v for k, v in params["attention"].items() if not k.endswith("_bias")}
    mentions(fresh_trace(grouped, params | {"attention": weights}), "layer 0 departs first")


# --- experts


def test_router_bias_in_bfloat16(case: Case, monkeypatch: Patch) -> None:
    """The correction bias goes through bfloat16, which cannot tell its values apart."""
    wrap(monkeypatch, moe, "route", lambda original, w, bias, *rest, **kw: original(w, rounded(bias), *rest, **kw))
    mentions(fresh_trace(case), "experts")


def test_bias_in_the_mixing_weights(case: Case, monkeypatch: Patch) -> None:
    """The correction bias, meant for the choice only, gets into the gates."""

    def biased(original, weight, bias, config, x, real, **options):
        experts, _ = original(weight, bias, config, x, real, **options)
        scores = jax.nn.sigmoid(einsum("nd,ed->ne", x, weight)) + bias
        gates = jnp.take_along_axis(scores, jnp.maximum(experts, 0), axis=-1)
        return experts, gates / jnp.sum(gates, axis=-1, keepdims=True) * config.routed_scaling_factor

    wrap(monkeypatch, moe, "route", biased)
    mentions(fresh_trace(case), "logits")


@pytest.mark.parametrize("name", ["released_plan", "grouped_bias"])
def test_gate_normalisation_ignored(name: str) -> None:
    """`norm_topk_prob` is read and then not used, either way."""
    case = all_cases()[name]
    mentions(fresh_trace(case, norm_topk_prob=not case.config.norm_topk_prob), "logits")


def test_scaling_twice(case: Case, monkeypatch: Patch) -> None:
    """The gates are multiplied by the factor twice."""

    def twice(original, weight, bias, config, *rest, **options):
        experts, gates = original(weight, bias, config, *rest, **options)
        return experts, gates * config.routed_scaling_factor

    wrap(monkeypatch, moe, "route", twice)
    mentions(fresh_trace(case), "layer 3 departs first")


def test_shared_expert_scaled(case: Case, monkeypatch: Patch) -> None:
    """The factor of the routed experts is applied to the shared one too."""
    factor = case.config.routed_scaling_factor
    wrap(monkeypatch, moe, "sharded_mlp", lambda original, *a, **kw: original(*a, **kw) * factor)
    mentions(fresh_trace(case), "layer 3 departs first")


def test_groups_ignored(grouped: Case) -> None:
    """Experts are chosen among all groups."""
    mentions(fresh_trace(grouped, topk_group=grouped.config.n_group), "experts")


def test_groups_ranked_by_their_best(grouped: Case, monkeypatch: Patch) -> None:
    """A group is ranked by its best expert, not by its best two."""

    def best(ranked, rule):
        groups = ranked.reshape(len(ranked), rule.groups, -1)
        _, kept = jax.lax.top_k(jnp.max(groups, axis=-1), rule.kept_groups)
        mask = jnp.any(kept[:, :, None] == jnp.arange(rule.groups), axis=1)
        return jnp.where(mask[:, :, None], groups, -jnp.inf).reshape(ranked.shape)

    monkeypatch.setattr(router, "_within_best_groups", best)
    mentions(fresh_trace(grouped), "experts")


# --- FP8


@pytest.mark.parametrize("fault", ["transposed", "ignored"])
def test_fp8_scales(fault: str) -> None:
    """The scales are left out, or their grid is read the other way round."""
    case = all_cases()["fp8"]

    def spoil(leaf):
        if not hasattr(leaf, "scales"):
            return leaf
        flat = leaf.scales.reshape(*leaf.scales.shape[:-2], -1)
        turned = jnp.flip(flat, -1).reshape(leaf.scales.shape)
        return dataclasses.replace(leaf, scales=turned if fault == "transposed" else jnp.ones_like(turned) / 448)

    params = jax.tree.map(spoil, case.params(), is_leaf=lambda leaf: hasattr(leaf, "scales"))
    mentions(fresh_trace(case, params), "departs first", "logits")
