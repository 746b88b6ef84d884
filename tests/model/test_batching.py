"""A request's results depend on its own tokens alone: not on ties, chunks, pages, padding, neighbours or the past.

The faults that these tests would catch are listed in docs/known_faults.md.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm52_jax as glm
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.config import load_config
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.lib.layers import Rotary, rms_norm
from glm52_jax.kernels.lib.stacks import layer_of
from glm52_jax.model import attention, indexer
from tests.model.cases import FORMS, Case, Run, check
from tests.model.paths import Walk
from tests.model.tiny import ABSORBED, EXPANDED, TINY, random_params, random_tokens, tiny, tiny_case

DECODE, CHUNK = FORMS["absorbed-indices-cpu"], FORMS["expanded-mask-cpu"]
TRUNK = tiny(num_nextn_predict_layers=0)  # compiles in half the time
TIED = tiny(num_nextn_predict_layers=0, index_n_heads=4)


@pytest.fixture(scope="module")
def three() -> Case:
    """Rows of 25, 14 and 3 tokens."""
    return tiny_case(TINY, (25, 14, 3))


@pytest.fixture(scope="module")
def even() -> Case:
    """Three rows of 25 tokens."""
    return tiny_case(TINY, (25, 25, 25), seed=3)


@pytest.fixture(scope="module")
def tied() -> Case:
    case = tiny_case(TIED, (30,), form=ABSORBED)
    assert _zero_scores(case) > 20
    return case


# --- ties


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
def test_ties_fall_the_same_way_everywhere(tied: Case, form: str) -> None:
    """With few index heads one key in sixteen or so scores exactly zero."""
    trace = glm.trace(tied.params(), TIED, tied.tokens, policy=FORMS[form])
    np.testing.assert_array_equal(trace.topk, tied.golden["topk"])
    size = {"absorbed-indices-cpu": 1, "expanded-mask-cpu": 7}.get(form)
    if size:
        check(tied, Walk(tied, tied.spoiled_params(), page_size=5).run(size, FORMS[form]).seen)


def _zero_scores(case: Case) -> int:
    """How many of layer 0's scores are exactly zero, among those that a query may see."""
    config, params = case.config, case.params()
    weights, own = layer_of(params["attention"], 0), layer_of(params["indexer"], 0)
    length = case.tokens.shape[1]
    places = jnp.arange(length, dtype=jnp.int32)[None]
    rotary = Rotary.at(places, config.qk_rope_head_dim, config.rope_theta)
    x = rms_norm(params["embed"][case.tokens], weights["input_norm"], config.rms_norm_eps)
    queries = indexer.index_queries(own, config, attention.project(weights, config, x, rotary).q_latent, rotary)
    keys = indexer.index_keys(own, config, x, rotary)[:, None]
    heads = indexer.head_weights(own, config, x)
    scores = index_scores(queries, heads, keys, 0, jnp.zeros((1, 1), jnp.int32), places, backend="reference")
    return int((scores == 0).sum())


@pytest.mark.quick(2)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_but_ties(form: str) -> None:
    """With index queries of zero, every score is a zero of either sign, and the lowest positions are taken."""
    params = random_params(TIED)
    params = params | {"indexer": params["indexer"] | {"q_b": jnp.zeros_like(params["indexer"]["q_b"])}}
    topk = glm.trace(params, TIED, random_tokens(1, 30), policy=FORMS[form]).topk
    expected = np.where(np.arange(8) <= np.arange(30)[:, None], np.arange(8), -1)
    assert (np.asarray(topk) == expected).all()


# --- the cache's slots, pages and chunks


