"""Storage that refuses what a local disk does is worked with; one that fails is one sentence, and a rerun ends it."""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.formats.orbax_layout import CHUNK_BYTES
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.io.unfinished import MANIFEST, UNFINISHED
from sharding.errors import InputError
from tests.checkpoint.builders import FP8, random_params, small_config
from tests.checkpoint.conversions import contents, run_convert, run_export, tensors

Run = Callable[[Path, Path], Any]
RUNS = [pytest.param(run_convert, id="convert"), pytest.param(run_export, id="export")]
LINK_ERRORS = ["EPERM", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EXDEV", "EMLINK", "EACCES", "EINVAL"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few layers and experts, float8 blocks, in some shards. Not to be changed."""
    path = tmp_path_factory.mktemp("source") / "c"
    config = small_config(
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        mlp_layer_types=("dense", "sparse"),
        n_routed_experts=2,
        quantization=FP8,
    )
    write_checkpoint(path, config, random_params(config), shard_bytes=100_000)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, source: Path) -> dict[Any, dict[str, bytes]]:
    """What each run makes of `source`."""
    place = tmp_path_factory.mktemp("whole")
    for run in (run_convert, run_export):
        run(source, place / run.__name__)
    return {run: contents(place / run.__name__) for run in (run_convert, run_export)}


def refusing(code: int) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return refuse


def no_mapping(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(np, "memmap", refusing(errno.ENODEV))


def no_locks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(fcntl, "flock", refusing(errno.ENOSYS))


def no_free_space_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))


