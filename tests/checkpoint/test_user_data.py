"""What is a user's stays as it is: a destination is written to only where it proves to be new or this project's own."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.export import export
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.config import ModelConfig
from glm52_jax.io.unfinished import MANIFEST, UNFINISHED
from glm52_jax.text import write_byte_tokenizer
from infer.selftest.report import SelftestReport, checked_path
from sharding.errors import InputError
from tests.checkpoint.builders import Folder
from tests.checkpoint.conversions import contents, run_convert, run_export

NOVEL = "It was a dark and stormy night."
Run = Callable[[Path, Path], Any]
RUNS = [pytest.param(run_convert, id="convert"), pytest.param(run_export, id="export")]


class StopError(Exception):
    """Ends a run where a test wants it to end."""


def stopped(run: Run, source: Path, destination: Path) -> None:
    """A run that did two units of its work."""
    left = threading.Semaphore(2)
    place, name = (conversion._Writer, "unit") if run is run_convert else (export._Writer, "shard")
    work = getattr(place, name)

    def stopping(*arguments: Any) -> None:
        if not left.acquire(blocking=False):
            raise StopError
        work(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place, name, stopping)
        with pytest.raises(StopError):
            run(source, destination)


def everything(folder: Path) -> dict[str, Any]:
    """Files with their contents, links with where they lead, folders."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory, fp8_folder: Folder) -> dict[Any, Path]:
    """An unfinished conversion and an unfinished export. Not to be changed."""
    place = tmp_path_factory.mktemp("halves")
    for run in (run_convert, run_export):
        stopped(run, fp8_folder.path, place / run.__name__)
    return {run: place / run.__name__ for run in (run_convert, run_export)}


def novel_in_work_folder(place: Path, own: Path, half: Path) -> str:
    (own / UNFINISHED).mkdir(parents=True)
    (own / UNFINISHED / "novel.txt").write_text(NOVEL)
    return r"unfinished: holds novel\.txt, expected .*own to be new"


def novel_in_a_folder_below(place: Path, own: Path, half: Path) -> str:
    (own / UNFINISHED / "novel").mkdir(parents=True)
    (own / UNFINISHED / "novel" / "one.txt").write_text(NOVEL)
    return r"unfinished: holds novel, expected"


def work_folder_is_a_file(place: Path, own: Path, half: Path) -> str:
    own.mkdir()
    (own / UNFINISHED).write_text(NOVEL)
    return r"unfinished: is a file, expected .*own to be new"


def work_folder_is_a_link(place: Path, own: Path, half: Path) -> str:
    (place / "novels").mkdir()
    (place / "novels" / "novel.txt").write_text(NOVEL)
    own.mkdir()
    (own / UNFINISHED).symlink_to(place / "novels")
    return r"unfinished: is a link to .*novels, expected"


def work_folder_is_a_link_to_one_of_ours(place: Path, own: Path, half: Path) -> str:
    shutil.copytree(half, place / "other")
    own.mkdir()
    (own / UNFINISHED).symlink_to(place / "other" / UNFINISHED)
    return r"unfinished: is a link to .*other"


def settings_of_another_program(place: Path, own: Path, half: Path) -> str:
    (own / UNFINISHED).mkdir(parents=True)
    (own / UNFINISHED / "settings.json").write_text('{"theme": "dark"}')
    return r"unfinished: holds settings\.json, expected"


def names_like_ours_without_settings(place: Path, own: Path, half: Path) -> str:
    (own / UNFINISHED).mkdir(parents=True)
    (own / UNFINISHED / "done-export.0a.jsonl").write_text(NOVEL)
    return r"unfinished: holds done-export\.0a\.jsonl, expected"


def a_forged_marker_beside_a_novel(place: Path, own: Path, half: Path) -> str:
    (own / UNFINISHED).mkdir(parents=True)
    shutil.copy(half / UNFINISHED / "settings.json", own / UNFINISHED)
    (own / UNFINISHED / "novel.part").write_text(NOVEL)
    return r"unfinished: holds novel\.part, expected"


