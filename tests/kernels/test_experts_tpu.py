"""Experts' kernels for TPUs: the plain sum for any assignment, whatever padding holds, and the plain gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.kernels.experts import tile_sizes
from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.kernels.experts.groups import groups_of, rows_of
from glm52_jax.params.quantization import FLOAT8, BlockQuantized, dequantize_blocks, quantize_blocks
from tests.kernels.compiling import compiled

LAYERS, EXPERTS, K = 2, 5, 2
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")


@functools.cache
def stacks(width: int, embed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(width)
    shapes = (LAYERS, EXPERTS, 2, width, embed), (LAYERS, EXPERTS, embed, width)
    gate_up, down = (generator.standard_normal(shape).astype(np.float32) * shape[-1] ** -0.5 for shape in shapes)
    return gate_up, down


def quantised(weights: np.ndarray, block: tuple[int, int], codes=FLOAT8) -> tuple[BlockQuantized, np.ndarray]:
    pairs = [quantize_blocks(w, block, codes) for w in weights.reshape(-1, *weights.shape[-2:])]
    stored, scales = (np.stack(part) for part in zip(*pairs, strict=True))
    stored, scales = stored.reshape(weights.shape), scales.reshape(*weights.shape[:-2], *scales.shape[-2:])
    held = BlockQuantized(jnp.asarray(stored), jnp.asarray(scales), logical_shape=weights.shape[-2:], block=block)
    return held, dequantize_blocks(stored, scales, block)


def chosen(tokens: int, seed: int = 0, share: float = 0.7) -> tuple[np.ndarray, np.ndarray]:
    """Distinct experts for each token; some are on other devices, some tokens are padding, expert 2 is never chosen."""
    generator = np.random.default_rng(seed)
    experts = np.stack([generator.permutation([0, 1, 3, 4])[:K] for _ in range(tokens)]).astype(np.int32)
    experts[generator.random(experts.shape) > share] = -1
    experts[generator.random(tokens) > 0.8] = -1
    return experts, generator.random(experts.shape).astype(np.float32)


def exact(x, experts, gates, gate_up, down, layer: int = 1) -> np.ndarray:
    x = np.asarray(x, np.float64)
    out = np.zeros(x.shape)
    for token, place in np.argwhere(experts >= 0):
        gate, up = gate_up[layer, experts[token, place]].astype(np.float64) @ x[token]
        out[token] += gates[token, place] * (down[layer, experts[token, place]] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@functools.cache
def run(backend: str):
    return jax.jit(functools.partial(routed_experts, backend=backend))


@given(tokens=st.sampled_from([1, 65, 200]), seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.1, 0.7, 1.0]))
@settings(max_examples=8, deadline=None)
def test_any_assignment(tokens: int, seed: int, share: float) -> None:
    """Few rows and many, at widths that are no whole registers; what padding holds does not matter."""
    gate_up, down = stacks(4, 6)
    experts, gates = chosen(tokens, seed, share)
    x = np.random.default_rng(seed).standard_normal((tokens, 6)).astype(np.float32)
    expected = exact(x, experts, gates, gate_up, down)
    x[(experts < 0).all(axis=1)] = np.nan if seed % 2 else np.inf
    got = run("interpret")(x, experts, gates, gate_up, down, 1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-4)


@pytest.mark.parametrize("tokens", [9, 150])
@pytest.mark.parametrize("case", ["one expert", "twice the same", "one row", "all padding"])
def test_extremes(tokens: int, case: str) -> None:
    gate_up, down = stacks(4, 6)
    experts = np.stack([np.arange(tokens) % 3, 3 + np.arange(tokens) % 2], -1).astype(np.int32)
    if case == "one expert":
        experts[:] = (4, -1)
    if case == "twice the same":
        experts[:] = (4, 4)
    if case in ("one row", "all padding"):
        experts[:] = -1
        experts[tokens // 2, 1] = 3 if case == "one row" else -1
    x = np.random.default_rng(1).standard_normal((tokens, 6)).astype(np.float32)
    gates = np.full(experts.shape, 0.5, np.float32)
    expected = exact(x, experts, gates, gate_up, down, 0)
    np.testing.assert_allclose(run("interpret")(x, experts, gates, gate_up, down, 0), expected, atol=1e-4)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("chip", "kind", "tokens"),
    [
        ("v5p", "fp8", 24),
        pytest.param("v5p", "fp8", 100, marks=pytest.mark.slow),
        ("v6e", "fp8", 100),
        ("tpu7x", "fp8", 24),
        ("v5p", "bf16", 100),
        pytest.param("tpu7x", "bf16", 24, marks=pytest.mark.slow),
        pytest.param("v5p", "int8", 24, marks=pytest.mark.slow),
    ],
)
def test_no_less_exact_than_the_plain_form(chip: str, kind: str, tokens: int) -> None:
    """Blocks of 128 at widths that one step does not cover, for each way to widen codes."""
    gate_up, down = stacks(512, 256)
    if kind == "bf16":
        weights = [jnp.asarray(w, jnp.bfloat16) for w in (gate_up, down)]
        values = [np.asarray(w, np.float32) for w in weights]
    else:
        codes = FLOAT8 if kind == "fp8" else jnp.int8
        weights, values = zip(*(quantised(w, (128, 128), codes) for w in (gate_up, down)), strict=True)
    experts, gates = chosen(tokens)
    x = jnp.asarray(np.random.default_rng(2).standard_normal((tokens, 256)), jnp.bfloat16)
    expected = exact(x, experts, gates, *values)
    plain = np.abs(run("reference")(x, experts, gates, *weights, 1) - expected)
    ours = np.abs(run(f"interpret:{chip}")(x, experts, gates, *weights, 1) - expected)
    assert ours.max() <= plain.max()
    assert np.sqrt(np.mean(ours**2)) <= np.sqrt(np.mean(plain**2))


@pytest.mark.parametrize("tokens", [10, 90])
def test_cut_blocks(tokens: int) -> None:
    weights, values = zip(*(quantised(w, (3, 4)) for w in stacks(4, 6)), strict=True)
    experts, gates = chosen(tokens)
    x = np.random.default_rng(3).standard_normal((tokens, 6)).astype(np.float32)
    got = run("interpret")(x, experts, gates, *weights, 1)
    np.testing.assert_allclose(got, exact(x, experts, gates, *values), atol=1e-4)


@pytest.mark.parametrize("tokens", [12, 100])
def test_a_token_does_not_depend_on_the_others(tokens: int) -> None:
    gate_up, down = stacks(4, 6)
    x = np.random.default_rng(4).standard_normal((tokens, 6)).astype(np.float32)
    experts, gates = np.tile(np.array([[1, 3]], np.int32), (tokens, 1)), np.full((tokens, 2), 0.5, np.float32)
    together = np.asarray(run("interpret")(x, experts, gates, gate_up, down, 0))
    experts[3:], gates[3:] = -1, 0
    alone = np.asarray(run("interpret")(x, experts, gates, gate_up, down, 0))
    np.testing.assert_array_equal(alone[:3], together[:3])
    assert not alone[3:].any()


def test_several_windows_and_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows come in more than one window, an expert's in two of them, and tokens in more than one part."""
    monkeypatch.setattr(tile_sizes, "MOST_TOKENS", 160)
    monkeypatch.setattr(tile_sizes, "WINDOW_ROWS", 128)
    gate_up, down = stacks(4, 6)
    experts, gates = chosen(300, share=1.0)
    x = np.random.default_rng(5).standard_normal((300, 6)).astype(np.float32)
    got = jax.jit(functools.partial(routed_experts, backend="interpret"))(x, experts, gates, gate_up, down, 1)
    np.testing.assert_allclose(got, exact(x, experts, gates, gate_up, down), atol=1e-4)


