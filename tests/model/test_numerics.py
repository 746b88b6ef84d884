"""Properties of the arithmetic that need no reference: rotation, selection rule, norms, experts, plans, gradients.

The faults that these tests would catch are listed in docs/known_faults.md.
"""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm52_jax as glm
from glm52_jax.cache.page_sharding import TokenPositions
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.config import ModelConfig
from glm52_jax.kernels.lib.layers import Rotary, layer_norm, rms_norm
from glm52_jax.kernels.lib.selection import Selection
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.model import attention, indexer, moe, mtp, transformer
from glm52_jax.model.decoder_layer import LayerIndex, decoder_layer
from sharding.errors import InputError
from sharding.layout import SINGLE
from tests.model.paths import QUICK_OPTIONS
from tests.model.tiny import ABSORBED, EXPANDED, TINY, random_params, random_tokens, tiny

GENERATOR = np.random.default_rng(7)


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order() -> None:
    """Each test draws its own numbers from the start, whichever tests ran before it in this process."""
    GENERATOR.bit_generator.state = np.random.default_rng(7).bit_generator.state


NOPE, ROPE = TINY.qk_nope_head_dim, TINY.qk_rope_head_dim


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(GENERATOR.standard_normal(shape), jnp.float32)


quick_jit = partial(jax.jit, compiler_options=QUICK_OPTIONS)


def layer(name: str, number: int = 0) -> dict:
    return layer_of(random_params()[name], number)


def rotary(positions: np.ndarray) -> Rotary:
    return Rotary.at(jnp.asarray(positions, jnp.int32), ROPE, TINY.rope_theta)


def latent_row(projected: attention.Projected, angles: Rotary) -> jax.Array:
    return attention.latent_row_transform(layer("attention"), TINY, angles)(projected.kv)


# --- rotary embedding


def test_position_zero_leaves_queries_and_keys_as_they_are() -> None:
    """And which slice is the rotated one: the last of a main head, the first of an index head."""
    x, latent = normal(1, 6, TINY.hidden_size), normal(1, 6, TINY.q_lora_rank)
    still, moved = rotary(np.zeros((1, 6))), rotary(np.arange(1, 7)[None])
    a, b = (attention.project(layer("attention"), TINY, x, r) for r in (still, moved))
    plain = np.einsum("sq,hnq->shn", np.asarray(a.q_latent[0]), np.asarray(layer("attention")["q_b"]))
    np.testing.assert_allclose(a.q_nope[0], plain[..., :NOPE], atol=1e-5)
    np.testing.assert_allclose(a.q_rope[0], plain[..., NOPE:], atol=1e-5)
    np.testing.assert_array_equal(a.q_nope, b.q_nope)
    np.testing.assert_array_equal(*(latent_row(p, r)[..., : TINY.kv_lora_rank] for p, r in ((a, still), (b, moved))))
    assert np.abs(a.q_rope - b.q_rope).min(axis=(0, 2)).max() > 1e-3
    for make, source in ((indexer.index_keys, x), (indexer.index_queries, latent)):
        a, b = (make(layer("indexer"), TINY, source, r) for r in (still, moved))
        np.testing.assert_array_equal(a[..., ROPE:], b[..., ROPE:])
        assert np.abs(a[..., :2] - b[..., :2]).min() > 1e-4


def test_a_common_shift_changes_no_score() -> None:
    """Rotation is relative, for attention and indexer."""
    x, latent = normal(1, 9, TINY.hidden_size), normal(1, 9, TINY.q_lora_rank)

    def scores(shift: int) -> tuple[np.ndarray, np.ndarray]:
        turned = rotary(np.arange(9)[None] + shift)
        made = attention.project(layer("attention"), TINY, x, turned)
        main = np.einsum("shr,tr->hst", made.q_rope[0], latent_row(made, turned)[0, :, TINY.kv_lora_rank :])
        queries = indexer.index_queries(layer("indexer"), TINY, latent, turned)
        keys = indexer.index_keys(layer("indexer"), TINY, x, turned)
        return main, np.einsum("shd,td->hst", queries[0], keys[0])

    for here, shifted in zip(scores(0), scores(5), strict=True):
        np.testing.assert_allclose(here, shifted, atol=1e-4)
        assert np.abs(here).max() > 1


