"""`glm52 precision`: figures that are zero where nothing is rounded, and grow with what is."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from glm52_jax.checkpoint.write import write_checkpoint
from glm52_jax.precision import measure
from glm52_jax.precision.command import precision
from glm52_jax.row_formats import PLAIN_CACHE, CacheFormat
from tests.model.tiny import random_params, tiny

CONFIG = tiny(num_hidden_layers=2, indexer_types=("full", "full"), mlp_layer_types=("dense", "sparse"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("precision") / "checkpoint"
    write_checkpoint(path, dataclasses.replace(CONFIG, dtype="float32"), random_params(CONFIG))
    return path


@pytest.fixture
def two_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(scales: tuple[float, ...], *, rotation: bool) -> list[measure.Form]:
        assert len(scales) == CONFIG.num_hidden_layers
        assert not rotation  # a width of 20
        return [
            measure.Form("nothing", cache=PLAIN_CACHE),
            measure.Form("both", "fp8", CacheFormat("fp8_groups", "fp8")),
        ]

    monkeypatch.setattr(measure, "forms", rows)


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


def test_the_table_has_every_form() -> None:
    rows = measure.forms((1.0,), rotation=True)
    assert [row.name for row in rows if row.weights] == [
        "weights BF16",
        "weights FP8 blocks",
        "weights INT8 blocks",
        "weights and cache FP8",
    ]
    assert {row.cache.latent for row in rows} == {"plain", "fp8_groups", "fp8_tensor"}
    assert {row.cache.index_keys for row in rows} == {"plain", "fp8", "fp8_rotated"}
    assert len(measure.forms((1.0,), rotation=False)) == len(rows) - 1


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
