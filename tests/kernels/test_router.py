"""The router's choice: that of `lax.top_k`, ties and groups and padding included."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.kernels.router import tile_sizes
from glm52_jax.kernels.router.api import choose_experts
from glm52_jax.kernels.router.rule import RoutingRule
from tests.kernels.compiling import compiled


@functools.cache
def run(backend: str, rule: RoutingRule):
    return jax.jit(functools.partial(choose_experts, rule=rule, backend=backend))


@given(
    tokens=st.sampled_from([7, 130]),
    case=st.sampled_from(
        [
            (256, RoutingRule(8, scale=2.5)),
            (6, RoutingRule(6, normalise=False)),
            (16, RoutingRule(3, 4, 2)),
            (8, RoutingRule(5, 4, 2)),
        ]
    ),
    seed=st.integers(0, 99),
    values=st.sampled_from([1, 3, 1000]),
)
@settings(max_examples=12, deadline=None)
def test_any_logits(tokens: int, case: tuple[int, RoutingRule], seed: int, values: int) -> None:
    """Logits of few values have many ties; five of the four experts in two groups take one from outside."""
    count, rule = case
    generator = np.random.default_rng(seed)
    logits = (generator.integers(0, values, (tokens, count)) / values * 4 - 2).astype(np.float32)
    bias = (generator.integers(0, values, count) / values / 8).astype(np.float32)
    real = generator.random(tokens) > 0.2
    logits[~real] = generator.choice([np.nan, np.inf, -np.inf])
    # A token with a NaN has no experts, whether one score is NaN or all are; infinities have their places.
    wrong = real & (generator.random(tokens) < 0.2)
    logits[wrong, generator.integers(0, count)] = np.nan
    logits[wrong & (generator.random(tokens) < 0.5)] = np.nan
    logits[~wrong & (generator.random(tokens) < 0.1), generator.integers(0, count)] = generator.choice(
        [np.inf, -np.inf]
    )
    expected = [np.asarray(part) for part in run("reference", rule)(logits, bias, real)]
    experts, gates, counts = (np.asarray(part) for part in run("interpret", rule)(logits, bias, real))
    np.testing.assert_array_equal(experts, expected[0])
    np.testing.assert_allclose(gates, expected[1], rtol=1e-6)
    np.testing.assert_array_equal(counts, expected[2])
    chosen = real & ~wrong
    assert counts.sum() == chosen.sum() * rule.k
    assert (experts[~chosen] == -1).all()
    assert (experts[chosen] >= 0).all()
    assert not gates[~chosen].any()
    assert np.isfinite(gates).all()


def test_a_bias_of_nan_is_no_choice_either() -> None:
    bias = np.zeros(16, np.float32)
    bias[3] = np.nan
    for backend in ("reference", "interpret"):
        experts, gates, counts = run(backend, RoutingRule(3, 4, 2))(
            np.zeros((5, 16), np.float32), bias, np.ones(5, bool)
        )
        assert (np.asarray(experts) == -1).all()
        assert not np.asarray(gates).any()
        assert not np.asarray(counts).any()


def test_no_races(racing: str) -> None:
    logits = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32)
    bias, real, rule = np.zeros(16, np.float32), np.ones(300, bool), RoutingRule(3)
    got = choose_experts(logits, bias, real, rule, backend=f"{racing}:v5p")
    for ours, other in zip(got, run("reference", rule)(logits, bias, real), strict=True):
        np.testing.assert_allclose(ours, other, rtol=1e-6)


@pytest.mark.parametrize(("chip", "tokens"), [("v5e", 8), ("v5p", 4096), ("v6e", 64), ("tpu7x", 1)])
def test_compiles(chip: str, tokens: int) -> None:
    make = jax.ShapeDtypeStruct
    operands = make((tokens, 256), jnp.float32), make((256,), jnp.float32), make((tokens,), jnp.bool_)
    rule = RoutingRule(8, scale=2.5)
    step = compiled(functools.partial(choose_experts, rule=rule, backend=f"tpu:{chip}"), operands, chip)
    assert any("choose_experts" in kernel.name for kernel in step.program.kernels)
    assert step.memory.temporaries < 10 * 2**20


def test_cost() -> None:
    cost = tile_sizes.cost(64, 256, 8)
    assert cost.bytes_accessed == pytest.approx(64 * 256 * 4, rel=0.12)
    assert cost.transcendentals == 64 * 256