@pytest.mark.parametrize("interleave", [True, False])
def test_pairs_of_the_rotation(interleave: bool) -> None:
    """Adjacent pairs, or the two halves; against complex numbers."""
    x, turned = normal(2, 5, 3, ROPE), rotary(np.arange(10).reshape(2, 5) * 11)
    got = np.asarray(turned.rotate(x, interleave=interleave))
    pairs = (
        np.asarray(x).reshape(2, 5, 3, -1, 2)
        if interleave
        else np.moveaxis(np.asarray(x).reshape(2, 5, 3, 2, -1), 3, 4)
    )
    angle = np.arange(10).reshape(2, 5)[..., None] * 11 * TINY.rope_theta ** (-np.arange(0, ROPE, 2) / ROPE)
    rotated = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[:, :, None]
    parts = np.stack([rotated.real, rotated.imag], -1)
    expected = parts.reshape(x.shape) if interleave else np.moveaxis(parts, 4, 3).reshape(x.shape)
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("jit", [True, False])
def test_rotary_tables_at_a_million(jit: bool) -> None:
    """Float32 tables, int32 positions; the angle is right to 0.02 rad at 1M tokens."""
    positions = np.array([[0, 1, 257, 4096, 131_072, 1_048_575]], np.int32)
    make = jax.jit(Rotary.at, static_argnums=(1, 2)) if jit else Rotary.at
    table = make(jnp.asarray(positions), 64, 8e6)
    assert table.cos.dtype == table.sin.dtype == jnp.float32
    frequency = 8e6 ** (-np.arange(0, 64, 2) / 64)
    exact = positions[..., None] * frequency
    np.testing.assert_allclose(table.cos, np.cos(exact), atol=2e-2)
    np.testing.assert_allclose(table.sin, np.sin(exact), atol=2e-2)
    single = positions.astype(np.float32)[..., None] * frequency.astype(np.float32)
    np.testing.assert_allclose(table.cos, np.cos(single.astype(np.float64)), atol=1e-6)
    # The same in bfloat16 parameters: neither positions nor frequencies are ever rounded to it.
    np.testing.assert_allclose(table.sin[0, 2], np.sin(exact[0, 2]), atol=1e-4)


# --- the indexer


def select(keys: np.ndarray, x: jax.Array, latent: jax.Array, form: str, backend: str, config: ModelConfig = TINY):
    """The selection of queries at positions 0, 1, ... against given index keys, as a mask."""
    length = keys.shape[0]
    cache = PagedCache.create(config, 1, length, dtype=jnp.float32, page_size=length)
    cache = dataclasses.replace(cache, index_keys=cache.index_keys.at[1, 0].set(keys))
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    places = TokenPositions.of(SINGLE, cache, positions)
    got = indexer.select_positions(
        layer("indexer"),
        config,
        x,
        latent,
        rotary(positions),
        cache,
        1,
        places,
        as_mask=form == "mask",
        backend=backend,
    )
    if got.mask is not None:
        return np.asarray(got.mask[0])
    return np.asarray((got.indices[0][..., None] == np.arange(length)).any(1))


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("form", ["indices", "mask"])
def test_selection_is_the_plain_top_k(form: str, backend: str) -> None:
    """One set a query, by the weighted sum over heads of ReLUs; no sink and no query is forced in."""
    length, k = 40, TINY.index_topk
    keys, x = np.array(normal(length, TINY.index_head_dim)), normal(1, length, TINY.hidden_size)
    keys[:4] *= 0.01  # a distractor block that leaves the first positions behind
    latent = normal(1, length, TINY.q_lora_rank)
    got = select(keys, x, latent, form, backend)
    queries = np.asarray(
        indexer.index_queries(layer("indexer"), TINY, latent, rotary(np.arange(length)[None])), np.float64
    )
    heads = np.asarray(x[0], np.float64) @ np.asarray(layer("indexer")["weights"], np.float64).T
    scores = np.einsum(
        "sh,sht->st", heads, np.maximum(np.einsum("shd,td->sht", queries[0], keys.astype(np.float64)), 0)
    )
    expected = np.zeros((length, length), bool)
    for row in range(length):
        seen = np.argsort(-scores[row, : row + 1], kind="stable")[:k]
        expected[row, seen] = True
    np.testing.assert_array_equal(got, expected)
    late = got[k:]
    assert not late[:, :4].all(0).any(), "the first positions are always there"
    assert not late[np.arange(len(late)), np.arange(k, length)].all(), "the query's own position is always there"
    assert (got.sum(1) == np.minimum(np.arange(length) + 1, k)).all()