@pytest.mark.quick(1)
@pytest.mark.parametrize("tokens", [16, 80])
def test_no_races(tokens: int, racing: str) -> None:
    gate_up, down = stacks(256, 128)
    experts, gates = chosen(tokens)
    x = np.random.default_rng(6).standard_normal((tokens, 128)).astype(np.float32)
    got = routed_experts(x, experts, gates, gate_up, down, 1, backend=racing)
    np.testing.assert_allclose(got, exact(x, experts, gates, gate_up, down), atol=1e-3)


@functools.partial(jax.jit, static_argnums=2)
def grouping(experts, gates, size: int):
    groups = groups_of(experts, gates, EXPERTS, size)
    room = tile_sizes.most_tiles(*experts.shape, EXPERTS, size)
    return groups, rows_of(groups, jnp.int32(0), room, size)


@given(seed=st.integers(0, 99), case=st.sampled_from([(3, 4), (130, 16), (300, 16)]))
@settings(max_examples=30, deadline=None)
def test_groups(seed: int, case: tuple[int, int]) -> None:
    tokens, size = case
    experts, gates = chosen(tokens, seed)
    groups, rows = grouping(experts, gates, size)
    token, gate = (np.asarray(part) for part in rows)
    counts = [(experts == e).sum() for e in range(EXPERTS)]
    held = [e for e in range(EXPERTS) if counts[e]]
    assert groups.used.tolist() == [len(held), sum(-(-n // size) for n in counts)]
    assert groups.expert.tolist()[: len(held)] == held
    row = 0
    for e in held:
        tokens_of, places = np.nonzero(experts == e)
        np.testing.assert_array_equal(token[row : row + counts[e]], tokens_of)
        np.testing.assert_array_equal(gate[row : row + counts[e]], gates[tokens_of, places])
        row += -(-counts[e] // size) * size
    assert gate.astype(bool).sum() == sum(counts)


def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everything, in more than one part."""
    monkeypatch.setattr(tile_sizes, "MOST_BACK", 48)
    tokens = 70
    gate_up, down = stacks(24, 40)
    experts, gates = chosen(tokens)
    generator = np.random.default_rng(7)
    x, cotangent = (generator.standard_normal((tokens, 40)).astype(np.float32) for _ in range(2))

    def loss(backend: str, *operands) -> jax.Array:
        x, gates, gate_up, down = operands
        return jnp.sum(cotangent * routed_experts(x, experts, gates, gate_up, down, 1, backend=backend))

    expected, got = (
        jax.jit(jax.grad(functools.partial(loss, backend), (0, 1, 2, 3)))(x, gates, gate_up, down)
        for backend in ("reference", "interpret")
    )
    for ours, plain in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-4)


@pytest.mark.slow
def test_gradients_past_codes() -> None:
    """Codes have no gradient, and rows and gates that of the weights that they stand for."""
    (gate_up, plain_gate_up), (down, plain_down) = (quantised(w, (128, 128)) for w in stacks(24, 40))
    experts, gates = chosen(9)
    x = np.random.default_rng(8).standard_normal((9, 40)).astype(np.float32)

    def loss(x, gates, weights, backend: str) -> jax.Array:
        return jnp.sum(routed_experts(x, experts, gates, *weights, 0, backend=backend) ** 2)

    gradient = jax.jit(jax.grad(loss, (0, 1)), static_argnums=3)
    got = gradient(x, gates, (gate_up, down), "interpret")
    expected = gradient(x, gates, (plain_gate_up, plain_down), "reference")
    for ours, plain in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-4)


def shapes(tokens: int, kind: str, experts: int = 4, width: int = 2048, embed: int = 6144):
    lead = (3, experts)
    make = jax.ShapeDtypeStruct
    if kind == "bf16":
        weights = make((*lead, 2, width, embed), jnp.bfloat16), make((*lead, embed, width), jnp.bfloat16)
    else:
        weights = tuple(
            BlockQuantized(make((*lead, *shape), FLOAT8), make((*lead, *grid), jnp.float32), logical_shape=shape[-2:])
            for shape, grid in (
                ((2, width, embed), (2, width // 128, embed // 128)),
                ((embed, width), (embed // 128, width // 128)),
            )
        )
    rows = make((tokens, embed), jnp.bfloat16), make((tokens, 8), jnp.int32), make((tokens, 8), jnp.float32)
    return *rows, *weights, make((), jnp.int32)


@pytest.mark.parametrize(
    ("chip", "tokens", "kind"), [("v5p", 64, "fp8"), ("tpu7x", 8, "bf16"), ("v6e", 4096, "bf16"), ("v5e", 8, "fp8")]
)
def test_compiles(chip: str, tokens: int, kind: str) -> None:
    """No copy of weights; at 4,096 tokens there is room for every row's hidden values, and for one window's rows."""
    step = compiled(functools.partial(routed_experts, backend=f"tpu:{chip}"), shapes(tokens, kind), chip)
    names = {
        name
        for name in ("experts_few", "experts_hidden", "experts_outputs")
        if any(name in kernel.name for kernel in step.program.kernels)
    }
    assert names == ({"experts_few"} if tokens <= tile_sizes.FEW else {"experts_hidden", "experts_outputs"})
    assert not step.program.copies
    assert step.memory.temporaries < (8 if tokens <= 64 else 160) * 2**20


def test_costs_are_those_of_the_plain_form() -> None:
    """Multiply-adds of a row's three products, and each weight once."""
    x, experts, _, gate_up, down, _ = shapes(64, "bf16")
    cost = tile_sizes.cost(x.shape[0] * experts.shape[1], 4, gate_up, down)
    reference = jax.jit(functools.partial(routed_experts, backend="reference")).lower(*shapes(64, "bf16", experts=1))
    # The plain form computes each expert, one here, for each token.
    analysis = reference.compile().cost_analysis()
    assert cost.flops == pytest.approx(8 * analysis["flops"], rel=0.06)
    assert cost.bytes_accessed == pytest.approx(2 * 4 * 3 * 2048 * 6144, rel=0.1)
