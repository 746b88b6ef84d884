"""`glm52 precision`: figures that are zero where nothing is rounded, and grow with what is."""

import dataclasses
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from glm52_jax.cache.cache_format import PLAIN_CACHE, CacheFormat
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.verification import quantization_error
from glm52_jax.verification.precision_command import precision
from sharding.errors import InputError
from tests.model.tiny import random_params, tiny

CONFIG = tiny(num_hidden_layers=2, indexer_types=("full", "full"), mlp_layer_types=("dense", "sparse"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("precision") / "checkpoint"
    write_checkpoint(path, dataclasses.replace(CONFIG, dtype="float32"), random_params(CONFIG))
    return path


@pytest.fixture
def two_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(scales: tuple[float, ...], *, rotation: bool) -> list[quantization_error.Variant]:
        assert len(scales) == CONFIG.num_hidden_layers
        assert not rotation  # a width of 20
        return [
            quantization_error.Variant("nothing", cache=PLAIN_CACHE),
            quantization_error.Variant("both", "fp8", CacheFormat("fp8_groups", "fp8")),
        ]

    monkeypatch.setattr(quantization_error, "variants", rows)


@pytest.mark.slow
@pytest.mark.usefixtures("two_forms")
def test_nothing_rounded_is_no_error_and_padding_counts_for_nothing(folder: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 90, (2, 20))
    padded, mask = np.zeros((2, 24), int), np.zeros((2, 24), bool)
    padded[0, 4:], mask[0, 4:] = tokens[0], True
    padded[1, :20], mask[1, :20] = tokens[1], True
    padded[~mask] = 95
    np.savez(folder / "texts.npz", input_ids=padded, attention_mask=mask.astype(int))
    np.save(folder / "whole.npy", tokens)
    results = []
    for name in ("texts.npz", "whole.npy"):
        result = CliRunner().invoke(precision, [str(folder), "--tokens", name, "--json"])
        assert result.exit_code == 0, result.output
        results.append(json.loads(result.stdout)[str(folder)])
    (nothing, both), (_, whole) = results
    assert nothing["layer"] < 1e-6
    assert nothing["logits"] < 1e-6
    assert (nothing["sets"], nothing["kept"], nothing["layer_sets"], nothing["top"]) == (1, 1, 1, 1)
    assert 0.01 < both["layer"] < 0.3
    assert both["logits"] > both["divergence"] > 0
    assert both["sets"] <= both["kept"] <= 1
    for key in ("layer", "logits", "sets", "kept", "top"):
        assert both[key] == pytest.approx(whole[key], rel=0.05), key


@pytest.mark.usefixtures("two_forms")
def test_a_yardstick_that_is_no_number_is_refused(folder: Path) -> None:
    """Not figures that are NaN, which would not even be JSON; NaN under padding does not count."""
    params = load_params(folder, dtype="float32")
    tokens, mask = np.full((2, 20), 3), np.ones((2, 20), bool)
    tokens[1, 7:], mask[1, 7:] = 95, False
    embed = np.array(params["embed"])
    embed[95] = np.nan
    assert next(iter(quantization_error.measure(params | {"embed": embed}, CONFIG, tokens, mask))).layer < 1e-6
    embed[3, 1] = np.inf
    with pytest.raises(InputError, match="the plain model's output is NaN or infinite, so there is no error to state"):
        next(iter(quantization_error.measure(params | {"embed": embed}, CONFIG, tokens, mask)))


def test_the_table_has_every_form() -> None:
    rows = quantization_error.variants((1.0,), rotation=True)
    assert [row.name for row in rows if row.weights] == [
        "weights BF16",
        "weights FP8 blocks",
        "weights INT8 blocks",
        "weights and cache FP8",
    ]
    assert {row.cache.latent for row in rows} == {"plain", "fp8_groups", "fp8_tensor"}
    assert {row.cache.index_keys for row in rows} == {"plain", "fp8", "fp8_rotated"}
    assert len(quantization_error.variants((1.0,), rotation=False)) == len(rows) - 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--tokens", "absent.npy"], "absent.npy: holds no token ids"),
        (["--text", "a", "--tokens", "b"], "--text and --tokens are both given"),
        (["--text", "absent.txt"], "absent.txt: cannot be read"),
    ],
)
def test_what_cannot_be_run_is_refused(folder: Path, options: list[str], sentence: str) -> None:
    result = CliRunner().invoke(precision, [str(folder), *options])
    assert result.exit_code != 0
    assert sentence in str(result.exception)