def test_key_norm_is_a_layer_norm_with_its_own_epsilon() -> None:
    """The mean is removed, the bias is used, epsilon is 1e-6."""
    width = TINY.index_head_dim
    row = 2.0 + 1e-3 * GENERATOR.standard_normal(width)  # a variance of 1e-6
    weights = {"k": jnp.asarray(row[:, None] * np.eye(1, TINY.hidden_size), jnp.float32)}
    weights |= {"k_norm": jnp.full(width, 0.5), "k_norm_bias": jnp.full(width, 3.0)}
    x = jnp.zeros((1, 1, TINY.hidden_size)).at[0, 0, 0].set(1.0)
    got = np.asarray(indexer.index_keys(weights, TINY, x, rotary(np.zeros((1, 1)))))[0, 0]
    stored = np.asarray(weights["k"][:, 0], np.float64)

    def expected(eps: float) -> np.ndarray:
        return 0.5 * (stored - stored.mean()) / np.sqrt(stored.var() + eps) + 3.0

    np.testing.assert_allclose(got, expected(1e-6), atol=5e-3)
    assert np.abs(got - expected(1e-5)).max() > 0.1


# --- norms and experts


def test_norms_in_float64() -> None:
    x, scale, bias = normal(3, 5, 16), 1 + 0.1 * normal(16), normal(16)
    values = np.asarray(x, np.float64)
    root = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale)
    np.testing.assert_allclose(rms_norm(x, scale, 1e-5), root, atol=1e-5)
    centred = (values - values.mean(-1, keepdims=True)) / np.sqrt(values.var(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(layer_norm(x, scale, bias, 1e-6), centred * np.asarray(scale) + bias, atol=1e-5)


def gates_in_float64(config: ModelConfig, weight, bias, x) -> tuple[np.ndarray, np.ndarray]:
    scores = 1 / (1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T))
    experts = np.argsort(-(scores + np.asarray(bias, np.float64)), axis=-1, kind="stable")[
        :, : config.num_experts_per_tok
    ]
    gates = np.take_along_axis(scores, experts, -1)
    if config.norm_topk_prob:
        gates = gates / gates.sum(-1, keepdims=True)
    return experts, gates * config.routed_scaling_factor


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("factor", "k"), [(1.0, 2), (2.5, 2), (2.5, 1)])
def test_gates(normalised: bool, factor: float, k: int) -> None:
    """Un-biased sigmoids, normalised only if asked, multiplied by the factor once."""
    config = tiny(norm_topk_prob=normalised, routed_scaling_factor=factor, num_experts_per_tok=k)
    weight, bias, x = normal(8, 32), 7 + normal(8), normal(20, 32)
    experts, gates = moe.route(weight, bias, config, x, jnp.arange(20) < 18, backend="reference")
    expected, expected_gates = gates_in_float64(config, weight, bias, x)
    np.testing.assert_array_equal(experts[:18], expected[:18])
    np.testing.assert_allclose(gates[:18], expected_gates[:18], rtol=1e-5)
    assert (np.asarray(experts[18:]) == -1).all()
    assert (np.asarray(gates[18:]) == 0).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_shared_expert_is_not_scaled(backend: str) -> None:
    """With routed experts of zero, the layer is the shared expert whatever the factor."""
    stack = dict(random_params()["moe"])
    stack["down"] = jnp.zeros_like(stack["down"])
    x, real = normal(1, 5, 32), jnp.ones((1, 5), bool)
    one, more = (moe.moe(stack, tiny(routed_scaling_factor=f), 1, x, real, backend=backend)[0] for f in (1.0, 2.5))
    np.testing.assert_array_equal(one, more)
    assert np.abs(one).max() > 0.1