@pytest.mark.quick(1)
def test_unwritten_slots_do_not_matter(three: Case) -> None:
    """NaN, infinity or zero in slots that were never written: the same bits."""
    runs = [Walk(three, three.params(), page_size=5, fill=fill).run(1, DECODE) for fill in (np.nan, 0.0, np.inf)]
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0].logits, other.logits)
        np.testing.assert_array_equal(runs[0].topk, other.topk)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "lengths"),
    [
        ("absorbed-indices-cpu", (1, 8, 9)),
        pytest.param("expanded-mask-reference", (1, 7, 8, 9), marks=pytest.mark.slow),
    ],
)
def test_short_texts_are_dense(form: str, lengths: tuple[int, ...]) -> None:
    """Texts of up to `index_topk` tokens run, and equal dense attention; one more token drops one."""
    tokens = random_tokens(1, 9)
    dense = np.asarray(glm.trace(random_params(TRUNK), tiny(index_topk=64), tokens, policy=FORMS[form]).logits)
    for length in lengths:
        trace = glm.trace(random_params(TRUNK), TRUNK, tokens[:, :length], policy=FORMS[form])
        gap = np.abs(np.asarray(trace.logits) - dense[:, :length]).max(-1)[0]
        assert (gap[:8] < 1e-4).all()
        assert (np.asarray(trace.topk) >= 0).sum() == sum(min(i + 1, 8) for i in range(length)) * len(trace.topk)
        if length == 9:
            assert gap[8] > 1e-3


def test_a_single_token_has_no_draft() -> None:
    """No token has a successor in a text of one."""
    trace = glm.trace(random_params(), TINY, random_tokens(2, 1), policy=DECODE)
    assert trace.mtp_logits.shape == (2, 0, TINY.vocab_size)


def test_decode_across_the_limit(three: Case) -> None:
    """From 6 tokens on, one at a time, past the length at which tokens begin to be dropped."""
    walk = Walk(three, three.spoiled_params(), page_size=5)
    walk.run(7, DECODE, upto=np.minimum(three.lengths, 6))
    check(three, walk.run(1, DECODE).seen)


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [1, 8])
def test_lengths_at_the_edges_of_pages(size: int) -> None:
    """A page less one, a page, one more, two pages; the longest row fills the cache to its last slot."""
    case = tiny_case(TRUNK, (16, 15, 9, 8, 7))
    walk = Walk(case, case.spoiled_params(), page_size=8, room=0)
    assert walk.cache.capacity == 16
    check(case, walk.run(size, DECODE).seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [pytest.param(1, marks=pytest.mark.slow), 7, pytest.param(64, marks=pytest.mark.slow), 300]
)
def test_long_prompts_in_chunks(size: int) -> None:
    """300 tokens in chunks of any size."""
    case = _long()
    walk = Walk(case, case.spoiled_params(), page_size=64, room=0)
    for start in range(0, 300, size):
        walk.take(np.array([min(size, 300 - start)]), size, CHUNK if size > 1 else DECODE)
    check(case, walk.seen)


_LONG: list[Case] = []


def _long() -> Case:
    if not _LONG:
        _LONG.append(tiny_case(TRUNK, (300,)))
    return _LONG[0]


# --- padding


@pytest.mark.quick(1)
@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("form", ["absorbed-indices-cpu", "expanded-mask-cpu"])
def test_padded_rows_equal_single_runs(side: str, form: str) -> None:
    """Rows of 3, 12 and 25 tokens in one batch; the padding is a token that is also used for real."""
    texts = [random_tokens(1, n, seed=n)[0] for n in (3, 12, 25)]
    width = 30
    tokens, mask = np.full((3, width), texts[0][0]), np.zeros((3, width), bool)
    starts = {"left": [width - len(t) for t in texts], "right": [0, 0, 0], "both": [9, 2, 4]}[side]
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        tokens[row, start : start + len(text)], mask[row, start : start + len(text)] = text, True
    batch = Run.of(glm.trace(random_params(TRUNK), TRUNK, tokens, mask, policy=FORMS[form]))
    padded = np.stack([np.pad(t, (0, 25 - len(t))) for t in texts])
    for row, (text, start) in enumerate(zip(texts, starts, strict=True)):
        alone = Run.of(
            glm.trace(
                random_params(TRUNK), TRUNK, padded[row : row + 1], np.arange(25)[None] < len(text), policy=FORMS[form]
            )
        )
        here = slice(start, start + len(text))
        np.testing.assert_allclose(batch.logits[row, here], alone.logits[0, : len(text)], atol=1e-4)
        shifted = np.where(alone.topk < 0, -1, alone.topk + start)[:, 0, : len(text)]
        np.testing.assert_array_equal(batch.topk[:, row, here], shifted)
        assert (batch.topk[:, row][:, ~mask[row]] == -1).all()


