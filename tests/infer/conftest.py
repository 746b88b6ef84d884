"""A small checkpoint folder with a tokenizer, made once a session."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from glm52_jax.checkpoint.write import write_checkpoint
from glm52_jax.config import BUILT_IN, ModelConfig
from glm52_jax.params import init_params
from glm52_jax.text import write_byte_tokenizer
from tests.model.conftest import quick_compiler as quick_compiler

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


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return CONFIG


@pytest.fixture(scope="session")
def params() -> dict[str, Any]:
    return init_params(CONFIG, jax.random.key(3))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, params: dict[str, Any]) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, CONFIG, params)
    write_byte_tokenizer(folder, vocab_size=CONFIG.vocab_size)
    return folder
