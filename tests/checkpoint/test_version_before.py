"""Files that the version before has written are read, and work that it has begun is finished."""

import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner

from glm52_jax.checkpoint.commands import convert
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.config import load_config
from glm52_jax.verification.command import verify
from tests.checkpoint.make_version_files import ARCHIVE


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("version")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


def same(one: Path, other: Path) -> bool:
    trees = [load_params(path, load_config(path)) for path in (one, other)]
    return jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), *trees))


def test_a_converted_checkpoint_is_loaded_and_verified(files: Path) -> None:
    assert same(files / "published", files / "converted")
    result = CliRunner().invoke(verify, [str(files / "converted"), "--against", str(files / "published")])
    assert result.exit_code == 0, result.output


def test_a_published_checkpoint_converts_to_the_same_files(files: Path, tmp_path: Path) -> None:
    CliRunner().invoke(convert, [str(files / "published"), str(tmp_path / "new")], catch_exceptions=False)
    names = [
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (files / "converted", tmp_path / "new")
    ]
    assert names[0] == names[1]


def test_a_conversion_that_was_begun_is_finished(files: Path) -> None:
    unfinished = files / "unfinished"
    assert (unfinished / "unfinished").is_dir()
    CliRunner().invoke(
        convert,
        [str(files / "published"), str(unfinished), "--process", "2/2", "--unit-size", "8kB"],
        catch_exceptions=False,
    )
    assert not (unfinished / "unfinished").exists()
    assert same(files / "published", unfinished)