@pytest.mark.slow
def test_unequal_counts(three: Case) -> None:
    """1, 2 and 3 tokens of three rows in one step, 6 over three rows as 3, 3 and 0, and so on."""
    walk = Walk(three, three.spoiled_params(), page_size=5)
    for counts in ([1, 2, 3], [3, 3, 0], [0, 3, 0], [3, 0, 0], [0, 0, 0], [2, 1, 0]):
        walk.take(np.array(counts), 3, DECODE)
    left = three.lengths - walk.done
    while left.any():
        walk.take(np.minimum(left, 3), 3, DECODE)
        left = three.lengths - walk.done
    check(three, walk.seen)


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_padding_is_not_routed(backend: str) -> None:
    """5 real tokens among 64: counts sum to theirs, whatever the padding is and however much there is."""
    form = FORMS[f"expanded-mask-{backend}"]
    text, params = random_tokens(1, 5), random_params(TRUNK)
    spoiled = params | {"embed": params["embed"].at[TRUNK.vocab_size - 1].set(jnp.nan)}
    clean = Run.of(glm.trace(params, TRUNK, text, policy=form))
    for width, tree in ((64, spoiled), (64, params)):
        tokens = np.full((1, width), TRUNK.vocab_size - 1)
        tokens[:, :5] = text
        run = Run.of(glm.trace(tree, TRUNK, tokens, np.arange(width)[None] < 5, policy=form))
        assert (run.experts >= 0).sum() == 5 * TRUNK.num_experts_per_tok * len(run.experts)
        np.testing.assert_allclose(run.logits[:, :5], clean.logits, atol=1e-5)
        np.testing.assert_array_equal(run.experts[:, :5], clean.experts)


# --- neighbours and the past


def test_neighbours_do_not_matter(three: Case) -> None:
    """The same text alone, beside others, in another place of the batch; repeats give the same bits."""
    text = random_tokens(1, 20, seed=5)
    alone = [Run.of(glm.trace(random_params(TRUNK), TRUNK, text, policy=DECODE)) for _ in range(3)]
    for repeat in alone[1:]:
        np.testing.assert_array_equal(alone[0].logits, repeat.logits)
    others = random_tokens(3, 20, seed=6)
    for place in (0, 3):
        batch = np.insert(others, place, text, axis=0)
        run = Run.of(glm.trace(random_params(TRUNK), TRUNK, batch, policy=DECODE))
        np.testing.assert_allclose(run.logits[place], alone[0].logits[0], atol=2e-5)
        np.testing.assert_array_equal(run.topk[:, place], alone[0].topk[:, 0])


# Where the rows of the batch are, in what a walk collects.
ROWS = {"logits": 0, "mtp_logits": 0, "mtp_topk": 0, "hidden": 1, "topk": 1, "experts": 1}


def restarted(walk: Walk, case: Case, done: np.ndarray, cache: PagedCache | None = None) -> Walk:
    """A walk of `case` on the cache of another walk, with the first `done` tokens of each row taken for written."""
    again = Walk(case, case.spoiled_params(), page_size=5)
    again.cache, again.done = cache or walk.cache, done
    for name in ROWS:
        getattr(again, name)[:] = getattr(walk, name)[:]  # what is not run again is not judged again
    return again


def other_ending(case: Case, keep: np.ndarray) -> Case:
    """The same rows with other tokens after the first `keep` of each."""
    tokens = np.array(case.tokens)
    for row, kept in enumerate(keep):
        changed = slice(case.first[row] + kept, None)
        tokens[row, changed] = (tokens[row, changed] + 1) % (TINY.vocab_size - 1)
    return tiny_case(TINY, tuple(case.lengths.tolist()), tokens=tokens)


def test_a_second_prompt_in_the_same_slots(three: Case) -> None:
    """Nothing of the first text is left, index keys included."""
    walk = Walk(three, three.spoiled_params(), page_size=5).run(7, DECODE)
    second = other_ending(three, np.zeros(3, int))
    check(second, restarted(walk, second, np.zeros(3, int)).run(7, DECODE).seen)


