"""A small checkpoint folder with a tokenizer, made once a session."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chex
import jax
import pytest

from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.config import BUILT_IN, ModelConfig
from glm52_jax.params.init import init_params
from glm52_jax.text import write_byte_tokenizer
from infer import steps
from infer.steps import StepProvider
from tests.model.conftest import OPTIONS
from tests.model.conftest import quick_compiler as quick_compiler
from tests.model.paths import QUICK_OPTIONS

# Few layers, so that a step compiles quickly: dense and full, MoE and shared, and the MTP layer.
CONFIG = dataclasses.replace(
    BUILT_IN["glm-5.2-tiny"],
    num_hidden_layers=4,
    indexer_types=("full", "full", "full", "shared"),
    mlp_layer_types=("dense", "sparse", "sparse", "sparse"),
    n_routed_experts=8,
    num_experts_per_tok=2,
    index_topk=8,
    initializer_range=0.2,
    dtype="float32",
)


@pytest.fixture(autouse=True)
def slow_tests_compile_as_users_do(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """With all that the compiler does; what it compiled quickly for others is not taken."""
    if not request.node.get_closest_marker("slow"):
        yield
        return
    monkeypatch.setattr(StepProvider, "compiler_options", OPTIONS)
    steps._jitted.cache_clear()
    yield
    steps._jitted.cache_clear()


@pytest.fixture(autouse=True, scope="session")
def each_step_is_traced_once() -> Iterator[None]:
    """For each tree of parameters; a second trace for a longer sequence, or for a state it returned, is an error."""
    function, count = StepProvider._function, itertools.count()

    def once(provider: StepProvider, method: str, arguments: tuple[str, ...]) -> Any:
        made, known = function(provider, method, arguments), {}

        def step(params: Any, *rest: Any) -> Any:
            def run(*values: Any) -> Any:
                return made(*values)

            shapes = str(jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params))
            if shapes not in known:
                run.__name__ = f"{method}_{next(count)}"  # by which chex tells functions apart
                known[shapes] = chex.assert_max_traces(run, n=1)
            return known[shapes](params, *rest)

        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProvider, "_function", once)
        yield


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return CONFIG


@pytest.fixture(scope="session")
def params() -> dict[str, Any]:
    return jax.jit(lambda: init_params(CONFIG, jax.random.key(3)), compiler_options=QUICK_OPTIONS)()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, params: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, CONFIG, params)
    write_byte_tokenizer(folder, vocab_size=CONFIG.vocab_size)
    return folder
