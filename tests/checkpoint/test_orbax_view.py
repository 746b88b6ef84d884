"""Orbax itself opens what was converted, at the end and when it is verified, and a changed format is noticed."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.formats import orbax_layout
from glm52_jax.checkpoint.formats.orbax_view import OrbaxView
from glm52_jax.checkpoint.sources.converted import ConvertedCheckpoint
from glm52_jax.io.unfinished import MANIFEST
from glm52_jax.verification import command
from sharding.errors import InputError
from tests.checkpoint.builders import Folder
from tests.checkpoint.conversions import NoOrbax, run_convert


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, fp8_folder: Folder) -> Path:
    """A conversion of `fp8_folder`. Not to be changed."""
    path = tmp_path_factory.mktemp("orbax") / "c"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "OrbaxView", NoOrbax)
        run_convert(fp8_folder.path, path)
    return path


def view(folder: Path) -> list[str]:
    opened = ConvertedCheckpoint(folder)
    return OrbaxView(folder / "params", opened.leaves).differences()


@pytest.mark.usefixtures("orbax")
def test_convert_and_verify_have_it_read(fp8_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What is written in another form is not finished; and a target that is, is opened when it is verified."""
    calls: list[list[str]] = []
    differences = OrbaxView.differences

    def noting(self: OrbaxView) -> list[str]:
        calls.append(differences(self))
        return calls[-1]

    monkeypatch.setattr(OrbaxView, "differences", noting)
    metadata = orbax_layout.tree_metadata
    with monkeypatch.context() as patch:
        patch.setattr(orbax_layout, "tree_metadata", lambda names: metadata(names) | {"use_zarr3": False})
        with pytest.raises(InputError, match=r"Orbax does not read it .*; so the conversion is not finished"):
            run_convert(fp8_folder.path, tmp_path / "c")
    assert not (tmp_path / "c" / MANIFEST).exists()
    run_convert(fp8_folder.path, tmp_path / "c")
    result = CliRunner().invoke(command.verify, [str(tmp_path / "c"), "--against", str(fp8_folder.path), "--quick"])
    assert result.exit_code == 0, result.output
    assert [bool(found) for found in calls] == [True, False, False]


def drop_an_array(tree: dict[str, Any]) -> None:
    del tree["tree_metadata"][str(("model", "layers", "0", "self_attn", "q_b_proj", "weight"))]


def name_an_array_that_is_not_there(tree: dict[str, Any]) -> None:
    tree["tree_metadata"]["('x',)"] = next(iter(tree["tree_metadata"].values())) | {
        "key_metadata": [{"key": "x", "key_type": 2}]
    }


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (drop_an_array, r"to Orbax model.layers.0.self_attn.q_b_proj.weight is not there, expected float8_e4m3fn"),
        (name_an_array_that_is_not_there, r"Orbax does not read it \(.*x"),
    ],
)
def test_a_changed_tree_is_noticed_when_it_is_verified(
    damage: Callable[[dict[str, Any]], None],
    sentence: str,
    whole: Path,
    fp8_folder: Folder,
    tmp_path: Path,
    orbax: None,
):
    folder = Folder(whole).copy(tmp_path / "c")
    folder.edit_json(damage, "params/_METADATA")
    result = CliRunner().invoke(command.verify, [str(folder.path), "--against", str(fp8_folder.path), "--quick"])
    assert result.exit_code == 1
    assert re.search(sentence, result.output), result.output


def test_other_types_shapes_and_values_are_noticed(whole: Path, tmp_path: Path):
    folder = Folder(whole).copy(tmp_path / "c")
    name = "model.norm.weight"
    expected = ConvertedCheckpoint(folder.path).leaves
    folder.edit_json(lambda raw: raw | {"data_type": "int32"}, f"params/{name}/zarr.json")
    assert (
        OrbaxView(folder.path / "params", expected)
        .differences()[0]
        .endswith("to Orbax model.norm.weight is int32 [64], expected float32 [64]")
    )


def test_an_orbax_that_is_not_there_is_one_sentence(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "orbax").mkdir()
    (tmp_path / "orbax" / "__init__.py").write_text("raise ImportError('no orbax here')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (sentence,) = view(whole)
    assert sentence == f"{whole / 'params'}: Orbax does not read it (ImportError: no orbax here)"
    assert json.loads((whole / MANIFEST).read_text())["format"] == "glm52-orbax"