def arrays(**named: np.ndarray) -> bytes:
    """An .npz of these."""
    held = io.BytesIO()
    np.savez(held, **named)
    return held.getvalue()


def array(values: object) -> bytes:
    held = io.BytesIO()
    np.save(held, np.array(values), allow_pickle=True)
    return held.getvalue()


IDS = np.array([[1, 2, 3]])


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (array([[1, 400]]), "tokens holds 400, but the vocabulary has 96 tokens"),
        (array([[1, -3]]), "tokens holds -3, but the vocabulary has 96 tokens"),
        (array([[1, 2**32 + 7]]), "tokens holds 4294967303, but the vocabulary has 96 tokens"),
        (array([[1.0, 2.0]]), "tokens has shape (1, 2) and dtype float64"),
        (array([[True, False]]), "tokens has shape (1, 2) and dtype bool"),
        (array([1, 2]), "tokens has shape (2,) and dtype int64"),
        (array([]), "tokens has shape (0,) and dtype float64"),
        (array(np.zeros((2, 0), int)), "tokens has shape (2, 0) and dtype int64"),
        (array(np.zeros((0, 2), int)), "tokens has shape (0, 2) and dtype int64"),
        (
            array(np.zeros((1, CONFIG.max_position_embeddings + 1), np.int8)),
            f"tokens has length {CONFIG.max_position_embeddings + 1}, more than max_position_embeddings",
        ),
        (array([{"a": 1}]), "holds no token ids (Object arrays cannot be loaded when allow_pickle=False)"),
        (pickle.dumps([[1]]), "holds no token ids"),
        (b"", "holds no token ids"),
        (b"no array", "holds no token ids"),
        (array([[1, 2]])[:-3], "holds no token ids"),
        (arrays(other=IDS), "holds no token ids"),
        (arrays(input_ids=IDS)[:-40], "holds no token ids"),
        (b"PK\x03\x04" + bytes(40), "holds no token ids"),
        (arrays(input_ids=IDS, attention_mask=IDS[:, :2] * 0 + 1), "mask has shape (1, 2), expected that of tokens"),
        (arrays(input_ids=IDS, attention_mask=IDS), "mask has dtype int64 or other values than 0 and 1"),
        (arrays(input_ids=IDS, attention_mask=IDS * 0), "the mask leaves no token"),
        (arrays(input_ids=IDS, attention_mask=np.array([["a"] * 3])), "mask has dtype <U1"),
    ],
)
def test_files_without_token_ids_are_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, sentence: str
) -> None:
    """Before any checkpoint is loaded, in a sentence that names the file."""
    path = tmp_path / "ids.npz"
    path.write_bytes(data)
    monkeypatch.setattr("glm52_jax.verification.precision_command._measured", lambda *_: pytest.fail("loaded"))
    result = CliRunner().invoke(precision, [str(folder), str(folder), "--tokens", str(path)])
    assert isinstance(result.exception, InputError), result.exception
    assert str(result.exception).startswith(f"{path}: {sentence}")


@pytest.mark.parametrize(
    "data", [array([[5, 95]]), arrays(input_ids=IDS.astype(np.uint8)), array(np.asfortranarray(IDS))]
)
def test_files_with_token_ids_are_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    (tmp_path / "ids").write_bytes(data)
    seen = []
    monkeypatch.setattr("glm52_jax.verification.precision_command._measured", lambda *given: seen.append(given) or [])
    result = CliRunner().invoke(precision, [str(folder), "--tokens", str(tmp_path / "ids"), "--json"])
    assert result.exit_code == 0, result.output
    assert seen[0][2].dtype == np.int32