def test_cut_back_and_continued(three: Case) -> None:
    """A text cut back to 10 tokens goes on in another way.

    The draft layer's row at a token depends on the token after it, so that the last one that is kept is run again.
    """
    walk = Walk(three, three.spoiled_params(), page_size=5).run(7, DECODE)
    keep = np.minimum(three.lengths, 10)
    other = other_ending(three, keep)
    check(other, restarted(walk, other, keep - 1).run(7, DECODE).seen)


def test_rows_change_places(even: Case) -> None:
    """Rows are reordered by their page tables alone, half-way."""
    walk = Walk(even, even.spoiled_params(), page_size=5).run(7, DECODE, upto=np.array([11, 11, 11]))
    order = np.array([2, 0, 1])
    turned = tiny_case(TINY, (25, 25, 25), tokens=even.tokens[order])
    cache = dataclasses.replace(walk.cache, page_table=walk.cache.page_table[order])
    for name, row in ROWS.items():
        array = getattr(walk, name)
        array[:] = np.take(array, order, axis=row)
    check(turned, restarted(walk, turned, walk.done, cache).run(7, DECODE).seen)


def test_a_row_is_duplicated(even: Case) -> None:
    """Two answers to one prompt of 12: full pages are shared, the one that is begun is copied, in both stacks."""
    tokens = np.array(even.tokens)
    tokens[1, :12] = tokens[0, :12]
    case = tiny_case(TINY, (25, 25, 25), tokens=tokens)
    walk = Walk(case, case.spoiled_params(), page_size=5)
    walk.take(np.array([7, 0, 7]), 7, DECODE)
    walk.take(np.array([5, 0, 5]), 7, DECODE)
    table = np.array(walk.cache.page_table)
    table[1, :2] = table[0, :2]
    copied = [stack.at[:, table[1, 2]].set(stack[:, table[0, 2]]) for stack in walk.stacks()]
    walk.cache = PagedCache(*copied, jnp.asarray(table))
    for name, row in ROWS.items():
        array = np.moveaxis(getattr(walk, name), row, 0)
        array[1, :12] = array[0, :12]
    walk.done = np.array([12, 11, 12])  # the draft layer's last row depends on the token after it
    check(case, walk.run(7, DECODE).seen)


def test_no_holes_after_drafts(even: Case) -> None:
    """Drafts reuse a selection and leave rows behind; the pass that verifies them writes every index key."""
    walk = Walk(even, even.spoiled_params(), page_size=5)
    walk.run(7, DECODE, upto=np.array([14, 13, 12]))
    walk.draft(DECODE, 4, width=7, counts=np.array([3, 2, 1]))
    check(even, walk.run(7, DECODE).seen)
    fresh = Walk(even, even.spoiled_params(), page_size=5).run(7, DECODE)
    for mine, other in zip(walk.stacks(), fresh.stacks(), strict=True):
        mine, other = (np.asarray(a)[:, np.asarray(fresh.cache.page_table)] for a in (mine, other))
        mine, other = (a.reshape(len(a), 3, -1, a.shape[-1])[:, :, :25] for a in (mine, other))
        np.testing.assert_allclose(mine, other, atol=1e-5)


# --- bytes


def test_bytes_of_the_cache() -> None:
    """The released model keeps 576 values a token and layer, and index keys in its 22 indexers only."""
    config = load_config("glm-5.2")
    cache = jax.eval_shape(lambda: PagedCache.create(config, 1, 6400, dtype=jnp.bfloat16))
    assert cache.latent.shape == (79, 100, 64, 512 + 64)
    assert cache.index_keys.shape == (22, 100, 64, 128)
    values = (cache.latent.size + cache.index_keys.size) / 6400
    assert values == 79 * 576 + 22 * 128
    assert (
        jax.eval_shape(lambda: PagedCache.create(config.without_mtp(), 1, 64, dtype=jnp.bfloat16)).index_keys.shape[0]
        == 21
    )


def test_shared_layers_stay_sparse() -> None:
    """A layer without index keys of its own drops tokens all the same."""
    topk = glm.trace(random_params(TRUNK), TRUNK, random_tokens(1, 25), policy=EXPANDED).topk
    for number, kind in enumerate(TRUNK.indexer_types):
        assert ((np.asarray(topk[number]) >= 0).sum(-1) == np.minimum(np.arange(25) + 1, 8)).all()
        assert kind == "full" or np.array_equal(topk[number], topk[number - 1])