def test_router_bias_far_from_zero() -> None:
    """256 experts with biases in a narrow band far from zero, of which bfloat16 would leave nine values."""
    config = tiny(n_routed_experts=256, num_experts_per_tok=8)
    weight, x = normal(256, 32) / 8, normal(200, 32)
    bias = jnp.asarray(GENERATOR.uniform(6.817, 7.063, 256), jnp.float32)
    experts, _ = moe.route(weight, bias, config, x, jnp.ones(200, bool), backend="reference")
    expected, _ = gates_in_float64(config, weight, bias, x)
    same = (np.sort(experts, -1) == np.sort(expected, -1)).all(-1)
    assert same.mean() >= 0.99  # a sum near 7 has steps of 5e-7, so that a near tie may fall otherwise
    rounded = bias.astype(jnp.bfloat16).astype(jnp.float32)
    assert len(set(rounded.tolist())) == 9
    coarse, _ = moe.route(weight, rounded, config, x, jnp.ones(200, bool), backend="reference")
    assert (np.sort(coarse, -1) != np.sort(expected, -1)).any(-1).mean() > 0.3
    made = jax.eval_shape(lambda: glm.init_params(tiny(dtype="bfloat16"), jax.random.key(0)))
    assert made["moe"]["router_bias"].dtype == jnp.float32


@pytest.mark.parametrize("backend", ["reference", "cpu", "interpret"])
def test_a_nan_of_the_router_shows(backend: str) -> None:
    """A token with a score that is NaN has no experts; its sum over none would be a number as good as any."""
    stack = dict(random_params()["moe"])
    x, real = normal(1, 5, TINY.hidden_size), np.array([[True, True, False, True, True]])
    run = quick_jit(partial(moe.moe, config=TINY, layer=0, backend=backend))
    healthy, _ = run(stack, x=x, real=real)
    assert np.isfinite(healthy[0][real[0]]).all()
    stack["router"] = stack["router"].at[0, 3, 7].set(jnp.nan)
    out, experts = run(stack, x=x, real=real)
    assert (np.asarray(experts) == -1).all()
    assert np.isnan(out[0][real[0]]).all()
    np.testing.assert_array_equal(out[0, 2], healthy[0, 2])


# --- layers, plans, drafts


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", ["fsffssf", pytest.param("fsssfss", marks=pytest.mark.slow), "ffff"])
def test_scan_equals_a_loop(plan: str) -> None:
    """Any plan of full and shared layers, scanned with flags as data, is the plain loop over known layers."""
    types = tuple({"f": "full", "s": "shared"}[letter] for letter in plan)
    kinds = ("dense",) + ("sparse",) * (len(plan) - 1)
    config = tiny(num_hidden_layers=len(plan), indexer_types=types, mlp_layer_types=kinds, num_nextn_predict_layers=0)
    params, tokens = random_params(config), random_tokens(1, 14)
    trace = glm.trace(params, config, tokens, policy=ABSORBED)

    @quick_jit
    def loop(params):
        positions = jnp.arange(14, dtype=jnp.int32)[None]
        cache = PagedCache.create(config, 1, 14, dtype=jnp.float32, page_size=14)
        places = TokenPositions.of(SINGLE, cache, positions)
        x, chosen, turned = params["embed"][tokens], Selection.empty(1, 14, k=8), rotary(positions)
        streams, sets, indexers = [], [], 0
        for number, (kind, mlp_kind) in enumerate(zip(types, kinds, strict=True)):
            place = LayerIndex(number, kind == "full", indexers, mlp_kind == "dense", max(number - 1, 0))
            streams.append(x)
            x, cache, chosen, _ = decoder_layer(params, config, place, x, turned, places, cache, chosen, ABSORBED)
            sets.append(chosen.sorted_indices(8))
            indexers += kind == "full"
        return streams, sets

    streams, sets = loop(params)
    np.testing.assert_allclose(trace.hidden[:-1], streams, atol=2e-5)
    np.testing.assert_array_equal(trace.topk, sets)


def test_a_plan_needs_a_first_selection() -> None:
    """A first layer that shares is refused when the config is made."""
    with pytest.raises(InputError, match=r"indexer_types\[0\] is 'shared'"):
        tiny(indexer_types=("shared", "full", "shared", "full"))


