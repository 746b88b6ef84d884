"""Small checkpoints, written once a session; a test that changes one takes a copy."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest

from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.config import ModelConfig
from glm52_jax.verification import verify
from tests.checkpoint.builders import FP8, Folder, random_params, small_config
from tests.checkpoint.conversions import NoOrbax


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is flushed matters when the power fails, not to these tests; processes that they start do flush."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def orbax() -> None:
    """A test that asks for it has Orbax read what is converted."""


@pytest.fixture(autouse=True)
def no_waiting_for_orbax(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it does not, in this process and in this folder's tests."""
    if "orbax" not in request.fixturenames:
        for module in (conversion, verify):
            monkeypatch.setattr(module, "OrbaxView", NoOrbax)


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return small_config()


@pytest.fixture(scope="session")
def fp8_config(config: ModelConfig) -> ModelConfig:
    return dataclasses.replace(config, quantization=FP8)


@pytest.fixture(scope="session")
def params(config: ModelConfig) -> dict[str, Any]:
    return random_params(config)


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory, config: ModelConfig, params: dict[str, Any]) -> Folder:
    """float32 in one file. Not to be changed."""
    path = tmp_path_factory.mktemp("plain") / "checkpoint"
    write_checkpoint(path, config, params)
    return Folder(path)


@pytest.fixture(scope="session")
def fp8_folder(tmp_path_factory: pytest.TempPathFactory, fp8_config: ModelConfig, params: dict[str, Any]) -> Folder:
    """float8 blocks in some shards with an index. Not to be changed."""
    path = tmp_path_factory.mktemp("fp8") / "checkpoint"
    write_checkpoint(path, fp8_config, params, shard_bytes=150_000)
    return Folder(path)


@pytest.fixture
def plain(plain_folder: Folder, tmp_path: Path) -> Folder:
    """A copy of `plain_folder`."""
    return plain_folder.copy(tmp_path / "plain")


@pytest.fixture
def fp8(fp8_folder: Folder, tmp_path: Path) -> Folder:
    """A copy of `fp8_folder`."""
    return fp8_folder.copy(tmp_path / "fp8")
