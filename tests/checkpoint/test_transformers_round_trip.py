"""What `transformers` writes is converted, verified and loaded, and what is exported it reads: with equal logits."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm52_jax import forward, load_config, load_params
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.checkpoint.sources.published import INDEX_FILE, fused_name
from glm52_jax.verification.verify import verify
from tests import needs
from tests.checkpoint.builders import MTP_LAYER, Folder
from tests.checkpoint.conversions import run_convert, run_export, tensors

torch = needs.package("torch")
transformers = needs.package("transformers")

TOKENS = np.random.default_rng(5).integers(0, 90, (2, 13))  # more than the 8 that a query attends to
WHOLE, PARTS = 10**9, 200_000


def read(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model and what was said of its loading."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", output_loading_info=True
    )


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.float().numpy()


@pytest.fixture(scope="module")
def theirs(plain_folder: Folder) -> Any:
    """`transformers`' model with the weights of `plain_folder`, whose norms and biases are random too."""
    return read(plain_folder.path)[0]


@pytest.fixture(scope="module")
def expected(theirs: Any) -> np.ndarray:
    return logits(theirs)


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
@pytest.mark.parametrize("shard_size", [WHOLE, PARTS], ids=["one file", "shards"])
def test_what_transformers_writes(tmp_path: Path, theirs: Any, expected: np.ndarray, fused: bool, shard_size: int):
    """It writes experts one by one, as they are published, or as it holds them; never an MTP layer."""
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shard_size, save_original_format=not fused)
    names = {name for name in tensors(tmp_path / "theirs") if ".mlp.experts." in name}
    assert {fused_name(name) is None for name in names} == {fused}
    assert (tmp_path / "theirs" / INDEX_FILE).exists() == (shard_size == PARTS)
    run_convert(tmp_path / "theirs", tmp_path / "c", without_mtp=True)
    assert verify(open_checkpoint(tmp_path / "c"), open_checkpoint(tmp_path / "theirs")).differences == []
    config = dataclasses.replace(load_config(tmp_path / "c"), latent_norm_eps=1e-6)  # the epsilon that it has
    for folder in (tmp_path / "c", tmp_path / "theirs"):
        # One config for all, so that the model is compiled once.
        ours = forward(load_params(folder, dtype="float32"), config.without_mtp(), TOKENS)
        np.testing.assert_allclose(ours, expected, atol=2e-4)


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
@pytest.mark.parametrize("shard_bytes", [WHOLE, PARTS], ids=["one file", "shards"])
def test_what_is_exported(plain_folder: Folder, tmp_path: Path, expected: np.ndarray, fused: bool, shard_bytes: int):
    run_convert(plain_folder.path, tmp_path / "c")
    run_export(tmp_path / "c", tmp_path / "out", fused=fused, shard_bytes=shard_bytes)
    assert (tmp_path / "out" / INDEX_FILE).exists() == (shard_bytes == PARTS)
    model, said = read(tmp_path / "out")
    assert not said["missing_keys"]
    assert not said["mismatched_keys"]
    assert {".".join(name.split(".")[:3]) for name in said["unexpected_keys"]} == {f"model.layers.{MTP_LAYER}"}
    np.testing.assert_array_equal(logits(model), expected)  # the same values in the same program


def test_what_is_exported_without_the_mtp_layer(plain_folder: Folder, tmp_path: Path, expected: np.ndarray):
    run_export(plain_folder.path, tmp_path / "out", without_mtp=True)
    model, said = read(tmp_path / "out")
    assert not any(said[kind] for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"))
    np.testing.assert_array_equal(logits(model), expected)