def a_novel_in_an_unfinished_one(place: Path, own: Path, half: Path) -> str:
    shutil.copytree(half, own)
    (own / "novel.txt").write_text(NOVEL)
    return r"own: holds novel\.txt beside an unfinished"


def another_config_in_an_unfinished_one(place: Path, own: Path, half: Path) -> str:
    shutil.copytree(half, own)
    (own / "config.json").write_text("{}")
    return r"own: holds another config\.json than an unfinished"


def a_link_in_an_unfinished_one(place: Path, own: Path, half: Path) -> str:
    shutil.copytree(half, own)
    (place / "config.json").write_text("{}")
    (own / "config.json").symlink_to(place / "config.json")
    return r"own: holds config\.json beside an unfinished"


def a_link_to_nothing(place: Path, own: Path, half: Path) -> str:
    own.symlink_to(place / "gone")
    return r"own: is a link to .*gone, where there is no such file"


def a_link_to_itself(place: Path, own: Path, half: Path) -> str:
    own.symlink_to(own)
    return r"own: is a link to .*own, which leads back to itself"


def a_link_to_a_full_folder(place: Path, own: Path, half: Path) -> str:
    (place / "novels").mkdir()
    (place / "novels" / "novel.txt").write_text(NOVEL)
    own.symlink_to(place / "novels")
    return r"own: is not empty \(novel\.txt\)"