@pytest.mark.parametrize("half", ["embedding", "hidden"])
def test_halves_of_the_projection(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first half takes the next token's normed embedding, the second the normed hidden state."""
    params = random_params()
    width = TINY.hidden_size
    eye, zero = np.eye(width), np.zeros((width, width))
    project = np.concatenate([eye, zero] if half == "embedding" else [zero, eye], axis=1)
    params = params | {"mtp": params["mtp"] | {"project": jnp.asarray(project, jnp.float32)}}
    seen = []

    def remember(params, config, place, x, turned, positions, cache, selection, policy):
        seen.append((x, turned))
        return x, cache, selection, None

    monkeypatch.setattr(mtp, "decoder_layer", remember)
    hidden, following = normal(1, 3, width), random_tokens(1, 3)
    cache = PagedCache.create(TINY, 1, 8, dtype=jnp.float32)
    places = jnp.arange(2, 5, dtype=jnp.int32)[None]
    mtp.mtp_layer(params, TINY, hidden, following, places, cache, ABSORBED)
    source = params["embed"][following] if half == "embedding" else hidden
    scale = params["mtp"]["embed_norm" if half == "embedding" else "hidden_norm"]
    np.testing.assert_allclose(seen[0][0], rms_norm(source, scale, TINY.rms_norm_eps), atol=1e-5)
    np.testing.assert_array_equal(seen[0][1].cos, rotary(places).cos)  # positions are those of the hidden states


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_absorbed_and_expanded_attention(dtype: str) -> None:
    """One layer's attention in both forms at every position, on the same cache and selection."""
    config, length = tiny(dtype=dtype), 40
    weights = layer_of(random_params(config, dtype=dtype)["attention"], 1)
    places = jnp.arange(length, dtype=jnp.int32)[None]
    made = attention.project(weights, config, normal(1, length, config.hidden_size).astype(dtype), rotary(places))
    row = attention.latent_row_transform(weights, config, rotary(places))(made.kv)
    cache = PagedCache.create(config, 1, length, dtype=row.dtype, page_size=length)
    cache = dataclasses.replace(cache, latent=cache.latent.at[1, 0].set(row[0]))
    ranks = GENERATOR.random((1, length, length)) + 2.0 * (np.arange(length) > np.arange(length)[:, None])
    mask = jnp.asarray((np.argsort(np.argsort(ranks)) < 8) & (ranks < 1))

    def attend(weights, made, expanded, backend):
        chosen = Selection(mask=mask)
        return attention.attention(
            weights,
            config,
            made,
            cache,
            1,
            TokenPositions.of(SINGLE, cache, places),
            chosen,
            expanded=expanded,
            backend=backend,
        ).astype(jnp.float32)

    outputs = [
        np.asarray(quick_jit(partial(attend, expanded=expanded, backend=backend))(weights, made))
        for expanded, backend in ((False, "reference"), (True, "reference"), (True, "cpu"))
    ]
    size = np.abs(outputs[0]).max()
    assert np.abs(outputs[0]).max(-1).min() > 0.05 * size
    for other in outputs[1:]:
        assert np.abs(outputs[0] - other).max() <= (1e-5 if dtype == "float32" else 2e-2) * size


# --- gradients


@pytest.mark.slow
@pytest.mark.parametrize("form", ["absorbed", pytest.param("expanded", marks=pytest.mark.slow)])
def test_a_dead_row_spoils_no_gradient(form: str) -> None:
    """A row of nothing but padding: finite loss and gradients, those of the live row alone."""
    config = tiny(num_hidden_layers=2, indexer_types=("full", "full"), mlp_layer_types=("dense", "sparse"))
    config = config.without_mtp()
    params, tokens = random_params(config), random_tokens(2, 12)
    policy = ABSORBED if form == "absorbed" else EXPANDED

    @quick_jit
    def gradients(tokens, mask):
        def loss(params):
            logits = transformer._forward.__wrapped__(params, config, tokens, mask, policy)
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0]
            return -jnp.sum(jnp.where(mask, chosen, 0.0))

        return jax.value_and_grad(loss)(params)

    mask = jnp.asarray([[True] * 12, [False] * 12])
    loss, got = gradients(tokens, mask)
    alone, expected = gradients(tokens[:1], mask[:1])
    assert np.isfinite(loss)
    np.testing.assert_allclose(loss, alone, rtol=1e-5)
    chex.assert_tree_all_finite(got)
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    for leaf, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, atol=1e-4 * max(1.0, np.abs(other).max()))
