"""Generation: equal to the reference's, whatever the batch, the chunk and the number of drafts."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax import forward
from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.cache.pages import gather_rows
from glm52_jax.config import ModelConfig
from glm52_jax.model import mtp
from glm52_jax.model.decoder_layer import ExecutionPolicy
from glm52_jax.model.transformer import extend
from infer.generate import LENGTH, STOP, Generation, generate
from infer.steps import StepProvider
from sharding.errors import InputError
from tests.model.cases import all_cases

PROMPT = [5, 9, 200, 31, 7, 7, 90, 14, 3, 77, 120, 8]  # longer than index_topk


def prompts_of(case: Any) -> list[list[int]]:
    return [row[real].tolist() for row, real in zip(case.tokens, case.real, strict=True)]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "drafts", "chunk"),
    [
        ("released_plan", 0, 7),
        ("released_plan", 3, 16),
        pytest.param("released_plan", 1, 512, marks=pytest.mark.slow),
        pytest.param("released_plan", 7, 512, marks=pytest.mark.slow),
        ("irregular_plan", 2, 512),
        ("fp8", 0, 512),
        pytest.param("all_full", 0, 512, marks=pytest.mark.slow),
        pytest.param("grouped_bias", 0, 512, marks=pytest.mark.slow),
        ("left_padded", 0, 512),
    ],
)
def test_greedy_tokens_are_the_references(name: str, drafts: int, chunk: int) -> None:
    """Token-exact across the `index_topk` line, for prompts of different lengths, for any drafts."""
    case = all_cases()[name]
    params = case.params("float32")
    found = generate(
        params, case.config, prompts_of(case), case.golden["greedy"].shape[1], 0.0, drafts, chunk=chunk, stop_ids=()
    )
    assert found == case.golden["greedy"].tolist()


@pytest.mark.slow
def test_drafts_that_are_always_wrong_only_cost_time(config: ModelConfig, params: dict[str, Any]) -> None:
    wrong = params | {"mtp": params["mtp"] | {"head": -params["head"]}}
    plain = generate(params, config, [PROMPT], 20, stop_ids=())
    generation = Generation(wrong, config, [PROMPT], 20, draft_tokens=3, stop_ids=())
    assert [t for _, tokens in generation for t in tokens] == plain[0]
    assert sum(generation.stats.accepted) <= 2
    assert generation.reasons == [LENGTH]


@pytest.mark.slow
def test_a_request_does_not_depend_on_its_neighbours(config: ModelConfig, params: dict[str, Any]) -> None:
    """Alone, in a batch, in another slot. (Greedy ones: `left_padded` above.)"""
    others = [[1, 2, 3], [250] * 15]
    alone = generate(params, config, [PROMPT], 12, 1.0, seed=[11], stop_ids=())[0]
    for rows in ([*others, PROMPT], [PROMPT, *others]):
        batch = generate(params, config, rows, 12, 1.0, seed=[11, 11, 11], stop_ids=())
        assert batch[rows.index(PROMPT)] == alone
    assert generate(params, config, [PROMPT], 12, 1.0, seed=[11], stop_ids=())[0] == alone


def test_seeds_differ_by_row_and_repeat(config: ModelConfig, params: dict[str, Any]) -> None:
    """Prompt i is sampled with seed + i."""
    texts = generate(params, config, [PROMPT] * 3, 12, 1.0, seed=7, stop_ids=())
    assert len({tuple(t) for t in texts}) == 3
    assert generate(params, config, [PROMPT] * 3, 12, 1.0, seed=6, stop_ids=())[1:] == texts[:2]


def test_stop_ids_end_a_text_and_are_not_part_of_it(config: ModelConfig, params: dict[str, Any]) -> None:
    """Any id of the list; the other rows go on to their last token."""
    free = generate(params, config, [PROMPT, PROMPT[:5]], 16, stop_ids=())
    place, stop = next((i, t) for i, t in enumerate(free[0]) if i >= 3 and t not in free[0][:i])
    for drafts in (0, 3):
        generation = Generation(params, config, [PROMPT, PROMPT[:5]], 16, draft_tokens=drafts, stop_ids=(999, stop))
        texts: list[list[int]] = [[], []]
        for row, tokens in generation:
            texts[row] += tokens
        assert texts[0] == free[0][:place]
        assert generation.reasons[0] == STOP
        cut = free[1].index(stop) if stop in free[1] else 16
        assert texts[1] == free[1][:cut]
    assert generate(params, config, [PROMPT, PROMPT[:5]], 16, stop_ids=None)[0] == free[0]  # no id of the config's


def test_the_configs_own_ids_stop_too(config: ModelConfig, params: dict[str, Any]) -> None:
    generation = Generation(params, config, [PROMPT], 16)
    assert generation.stop_ids == {256, 263, 265}


def test_no_more_tokens_than_asked_for(config: ModelConfig, params: dict[str, Any]) -> None:
    """Accepted drafts do not overrun."""
    for new in (0, 1, 2, 5):
        for drafts in (0, 3):
            assert len(generate(params, config, [PROMPT], new, draft_tokens=drafts, stop_ids=())[0]) == new
    assert generate(params, config, [], 3) == []


@pytest.mark.slow
def test_every_length_around_a_page(config: ModelConfig, params: dict[str, Any]) -> None:
    """Prompts of a page less one, a page, one more; the next token is that of a run over the whole text."""
    text = np.random.default_rng(0).integers(0, 250, 66).tolist()
    lengths = [1, 7, 8, 9, 63, 64, 65]
    found = generate(params, config, [text[:n] for n in lengths], 2, stop_ids=())
    tokens = np.full((len(lengths), 67), 0, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, n in enumerate(lengths):
        tokens[row, : n + 1] = [*text[:n], found[row][0]]
        mask[row, : n + 1] = True
    logits = np.asarray(forward(params, config, tokens, mask))
    for row, n in enumerate(lengths):
        assert found[row] == logits[row, [n - 1, n]].argmax(-1).tolist()


def test_nothing_is_compiled_again_and_the_state_is_donated(config: ModelConfig, params: dict[str, Any]) -> None:
    provider = StepProvider.of(params, config, batch=2, capacity=40, chunk=16, draft_tokens=2)
    prompt = np.array([PROMPT + [-1] * 4] * 2, np.int32)
    positions = np.where(prompt >= 0, np.arange(16, dtype=np.int32), -1).astype(np.int32)
    last = np.full(2, len(PROMPT) - 1, np.int32)
    following = np.roll(prompt, -1, 1)
    state, _ = provider.prefill(params)(params, provider.state(), prompt, positions, following, last, None)
    verify = provider.verify(params)
    for _ in range(4):
        before = state
        state, _, _ = verify(params, state, np.ones(2, bool), None)
        assert before.cache.latent.is_deleted()
    assert verify.jitted._cache_size() == 1
    same = StepProvider.of(params, config, batch=2, capacity=40, chunk=16, draft_tokens=2)
    assert same.verify(params).jitted is verify.jitted


def test_a_step_is_its_own_description(config: ModelConfig, params: dict[str, Any]) -> None:
    """The abstract arguments of a step are those that it is called with: a planner compiles from them alone."""
    provider = StepProvider.of(jax.eval_shape(lambda: params), config, batch=2, capacity=64, chunk=16, draft_tokens=1)
    for step in (provider.prefill(params), provider.decode(params), provider.verify(params)):
        assert len(step.arguments) == len(step.names)
        assert step.names[:2] == ("params", "state")
        out = jax.eval_shape(step.function, *step.arguments)
        chex.assert_trees_all_equal_shapes_and_dtypes(out[0], step.arguments[1])


@pytest.mark.slow
def test_the_draft_layers_cache_has_no_holes(config: ModelConfig, params: dict[str, Any]) -> None:
    """After some rounds the MTP layer's rows are those of one run over all verified tokens."""
    drafts, capacity = 3, 64
    provider = StepProvider.of(params, config, batch=1, capacity=capacity, chunk=16, draft_tokens=drafts)
    prompt = np.array([PROMPT + [-1] * 5], np.int32)
    columns = np.arange(16, dtype=np.int32)
    positions = np.where(columns < len(PROMPT), columns, -1)[None].astype(np.int32)
    last = np.array([len(PROMPT) - 1], np.int32)
    state, first = provider.prefill(params)(
        params, provider.state(), prompt[:, :16], positions, prompt[:, 1:], last, None
    )
    verified = [*PROMPT, int(first[0])]
    for _ in range(4):
        state, tokens, accepted = provider.verify(params)(params, state, np.ones(1, bool), None)
        verified += np.asarray(tokens)[0, : int(accepted[0]) + 1].tolist()
    # The last round's tokens are in the window still; the MTP layer has seen those before.
    seen = len(verified) - 1 - int(np.sum(np.asarray(state.window.positions) >= 0))
    cache = PagedCache.create(config, 1, capacity, dtype=jnp.float32)
    tokens, where = jnp.array([verified[:-1]]), jnp.arange(len(verified) - 1)[None]
    forms = ExecutionPolicy("absorbed", "indices", "reference")
    hidden, cache, _ = extend(params, config, tokens, where, cache, forms)
    _, cache, _ = mtp.mtp_layer(params, config, hidden, jnp.array([verified[1:]]), where, cache, forms)
    for name in ("latent", "index_keys"):
        mine, whole = getattr(state.cache, name), getattr(cache, name)
        rows = [
            gather_rows(x, x.shape[0] - 1, c.page_table, where[:, :seen])
            for x, c in ((mine, state.cache), (whole, cache))
        ]
        np.testing.assert_allclose(*rows, atol=2e-5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompts": [[]]}, "prompt 1 is empty, expected at least one token"),
        ({"prompts": [[1], [320]]}, "prompt 2 holds 320 as a token, but the vocabulary has 320 tokens"),
        ({"prompts": [[1.5]]}, "prompt 1 holds 1.5 as a token"),
        ({"prompts": "text"}, "prompts holds text or single numbers"),
        ({"prompts": [1, 2]}, "prompts holds text or single numbers"),
        ({"max_new_tokens": 5000}, "more than the 4096 positions of the model (max_position_embeddings)"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1, expected an integer of at least 0"),
        ({"draft_tokens": 8}, "draft_tokens is 8, expected an integer from 0 to 7"),
        ({"temperature": -1.0}, "temperature is -1.0, expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1, expected an integer from 0 to 2147483647"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer from 0 to 2147483647"),
        ({"top_p": 0.0}, "top_p is 0.0, expected a number above 0 and at most 1"),
        ({"seed": [1, 2]}, "seed has 2 entries for 1 prompts"),
        ({"seed": -1}, "seed is -1, expected an integer from 0"),
        ({"chunk": 0}, "chunk is 0, expected an integer of at least 1"),
        ({"prompts": None}, "prompts holds text or single numbers"),
        ({"prompts": {"a": [1]}}, "prompts holds text or single numbers"),
        ({"prompts": [b"text"]}, "prompts holds text or single numbers"),
        ({"prompts": np.ones((1, 2, 2), int)}, "prompts is an array of another shape"),
        ({"prompts": [{1, 2}]}, "prompt 1 is {1, 2}, expected a list of token ids"),
        ({"prompts": [np.ones((2, 2), int)]}, "prompt 1 has shape (2, 2) and dtype int64"),
        ({"prompts": [np.array([1.0])]}, "prompt 1 has shape (1,) and dtype float64"),
        ({"prompts": [np.array([True])]}, "prompt 1 has shape (1,) and dtype bool"),
        ({"prompts": [[True]]}, "prompt 1 holds True as a token"),
        ({"prompts": [[2**32 + 7]]}, "prompt 1 holds 4294967303 as a token"),
        ({"prompts": [[-3]]}, "prompt 1 holds -3 as a token"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0, expected an integer"),
        ({"max_new_tokens": True}, "max_new_tokens is True, expected an integer"),
        ({"max_new_tokens": "2"}, "max_new_tokens is '2', expected an integer"),
        ({"max_new_tokens": None}, "max_new_tokens is None, expected an integer"),
        ({"draft_tokens": 1.0}, "draft_tokens is 1.0, expected an integer"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"temperature": None}, "temperature is None, expected a number"),
        ({"top_p": [0.5]}, "top_p is [0.5], expected a number"),
        ({"seed": 1.5}, "seed is 1.5, expected an integer"),
        ({"seed": True}, "seed is True, expected an integer"),
        ({"seed": 2**32}, "seed is 4294967296, expected an integer from 0 to 4294967295"),
        ({"seed": ["1"]}, "a number of seed is '1', expected an integer"),
        ({"stop_ids": 5}, "stop_ids is 5, expected a list"),
        ({"stop_ids": "5"}, "stop_ids is '5', expected a list"),
        ({"stop_ids": [2.0]}, "an id of stop_ids is 2.0, expected an integer"),
        ({"chunk": 16.0}, "chunk is 16.0, expected an integer"),
        ({"backend": "gpu"}, "kernels: 'gpu' is not one of reference, cpu"),
    ],
)
def test_wrong_requests_are_refused_in_a_sentence(
    config: ModelConfig, params: dict[str, Any], arguments: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InputError) as error:
        generate(params, config, **({"prompts": [PROMPT], "max_new_tokens": 4} | arguments))
    assert sentence in str(error.value)


def test_integers_of_numpy_and_jax_are_integers(config: ModelConfig, params: dict[str, Any]) -> None:
    expected = generate(params, config, [PROMPT], 3, stop_ids=(), seed=5, draft_tokens=0)
    ids = np.array(PROMPT, np.uint16)
    for prompts in ([ids], ids[None], [list(ids)], [jnp.asarray(PROMPT)], jnp.asarray([PROMPT]), (tuple(PROMPT),)):
        found = generate(params, config, prompts, np.int64(3), stop_ids=(), seed=np.uint32(5), draft_tokens=np.int8(0))
        assert found == expected


def test_drafts_without_a_draft_layer_are_refused(config: ModelConfig, params: dict[str, Any]) -> None:
    """The model runs, speculation is refused."""
    trunk = config.without_mtp()
    stacks = jax.tree.map(lambda a: a[:-1], {k: params[k] for k in ("attention", "indexer", "moe")})
    bare = {k: v for k, v in params.items() if k != "mtp"} | stacks
    assert generate(bare, trunk, [PROMPT], 3, stop_ids=()) == generate(params, config, [PROMPT], 3, stop_ids=())
    with pytest.raises(InputError, match="no MTP layer to draft with"):
        generate(bare, trunk, [PROMPT], 3, draft_tokens=1)