CASES = [
    novel_in_work_folder,
    novel_in_a_folder_below,
    work_folder_is_a_file,
    work_folder_is_a_link,
    work_folder_is_a_link_to_one_of_ours,
    settings_of_another_program,
    names_like_ours_without_settings,
    a_forged_marker_beside_a_novel,
    a_novel_in_an_unfinished_one,
    another_config_in_an_unfinished_one,
    a_link_in_an_unfinished_one,
    a_link_to_nothing,
    a_link_to_itself,
    a_link_to_a_full_folder,
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_what_is_not_ours_is_refused_and_left(
    run: Run, case: Callable[..., str], halves: dict[Any, Path], fp8_folder: Folder, tmp_path: Path
):
    sentence = case(tmp_path, tmp_path / "own", halves[run])
    before = everything(tmp_path)
    with pytest.raises(InputError, match=sentence):
        run(fp8_folder.path, tmp_path / "own")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("linked", [False, True])
def test_foreign_chunks_are_refused_and_left(linked: bool, halves: dict[Any, Path], fp8_folder: Folder, tmp_path: Path):
    """`params` may lead elsewhere, or hold more than the arrays."""
    shutil.copytree(halves[run_convert], tmp_path / "own")
    params = tmp_path / "own" / "params"
    if linked:
        params.rename(tmp_path / "elsewhere")
        params.symlink_to(tmp_path / "elsewhere")
    else:
        (params / "novel.txt").write_text(NOVEL)
    before = everything(tmp_path)
    with pytest.raises(InputError, match="holds params beside" if linked else r"params: holds novel\.txt beside"):
        run_convert(fp8_folder.path, tmp_path / "own")
    assert everything(tmp_path) == before


def test_a_shard_that_an_export_did_not_write_stays(halves: dict[Any, Path], fp8_folder: Folder, tmp_path: Path):
    shutil.copytree(halves[run_export], tmp_path / "own")
    shard = sorted((tmp_path / "own").glob("*.safetensors"))[0]
    shutil.copy(fp8_folder.path / fp8_folder.files[-1], shard)
    before = shard.read_bytes()
    with pytest.raises(InputError, match="holds other tensors than this export writes there"):
        run_export(fp8_folder.path, tmp_path / "own")
    assert shard.read_bytes() == before


@pytest.mark.parametrize("run", RUNS)
def test_our_own_is_gone_on_with_through_a_link(run: Run, halves: dict[Any, Path], fp8_folder: Folder, tmp_path: Path):
    shutil.copytree(halves[run], tmp_path / "there")
    (tmp_path / "own").symlink_to(tmp_path / "there")
    run(fp8_folder.path, tmp_path / "own")
    run(fp8_folder.path, tmp_path / "whole")
    assert contents(tmp_path / "there") == contents(tmp_path / "whole")
    assert not (tmp_path / "there" / UNFINISHED).exists()


def test_a_finished_one_is_cleared_up_of_ours_only(halves: dict[Any, Path], fp8_folder: Folder, tmp_path: Path):
    """As after a stop between the manifest and that, when a user has put something there since."""
    run_convert(fp8_folder.path, tmp_path / "own")
    shutil.copytree(halves[run_convert] / UNFINISHED, tmp_path / "own" / UNFINISHED)
    (tmp_path / "own" / UNFINISHED / "novel.txt").write_text(NOVEL)
    (tmp_path / "own" / UNFINISHED / "notes").mkdir()
    assert (tmp_path / "own" / MANIFEST).exists()
    with pytest.raises(InputError, match=r"unfinished: holds notes, expected"):
        run_convert(fp8_folder.path, tmp_path / "own")
    (tmp_path / "own" / UNFINISHED / "settings.json").unlink()
    run_convert(fp8_folder.path, tmp_path / "own")
    assert (tmp_path / "own" / UNFINISHED / "novel.txt").read_text() == NOVEL


@pytest.mark.parametrize("begun", [b"", b'{\n "format": "gl', b'{\n "format": "glm52-unfinished",\n "comm'])
def test_one_that_was_stopped_while_it_began_goes_on(
    begun: bytes, fp8_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("glm52_jax.checkpoint.journal.journal._WAIT", 0.05)
    (tmp_path / "own" / UNFINISHED).mkdir(parents=True)
    (tmp_path / "own" / UNFINISHED / "settings.json").write_bytes(begun)
    (tmp_path / "own" / UNFINISHED / "settings.json.0a1b2c3d").write_bytes(begun)
    run_convert(fp8_folder.path, tmp_path / "own")
    assert not (tmp_path / "own" / UNFINISHED).exists()


# Other writers.


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("linked", [False, True])
def test_written_parameters_go_over_no_file(
    name: str, linked: bool, config: ModelConfig, params: dict[str, Any], tmp_path: Path
):
    (tmp_path / "own").mkdir()
    if linked:
        (tmp_path / "own" / name).symlink_to("gone")
    else:
        (tmp_path / "own" / name).write_text(NOVEL)
    before = everything(tmp_path)
    with pytest.raises(InputError, match=rf"{name}: is there already, expected a folder without a checkpoint"):
        write_checkpoint(tmp_path / "own", config, params)
    assert everything(tmp_path) == before


def test_names_of_what_is_not_whole_are_nobodys(config: ModelConfig, params: dict[str, Any], tmp_path: Path):
    for name in ("config.json.unfinished", "model.safetensors.unfinished", "tokenizer.json.unfinished"):
        (tmp_path / name).write_text(NOVEL)
    write_checkpoint(tmp_path, config, params)
    write_byte_tokenizer(tmp_path, vocab_size=320)
    assert all(path.read_text() == NOVEL for path in tmp_path.glob("*.unfinished"))
    assert len(list(tmp_path.glob("*.unfinished"))) == 3


def test_a_tokenizer_goes_over_no_other(tmp_path: Path):
    write_byte_tokenizer(tmp_path)
    write_byte_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(NOVEL)
    with pytest.raises(InputError, match=r"tokenizer\.json: is there already with another content"):
        write_byte_tokenizer(tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == NOVEL


@pytest.mark.parametrize("name", ["novel.json", "novel.md"])
def test_a_report_goes_over_reports_only(name: str, tmp_path: Path):
    report = SelftestReport({})
    report.write(checked_path(tmp_path / name))
    report.write(checked_path(tmp_path / name))
    for text in (NOVEL, json.dumps({"theme": "dark"}), "# Notes\n"):
        (tmp_path / name).write_text(text)
        with pytest.raises(InputError, match="is there already and is no report of a selftest"):
            checked_path(tmp_path / name)
