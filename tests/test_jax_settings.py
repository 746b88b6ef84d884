"""Results do not depend on what environment or program has set for JAX, and what JAX refuses is a sentence."""

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax import forward, generate, load_params
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.cli import run
from glm52_jax.config import BUILT_IN
from sharding import jax_settings
from sharding.errors import InputError, sentence
from sharding.jax_settings import project_settings, start_devices, with_project_settings
from tests.checkpoint.builders import random_params

CONFIG = dataclasses.replace(
    BUILT_IN["glm-5.2-tiny"],
    num_hidden_layers=2,
    indexer_types=("full", "shared"),
    mlp_layer_types=("dense", "sparse"),
    n_routed_experts=8,
    num_experts_per_tok=2,
    index_topk=8,
    initializer_range=0.2,
    dtype="float32",
)
TOKENS = np.arange(24).reshape(2, 12)

SETTINGS: dict[str, Callable[[], Any]] = {
    "x64": lambda: jax.enable_x64(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "type promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no jit": lambda: jax.disable_jit(True),
    "precision": lambda: jax.default_matmul_precision("bfloat16"),
    "generator": lambda: jax.default_prng_impl("rbg"),
    "partitions": lambda: jax.threefry_partitionable(False),
    "transfers": lambda: jax.transfer_guard("disallow"),
}


def results(folder: Path) -> list[Any]:
    """What the entries from outside give."""
    write_checkpoint(folder, CONFIG, random_params(CONFIG))
    params = load_params(folder)
    logits = jax.eval_shape(lambda params: forward(params, CONFIG, TOKENS, TOKENS > 2), params)
    options = {"temperature": 1.0, "top_p": 0.9, "seed": 5, "stop_ids": ()}
    return [logits, generate(params, CONFIG, [[1, 2, 3], [7]], 4, **options)]


def test_results_do_not_depend_on_settings_of_jax(tmp_path: Path) -> None:
    """All of them at once; which of them is put right is the next test."""
    expected = results(tmp_path / "before")
    with contextlib.ExitStack() as stack:
        for setting in SETTINGS.values():
            stack.enter_context(setting())
        found = results(tmp_path / "after")
        assert jax.config.jax_enable_x64
        assert jax.config.jax_numpy_rank_promotion == "raise"
    assert found == expected


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_is_as_it_is_needed(name: str) -> None:
    def values() -> list[Any]:
        return [getattr(jax.config, key) for key in watched]

    watched = [name for name, *_ in (*jax_settings._SETTINGS, *jax_settings._GUARDS)]
    expected = values()
    with SETTINGS[name]():
        changed = values()
        assert changed != expected
        with project_settings():
            assert [value or "allow" for value in values()] == [value or "allow" for value in expected]
        assert values() == changed


def test_settings_hold_inside_of_a_generator_and_not_between_its_steps() -> None:
    @with_project_settings
    def widths() -> Any:
        for _ in range(2):
            yield jnp.zeros(1, float).dtype
        return "end"

    with jax.enable_x64(True):
        steps = widths()
        for _ in range(2):
            assert next(steps) == jnp.float32
            assert jnp.zeros(1, float).dtype == jnp.float64
        with pytest.raises(StopIteration, match="end"):
            next(steps)
        with project_settings(), contextlib.suppress(KeyError):
            raise KeyError
        assert jax.config.jax_enable_x64


@pytest.mark.parametrize("error", [RuntimeError("Unable to initialize backend 'x': unknown\nmore"), AssertionError()])
@pytest.mark.parametrize("command", [["generate", "x", "y"], ["chat", "x"], ["selftest"], ["demo"]])
def test_a_platform_that_is_not_there_is_a_sentence(
    error: Exception, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything else: JAX itself raises an empty AssertionError for a plugin that is not installed."""

    def devices() -> None:
        raise error

    monkeypatch.setattr(jax_settings.jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "x")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    why = "Unable to initialize backend 'x': unknown" if str(error) else "there is no such platform here"
    with pytest.raises(InputError, match="JAX_PLATFORMS is 'x', but JAX found no device to run on"):
        start_devices()
    assert run(command) == 2
    assert capsys.readouterr().err == f"glm52: JAX_PLATFORMS is 'x', but JAX found no device to run on: {why}\n"


def test_a_setting_that_jax_cannot_read_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX raises it while it is imported, by one of these functions."""
    from jax._src import config

    monkeypatch.setenv("JAX_ENABLE_SOMETHING", "perhaps")
    with pytest.raises(ValueError, match="perhaps") as raised:
        config.bool_env("JAX_ENABLE_SOMETHING", False)
    assert str(sentence(raised.value)).startswith("JAX refuses its environment: invalid truth value 'perhaps'")
    with pytest.raises(ValueError, match="x") as other:
        raise ValueError("x")
    assert sentence(other.value) is None
