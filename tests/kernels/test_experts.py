"""Routed experts: every form gives the plain sum, whichever experts are chosen, empty, or full of padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from glm52_jax.kernels import PORTABLE
from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.kernels.experts.cpu import sort_by_expert
from glm52_jax.kernels.lib.prefix import over_prefix
from glm52_jax.params.quantization import BlockQuantized, dequantize_blocks, quantize_blocks

LAYERS, EXPERTS, EMBED, INNER, K = 2, 5, 6, 4, 2
GENERATOR = np.random.default_rng(3)
GATE_UP = GENERATOR.standard_normal((LAYERS, EXPERTS, 2, INNER, EMBED)).astype(np.float32)
DOWN = GENERATOR.standard_normal((LAYERS, EXPERTS, EMBED, INNER)).astype(np.float32)
RUN = {b: jax.jit(lambda *a, b=b: routed_experts(*a, backend=b)) for b in PORTABLE}


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order() -> None:
    """Each test draws its own numbers from the start, whichever tests ran before it in this process."""
    GENERATOR.bit_generator.state = np.random.default_rng(3).bit_generator.state


def plain(x, experts, gates, gate_up=GATE_UP, down=DOWN, layer: int = 1) -> np.ndarray:
    out = np.zeros(x.shape, np.float64)
    for token, place in np.argwhere(experts >= 0):
        gate, up = gate_up[layer, experts[token, place]].astype(np.float64) @ x[token]
        hidden = gate / (1 + np.exp(-gate)) * up
        out[token] += gates[token, place] * (down[layer, experts[token, place]] @ hidden)
    return out


@st.composite
def assignments(draw: st.DrawFn) -> np.ndarray:
    """Distinct experts for each token, often of a few experts only; some tokens are padding."""
    tokens = draw(st.sampled_from([1, 7, 40]))
    usable = draw(st.sampled_from([2, 3, EXPERTS]))
    first = draw(arrays(np.int32, tokens, elements=st.integers(0, usable - 1)))
    step = draw(arrays(np.int32, tokens, elements=st.integers(1, usable - 1)))
    experts = np.stack([first, (first + step) % usable], -1).astype(np.int32)
    experts[draw(arrays(np.bool_, tokens, elements=st.booleans()))] = -1
    return experts


@pytest.mark.parametrize("backend", PORTABLE)
@given(experts=assignments())
@settings(max_examples=40, deadline=None)
def test_any_assignment(backend: str, experts: np.ndarray) -> None:
    generator = np.random.default_rng(len(experts))
    x = generator.standard_normal((len(experts), EMBED)).astype(np.float32)
    gates = np.where(experts >= 0, generator.random(experts.shape), 0).astype(np.float32)
    expected = plain(x, experts, gates)
    x[experts[:, 0] < 0] = np.nan  # what padding holds must not matter
    got = RUN[backend](x, experts, gates, GATE_UP, DOWN, 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("backend", PORTABLE)
@pytest.mark.parametrize("case", ["one expert", "all padding", "long"])
def test_extremes(backend: str, case: str) -> None:
    tokens = 700 if case == "long" else 9
    experts = np.stack([np.arange(tokens) % 3, 3 + np.arange(tokens) % 2], -1).astype(np.int32)
    if case == "one expert":
        experts[:] = (4, 0)
    if case == "all padding":
        experts[:] = -1
    x = GENERATOR.standard_normal((tokens, EMBED)).astype(np.float32)
    gates = np.where(experts >= 0, 0.5, 0).astype(np.float32)
    np.testing.assert_allclose(RUN[backend](x, experts, gates, GATE_UP, DOWN, 1), plain(x, experts, gates), atol=1e-4)


@pytest.mark.parametrize("backend", PORTABLE)
def test_a_token_does_not_depend_on_the_others(backend: str) -> None:
    x = GENERATOR.standard_normal((12, EMBED)).astype(np.float32)
    experts, gates = np.tile(np.array([[1, 3]], np.int32), (12, 1)), np.full((12, 2), 0.5, np.float32)
    together = RUN[backend](x, experts, gates, GATE_UP, DOWN, 0)
    experts[3:], gates[3:] = -1, 0
    np.testing.assert_allclose(
        RUN[backend](x, experts, gates, GATE_UP, DOWN, 0)[:3], together[:3], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("backend", PORTABLE)
def test_fp8_weights(backend: str) -> None:
    """Blocks that are cut at the edge, dequantised an expert at a time."""
    block = (3, 4)

    def quantised(weights: np.ndarray) -> tuple[BlockQuantized, np.ndarray]:
        lead = weights.shape[:-2]
        pairs = [quantize_blocks(w, block) for w in weights.reshape(-1, *weights.shape[-2:])]
        codes, scales = (np.stack(part) for part in zip(*pairs, strict=True))
        codes, scales = codes.reshape(weights.shape), scales.reshape(*lead, *scales.shape[-2:])
        held = BlockQuantized(jnp.asarray(codes), jnp.asarray(scales), logical_shape=weights.shape[-2:], block=block)
        return held, dequantize_blocks(codes, scales, block)

    (gate_up, plain_gate_up), (down, plain_down) = quantised(GATE_UP), quantised(DOWN)
    x = GENERATOR.standard_normal((10, EMBED)).astype(np.float32)
    experts = np.stack([np.arange(10) % 2, 2 + np.arange(10) % 3], -1).astype(np.int32)
    gates = GENERATOR.random((10, 2)).astype(np.float32)
    got = RUN[backend](x, experts, gates, gate_up, down, 1)
    np.testing.assert_allclose(got, plain(x, experts, gates, plain_gate_up, plain_down), atol=1e-4)


@given(arrays(np.int32, st.sampled_from([1, 9, 30]), elements=st.integers(-1, EXPERTS - 1)))
@settings(max_examples=60, deadline=None)
def test_sorting_by_expert(experts: np.ndarray) -> None:
    order, starts, counts = (np.asarray(a) for a in sort_by_expert(jnp.asarray(experts), EXPERTS))
    key = np.where(experts < 0, EXPERTS, experts)
    np.testing.assert_array_equal(order, np.argsort(key, kind="stable"))
    np.testing.assert_array_equal(counts, [(experts == e).sum() for e in range(EXPERTS)])
    for e in range(EXPERTS):
        assert (experts[order[starts[e] : starts[e] + counts[e]]] == e).all()


@given(capacity=st.integers(1, 40), smallest=st.integers(1, 16), data=st.data())
@settings(max_examples=100, deadline=None)
def test_the_part_that_is_worked_on(capacity: int, smallest: int, data: st.DataObject) -> None:
    """It holds the last number needed, and never goes past the room."""
    last = data.draw(st.integers(-1, capacity - 1))
    length = int(over_prefix(jnp.int32(last), capacity, smallest, lambda length: jnp.int32(length)))
    assert last < length <= capacity
    assert length <= max(last, 0) + max(smallest, -(-capacity // 8))
