"""What decides a choice is computed in float32 and at the highest precision, seen in the traced program.

On a TPU a float32 product is done in bfloat16 unless it asks for more, so that the operands' types alone prove nothing;
and it needs no TPU to see whether it asks.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.cache.paged_cache import PagedCache
from glm52_jax.kernels.index_scores.api import index_scores
from glm52_jax.kernels.lib.layers import Rotary
from glm52_jax.model import indexer, moe, transformer
from tests.model.cases import FORMS
from tests.model.tiny import random_params, random_tokens, tiny

HIGHEST = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)


def equations(jaxpr: jax.extend.core.Jaxpr) -> Iterator:
    """Every equation, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def traced(function, *arguments) -> list:
    return list(equations(jax.make_jaxpr(function)(*arguments).jaxpr))


def products(found: list) -> list:
    return [e for e in found if e.primitive.name == "dot_general"]


def dtypes(equation) -> list:
    return [v.aval.dtype for v in equation.invars if hasattr(v.aval, "dtype")]


def exact(equation) -> bool:
    """A product of float32 operands that asks for the highest precision."""
    return set(dtypes(equation)) == {jnp.dtype("float32")} and equation.params["precision"] == HIGHEST


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


def setting(dtype: str) -> tuple:
    config = tiny(dtype=dtype)
    params = random_params(config, dtype=dtype)
    x = jnp.ones((1, 6, config.hidden_size), dtype)
    return config, params, x, jnp.arange(6, dtype=jnp.int32)[None]


def test_gate(dtype: str) -> None:
    config, params, x, _ = setting(dtype)
    stack = params["moe"]
    found = traced(
        lambda x: moe.route(
            stack["router"][0], stack["router_bias"][0], config, x[0], jnp.ones(6, bool), backend="reference"
        ),
        x,
    )
    assert len(products(found)) == 1
    assert all(exact(e) for e in products(found))
    assert all(set(dtypes(e)) == {jnp.dtype("float32")} for e in found if e.primitive.name in ("logistic", "top_k"))


def test_head_weights(dtype: str) -> None:
    config, params, x, _ = setting(dtype)
    weights = jax.tree.map(lambda a: a[0], params["indexer"])
    found = traced(lambda x: indexer.head_weights(weights, config, x), x)
    assert [e.outvars[0].aval.dtype for e in products(found)] == [jnp.float32]
    assert products(found)[0].params["precision"] == HIGHEST


def test_index_keys_and_queries(dtype: str) -> None:
    """Accumulated in float32, and never rounded before the scores."""
    config, params, x, places = setting(dtype)
    weights = jax.tree.map(lambda a: a[0], params["indexer"])
    rotary = Rotary.at(places, config.qk_rope_head_dim, config.rope_theta)
    latent = jnp.ones((1, 6, config.q_lora_rank), dtype)
    for make, source in ((indexer.index_keys, x), (indexer.index_queries, latent)):
        found = traced(lambda source, make=make: make(weights, config, source, rotary), source)
        assert [e.params["preferred_element_type"] for e in products(found)] == [jnp.float32]
        after = found[found.index(products(found)[0]) :]
        assert all(v.aval.dtype != jnp.bfloat16 for e in after for v in e.outvars)
        assert make(weights, config, source, rotary).dtype == jnp.float32


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_index_scores(dtype: str, backend: str, tokens: int) -> None:
    """The products of queries and cached keys, whatever the cache holds."""
    config = tiny(dtype=dtype)
    keys = PagedCache.create(config, 1, 64, dtype=dtype).index_keys
    queries = jnp.ones((1, tokens, config.index_n_heads, config.index_head_dim))
    weights, table = jnp.ones((1, tokens, config.index_n_heads)), jnp.zeros((1, 1), jnp.int32)
    places = jnp.arange(tokens, dtype=jnp.int32)[None]
    found = traced(lambda q, w, k: index_scores(q, w, k, 0, table, places, backend=backend), queries, weights, keys)
    assert products(found)
    assert all(exact(e) for e in products(found))


@pytest.mark.quick(6)
@pytest.mark.parametrize("form", FORMS)
def test_whole_model(dtype: str, form: str) -> None:
    """Every product accumulates in float32, those of float32 operands ask for the highest precision, and norms,
    softmax, gates and rotation are float32 throughout."""
    config, params, _, _ = setting(dtype)
    tokens = jnp.asarray(random_tokens(1, 20))
    mask = jnp.ones((1, 20), bool)
    found = traced(lambda p: transformer._trace.__wrapped__(p, config, tokens, mask, FORMS[form]), params)
    assert len(products(found)) > 20
    for equation in products(found):
        assert equation.params["preferred_element_type"] == jnp.float32, equation
        if jnp.float32 in dtypes(equation):
            assert exact(equation), equation
    for equation in found:
        if equation.primitive.name in ("rsqrt", "exp", "logistic", "cos", "sin", "top_k", "reduce_max"):
            floats = [d for d in dtypes(equation) if jnp.issubdtype(d, jnp.floating)]
            assert all(d == jnp.float32 for d in floats), equation


def test_logits_of_the_router_that_differ_by_little() -> None:
    """1e-4 apart, which bfloat16 operands cannot tell."""
    config = tiny(num_experts_per_tok=1)
    x = jnp.ones((1, 32))
    weight = np.zeros((8, 32), np.float32)
    weight[:, 0] = 1.0
    for best in range(8):
        lifted = weight.copy()
        lifted[best, 0] += 1e-4
        experts, _ = moe.route(jnp.asarray(lifted), jnp.zeros(8), config, x, jnp.ones(1, bool), backend="reference")
        assert experts.tolist() == [[best]]
