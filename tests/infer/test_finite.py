"""A weight that is NaN or infinite ends a generation with a sentence, wherever it is; what does not count does not."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.cache.cache_format import CACHE_FORMATS
from glm52_jax.config import ModelConfig
from glm52_jax.params.init import leaf_at
from infer.generate import Generation, generate
from infer.sampling import Sampling
from infer.speculative import accept
from infer.steps import StepProvider
from sharding.errors import InputError

PROMPTS = [[5, 3, 8, 200, 17, 90, 4, 31, 77, 6, 12, 40], [9, 8, 7]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "drafts": {"draft_tokens": 3},
    "sampled drafts": {"draft_tokens": 3, "temperature": 1.0},
    "FP8 cache": {"cache_format": CACHE_FORMATS["fp8"]},
}


def spoiled(params: dict[str, Any], path: str, index: tuple[Any, ...], value: float) -> dict[str, Any]:
    """The parameters with one value at a path changed."""
    leaf = leaf_at(params, path).at[index].set(value)
    *parents, name = path.split(".")
    tree = params | {parent: dict(params[parent]) for parent in parents}
    (tree[parents[0]] if parents else tree)[name] = leaf
    return tree


def sentence(run: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as error:
        run()
    assert "\n" not in str(error.value)
    assert "glm52 verify" in str(error.value)
    return str(error.value)


@pytest.mark.quick(2)
@pytest.mark.parametrize(("way", "value"), [*((way, np.nan) for way in WAYS), ("greedy", np.inf)])
def test_a_weight_that_is_no_number_ends_the_text(
    config: ModelConfig, params: dict[str, Any], way: str, value: float
) -> None:
    broken = spoiled(params, "attention.o", (2, 7, 1, 3), value)
    said = sentence(lambda: generate(broken, config, PROMPTS, 8, stop_ids=(), **WAYS[way]))
    assert said.startswith("prompt 1: the model's output is NaN or infinite from position 0 on, in the prompt")


@pytest.mark.parametrize("way", ["greedy", "drafts"])
@pytest.mark.parametrize(
    ("path", "index", "where"),
    [
        ("embed", (17, 0), "prompt 1: the model's output is NaN or infinite from position "),
        ("embed", (7, 5), "prompt 2: the model's output is NaN or infinite from position "),
        ("head", (319, 0), "prompt 1: the model's output is NaN or infinite from position 11 on, in the prompt"),
        ("norm", (0,), "prompt 1: the model's output is NaN or infinite from position 0 on, in the prompt"),
        ("moe.router", (0, 3, 0), "parameter moe.router holds NaN or infinity in entry 0 of its 4 layers"),
        ("moe.router_bias", (3, 1), "parameter moe.router_bias holds NaN or infinity in entry 3 of its 4 layers"),
        ("indexer.k", (1, 0, 0), "parameter indexer.k holds NaN or infinity in entry 1 of its 4 layers"),
    ],
)
def test_it_says_where(
    config: ModelConfig, params: dict[str, Any], way: str, path: str, index: tuple[int, ...], where: str
) -> None:
    broken = spoiled(params, path, index, np.nan)
    assert sentence(lambda: generate(broken, config, PROMPTS, 8, stop_ids=(), **WAYS[way])).startswith(where)


@pytest.mark.quick(1)
@pytest.mark.parametrize("way", ["greedy", "drafts", "sampled drafts"])
def test_a_token_made_later_is_where_it_ends(config: ModelConfig, params: dict[str, Any], way: str) -> None:
    """Text before it comes; the same with drafts as without."""
    seeds = {"seed": 4} if "temperature" in WAYS[way] else {}
    free, other = generate(params, config, PROMPTS, 8, stop_ids=(), **WAYS[way], **seeds)
    known = {*PROMPTS[0], *PROMPTS[1], *other}
    place = next(i for i, token in enumerate(free) if i >= 2 and token not in {*known, *free[:i]})
    broken = spoiled(params, "embed", (free[place], 0), np.nan)
    generation = Generation(broken, config, PROMPTS, 8, stop_ids=(), **WAYS[way], **seeds)
    made: list[int] = []

    def run() -> None:
        for row, tokens in generation:
            made.extend(tokens if row == 0 else ())

    said = sentence(run)
    assert f"position {len(PROMPTS[0]) + place} on, after the prompt" in said or "MTP layer" in said
    assert made == free[: len(made)]


@pytest.mark.slow
def test_a_broken_draft_layer_is_not_only_slow(config: ModelConfig, params: dict[str, Any]) -> None:
    """Its drafts would be refused one after another, and the text would be right."""
    broken = spoiled(params, "mtp.norm", (3,), np.nan)
    assert len(generate(broken, config, PROMPTS, 4, stop_ids=())[0]) == 4
    for way in ("drafts", "sampled drafts"):
        said = sentence(lambda way=way: generate(broken, config, PROMPTS, 4, stop_ids=(), **WAYS[way]))
        assert said.startswith(
            "prompt 1: the MTP layer's output is NaN or infinite from position 12 on, after the prompt"
        )


def test_padding_and_ended_rows_do_not_count(config: ModelConfig, params: dict[str, Any]) -> None:
    """Unwritten slots of every cache, the tokens beside a short prompt, and rows that have ended may hold anything."""
    broken = spoiled(params, "embed", (0, 0), np.nan)  # what a padding token, -1, reads
    expected = generate(params, config, PROMPTS, 3, stop_ids=())
    assert 0 not in [token for text in expected for token in text]
    assert generate(broken, config, PROMPTS, 3, stop_ids=()) == expected
    for drafts in (0, 3):
        provider = StepProvider.of(params, config, batch=2, capacity=64, chunk=16, draft_tokens=drafts)
        state = jax.tree.map(
            lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a, provider.state()
        )
        tokens = np.array([p + [-1] * (16 - len(p)) for p in PROMPTS], np.int32)
        positions = np.where(tokens >= 0, np.arange(16, dtype=np.int32), -1).astype(np.int32)
        last, following = np.array([11, 2], np.int32), np.roll(tokens, -1, 1)
        state, first = provider.prefill(params)(params, state, tokens, positions, following, last, None)
        assert np.asarray(first).tolist() == [text[0] for text in expected]
        step = provider.verify(params) if drafts else provider.decode(params)
        state, made, *_ = step(params, state, np.array([True, False]), None)
        assert np.asarray(made).reshape(2, -1)[0, 0] == expected[0][1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_no_draft_stands_after_logits_that_are_no_numbers(value: float) -> None:
    """Greedy or sampled, the row that is wrong is the last that counts, and its token is the mark of its position."""
    logits = jnp.where(jax.nn.one_hot(jnp.array([[4, 2, 7, 1]] * 2), 8) > 0, 50.0, 0.0)
    logits = logits.at[1, 1, 0].set(value)
    drafts, position = jnp.array([[4, 2, 7]] * 2), jnp.array([10, 20])
    sampling = Sampling.of(2, 1.0, 1.0, [0, 1])
    for how, drawn_from in ((None, None), (sampling, jax.nn.one_hot(drafts, 8))):
        tokens, accepted = jax.jit(accept)(logits, drafts, drawn_from, how, position)
        assert accepted.tolist() == [3, 1]
        assert tokens[0].tolist() == [4, 2, 7, 1]
        assert tokens[1, :2].tolist() == [4, -1 - 20]