def no_statistics(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", refusing(errno.ENOSYS))


def no_flushing_of_folders(patch: pytest.MonkeyPatch) -> None:
    def fsync(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")

    patch.setattr(os, "fsync", fsync)


def no_opening_of_folders(patch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def open_file(path: Any, *arguments: Any, **keywords: Any) -> int:
        if os.path.isdir(path):
            raise OSError(errno.EISDIR, "Is a directory")
        return opened(path, *arguments, **keywords)

    patch.setattr(os, "open", open_file)


def no_renaming(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "replace", refusing(errno.ENOSYS))


def no_renaming_between_folders(patch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def within(part: Any, path: Any) -> None:
        if Path(part).parent != Path(path).parent:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        replace(part, path)

    patch.setattr(os, "replace", within)


def nothing_of_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "link", refusing(errno.EPERM))
    for refusal in (no_mapping, no_locks, no_statistics, no_flushing_of_folders, no_renaming):
        refusal(patch)


REFUSALS = [
    no_mapping,
    no_locks,
    no_free_space_known,
    no_statistics,
    no_flushing_of_folders,
    no_opening_of_folders,
    no_renaming,
    no_renaming_between_folders,
    nothing_of_it,
]


@pytest.mark.quick(3)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("code", LINK_ERRORS)
def test_hard_links_are_not_needed(
    run: Run, code: str, source: Path, whole: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "link", refusing(getattr(errno, code)))
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole[run]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_a_mount_refuses_is_not_needed(
    run: Run,
    refusal: Callable[[pytest.MonkeyPatch], None],
    source: Path,
    whole: dict[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    refusal(monkeypatch)
    run(source, tmp_path / "out")
    assert contents(tmp_path / "out") == whole[run]
    assert tensors(tmp_path / "out").keys() == tensors(source).keys()


@pytest.mark.parametrize("refusal", [None, nothing_of_it])
def test_two_processes_share_the_work_without_links(
    refusal: Callable[[pytest.MonkeyPatch], None] | None,
    source: Path,
    whole: dict[Any, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each sees what the other began with, and the one with other settings is refused."""
    monkeypatch.setattr(os, "link", refusing(errno.EPERM))
    if refusal is not None:
        refusal(monkeypatch)
    plans = [conversion.plan(source, tmp_path / "out", ConversionOptions(chunk_bytes=8192)) for _ in range(2)]
    other = conversion.plan(source, tmp_path / "out", ConversionOptions(dtype="bfloat16"))
    assert conversion.convert(plans[0], process=(1, 2)).left > 0
    with pytest.raises(InputError, match="was begun with dtype 'keep', and now it is 'bfloat16'"):
        conversion.convert(other, process=(2, 2))
    assert conversion.convert(plans[1], process=(2, 2)).left == 0
    assert contents(tmp_path / "out") == whole[run_convert]


def test_one_finishes_while_the_other_does(
    source: Path, whole: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Without locks: what is noted as done goes away under the hands of the second."""
    no_locks(monkeypatch)
    plans = [conversion.plan(source, tmp_path / "out", ConversionOptions(chunk_bytes=8192)) for _ in range(2)]
    finish = conversion._finish

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(conversion, "_finish", finish)
        assert conversion.convert(plans[1]).left == 0
        return finish(*arguments)

    monkeypatch.setattr(conversion, "_finish", late)
    assert conversion.convert(plans[0]).left == 0
    assert contents(tmp_path / "out") == whole[run_convert]


# Storage that fails.


def failing_at(number: int, code: int) -> tuple[Callable[[int], None], list[bool]]:
    """A flush that fails at its n-th call from the end on, and which calls were of folders."""
    calls: list[bool] = []

    def fsync(file: int) -> None:
        calls.append(stat.S_ISDIR(os.fstat(file).st_mode))
        if len(calls) == number:
            raise OSError(code, os.strerror(code))

    return fsync, calls


@pytest.mark.quick(2)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_flush_that_fails_is_one_sentence_and_a_rerun_ends_it(
    run: Run, code: int, source: Path, whole: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fsync, calls = failing_at(0, code)
    monkeypatch.setattr(os, "fsync", fsync)
    run(source, tmp_path / "count")
    count = len(calls)
    assert calls[-1]  # the last is of the destination
    numbers = {1, 2, *(count - back for back in range(6)), *range(3, count, max(1, count // 6))}
    for number in sorted(numbers if code == errno.EIO else {1, count // 2, count - 1, count}):
        destination = tmp_path / str(number)
        monkeypatch.setattr(os, "fsync", failing_at(number, code)[0])
        with pytest.raises(InputError, match="cannot be written, ") as error:
            run(source, destination)
        assert "\n" not in str(error.value)
        with pytest.raises(InputError, match="is not finished; `glm52 " if number > 1 else "holds neither"):
            open_checkpoint(destination)
        monkeypatch.setattr(os, "fsync", lambda _: None)
        run(source, destination)
        assert contents(destination) == whole[run], number
        assert not (destination / UNFINISHED).exists()
        shutil.rmtree(destination)


def test_a_flush_of_a_file_that_says_nothing_fails(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """EINVAL is what a folder may answer, a file not."""
    monkeypatch.setattr(os, "fsync", refusing(errno.EINVAL))
    with pytest.raises(InputError, match="cannot be written, Invalid argument"):
        run_convert(source, tmp_path / "out")


def test_the_command_says_so_and_ends_with_an_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fsync, calls = failing_at(0, errno.EIO)
    monkeypatch.setattr(os, "fsync", fsync)
    run_convert(source, tmp_path / "count", chunk_bytes=CHUNK_BYTES)
    work = len(calls)
    for back in (0, 1):
        monkeypatch.setattr(os, "fsync", failing_at(work - back, errno.EIO)[0])
        result = CliRunner().invoke(
            commands.convert, [str(source), str(tmp_path / "out"), "--unit-size", "50000", "--jobs", "1"]
        )
        assert isinstance(result.exception, InputError), result.output
        assert "finished" not in result.output
        assert not (tmp_path / "out" / MANIFEST).exists()
        shutil.rmtree(tmp_path / "out")


def test_written_parameters_fail_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = small_config()
    params = random_params(config)
    fsync, calls = failing_at(0, errno.EIO)
    monkeypatch.setattr(os, "fsync", fsync)
    write_checkpoint(tmp_path / "count", config, params)
    for number in range(1, len(calls) + 1):
        monkeypatch.setattr(os, "fsync", failing_at(number, errno.EIO)[0])
        with pytest.raises(InputError, match="cannot be written, Input/output error"):
            write_checkpoint(tmp_path / str(number), config, params)
        assert not list((tmp_path / str(number)).glob("*.part"))
