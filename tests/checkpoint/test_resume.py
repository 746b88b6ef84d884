"""Whatever stops a conversion, the same command goes on, and the end is byte for byte what it would have been."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from orbax import checkpoint as orbax

from glm52_jax import load_params
from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.export.export import export
from glm52_jax.checkpoint.export.export import plan as plan_export
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.formats.orbax_layout import CHUNK_BYTES
from glm52_jax.checkpoint.journal import workers
from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.io.unfinished import MANIFEST, UNFINISHED
from glm52_jax.verification.verify import verify
from sharding.errors import InputError
from tests.checkpoint.builders import FP8, Folder, random_params, small_config
from tests.checkpoint.conversions import contents, run_convert

ROOT = Path(__file__).parents[2]
OPTIONS = ("--unit-size", "20kB", "--chunk-size", "8192")
# Says so when it begins to write, so that a kill falls into the writing and not into the imports.
CHILD = """
import sys
from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.convert import conversion
from tests.checkpoint.conversions import NoOrbax
conversion.OrbaxView = NoOrbax
run = conversion.run
def begin(*arguments, **keywords):
    print("begin", flush=True)
    return run(*arguments, **keywords)
conversion.run = begin
commands.convert(sys.argv[1:])
"""


def start(*arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD, *map(str, arguments), *OPTIONS]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() in ("begin\n", "")
    return child


def finish(child: subprocess.Popen[str]) -> str:
    _, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    return errors


def kill_after(child: subprocess.Popen[str], seconds: float) -> bool:
    """Whether it was still running then."""
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        child.wait()
    child.communicate()
    return child.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """float8 blocks in some shards, of few layers and experts. Not to be changed."""
    path = tmp_path_factory.mktemp("source") / "c"
    config = small_config(
        num_hidden_layers=2,
        indexer_types=("full", "shared"),
        mlp_layer_types=("dense", "sparse"),
        n_routed_experts=4,
        quantization=FP8,
    )
    write_checkpoint(path, config, random_params(config), shard_bytes=100_000)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, source: Path) -> tuple[Path, float]:
    """An uninterrupted conversion of `source`, and how long its writing took. Not to be changed."""
    path = tmp_path_factory.mktemp("whole") / "c"
    child = start(source, path)
    begin = time.monotonic()
    finish(child)
    return path, time.monotonic() - begin


def killed(kills: int, source: Path, place: Path, whole: tuple[Path, float]) -> list[int]:
    """Conversions, each killed until it ends by itself; how many tensors were done at each kill."""
    rng, expected = random.Random(kills), contents(whole[0])
    found: list[int] = []
    for number in range(10 * kills):
        destination = place / str(number)
        while not (destination / MANIFEST).exists():
            if not kill_after(start(source, destination), rng.uniform(0, whole[1])):
                continue
            found.append(sum(len(json.loads(line)) for line in journal(destination)))
        finish(start(source, destination))  # clears up, if it was killed between the manifest and that
        assert contents(destination) == expected
        shutil.rmtree(destination)
        if len(found) >= kills:
            return found
    raise AssertionError(f"only {len(found)} of {kills} kills fell into a conversion")


def journal(destination: Path) -> list[bytes]:
    lines = [f.read_bytes() for f in (destination / UNFINISHED).glob("done-*.jsonl")]
    return [line for text in lines for line in text.split(b"\n")[:-1]]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "kills", [pytest.param(4, id="a-few"), pytest.param(100, id="a-hundred", marks=pytest.mark.trials)]
)
def test_a_killed_conversion_goes_on(tmp_path: Path, source: Path, whole: tuple[Path, float], kills: int):
    found = killed(kills, source, tmp_path, whole)
    print(f"{len(found)} kills; tensors done at each: {found}")
    assert any(done > 0 for done in found)


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [pytest.param(2), pytest.param(100, marks=pytest.mark.trials)])
def test_one_of_two_processes_is_killed(tmp_path: Path, source: Path, whole: tuple[Path, float], rounds: int):
    rng, kills = random.Random(rounds), 0
    for number in range(rounds):
        destination = tmp_path / str(number)
        children = [start(source, destination, "--process", f"{i}/2") for i in (1, 2)]
        victim = rng.randrange(2)
        was_killed = kill_after(children[victim], rng.uniform(0, whole[1] / 2))
        kills += was_killed
        finish(children[1 - victim])
        if was_killed and not (destination / MANIFEST).exists():
            with pytest.raises(InputError, match=r"is not finished; `glm52 convert .*` goes on"):
                load_params(destination)
        finish(start(source, destination, "--process", f"{victim + 1}/2"))
        assert contents(destination) == contents(whole[0])
        shutil.rmtree(destination)
    print(f"{kills} of {rounds} killed")


class StopError(Exception):
    """Ends a conversion where a test wants it to end."""


@pytest.fixture
def half(tmp_path: Path, fp8: Folder, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A conversion of `fp8` that was stopped half way."""
    left = threading.Semaphore(4)
    unit = conversion._Writer.unit

    def stopping(*arguments: Any) -> None:
        if not left.acquire(blocking=False):
            raise StopError
        unit(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(conversion._Writer, "unit", stopping)
        with pytest.raises(StopError):
            run_convert(fp8.path, tmp_path / "half")
    return tmp_path / "half"


def test_only_what_is_left_is_done(fp8: Folder, half: Path, tmp_path: Path):
    done = {name for line in journal(half) for name in json.loads(line)}
    assert len(done) > 20
    written = {f: f.stat().st_mtime_ns for f in (half / "params").rglob("*") if f.is_file()}
    result = run_convert(fp8.path, half)
    run_convert(fp8.path, tmp_path / "whole")
    assert contents(half) == contents(tmp_path / "whole")
    unchanged = [f for f, time_ns in written.items() if f.stat().st_mtime_ns == time_ns]
    assert len(unchanged) >= len(done)
    total = sum(len(data) for name, data in contents(half / "params").items() if "/c/" in name)
    assert 0 < result.account.bytes < total


def test_an_unfinished_one_is_refused_by_every_reader(fp8: Folder, half: Path, tmp_path: Path):
    sentence = (
        rf"half: is not finished; `glm52 convert {fp8.path} {half} --chunk-size 8192` goes on where it was stopped"
    )
    for read in (
        lambda: load_params(half),
        lambda: verify(open_checkpoint(half), open_checkpoint(fp8.path)),
        lambda: plan_export(half, tmp_path / "out", ConversionOptions()),
        lambda: conversion.plan(half, tmp_path / "out", ConversionOptions()),
    ):
        with pytest.raises(InputError, match=sentence):
            read()
    with orbax.StandardCheckpointer() as checkpointer, pytest.raises((ValueError, FileNotFoundError)):
        checkpointer.restore(half / "params")


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"layers": (0,)}, {"chunk_bytes": 4096}])
def test_other_settings_are_refused(fp8: Folder, half: Path, settings: dict[str, Any]):
    before = contents(half)
    with pytest.raises(InputError, match=r"half: was begun with .*; finish it with `glm52 convert"):
        run_convert(fp8.path, half, **settings)
    assert contents(half) == before


def test_another_source_is_refused(plain: Folder, half: Path):
    with pytest.raises(InputError, match="was begun with source "):
        run_convert(plain.path, half)


def test_a_source_that_goes_away_can_come_back(
    fp8: Folder, half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    planned = conversion.plan(fp8.path, half, ConversionOptions(chunk_bytes=8192))
    fp8.path.rename(tmp_path / "away")
    with pytest.raises(InputError, match=r"model-0000\d-of-00005.safetensors: can no longer be read"):
        conversion.convert(planned)
    (tmp_path / "away").rename(fp8.path)
    assert run_convert(fp8.path, half).left == 0
    run_convert(fp8.path, tmp_path / "whole")
    assert contents(half) == contents(tmp_path / "whole")


def test_a_source_that_is_cut_while_it_is_read(fp8: Folder, half: Path):
    planned = conversion.plan(fp8.path, half, ConversionOptions(chunk_bytes=8192))
    for file in fp8.files:
        os.truncate(fp8.path / file, 60_000)
    with pytest.raises(InputError, match="60000 bytes, too short"):
        conversion.convert(planned)


def test_two_processes_do_not_do_the_same_part(fp8: Folder, half: Path):
    work = conversion.JournalFolder(half)
    with (
        work.taking_part("process-1-of-1"),
        pytest.raises(InputError, match="another process is working on process-1-of-1"),
    ):
        run_convert(fp8.path, half)


def test_half_a_line_of_the_journal_does_not_count(fp8: Folder, half: Path, tmp_path: Path):
    (file,) = (half / UNFINISHED).glob("done-*.jsonl")
    file.write_bytes(file.read_bytes()[:-7])
    run_convert(fp8.path, half)
    run_convert(fp8.path, tmp_path / "whole")
    assert contents(half) == contents(tmp_path / "whole")


def test_a_chunk_that_was_lost_is_done_again(fp8: Folder, half: Path, tmp_path: Path):
    files = sorted(f for f in (half / "params").rglob("*") if f.is_file())
    files[3].unlink()
    os.truncate(files[5], 10)
    run_convert(fp8.path, half)
    run_convert(fp8.path, tmp_path / "whole")
    assert contents(half) == contents(tmp_path / "whole")


# Disks.


def test_too_little_room_is_found_out_before(plain: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(InputError, match=r"the disk has 1.00 kB free, expected 2.24 MB for what is left"):
            run_convert(plain.path, tmp_path / "out")
    assert run_convert(plain.path, tmp_path / "out").left == 0


FILLED = """
import resource, signal, sys
from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.export.write import write_checkpoint
from sharding.errors import InputError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
try:
    commands.convert(sys.argv[1:])
except InputError as error:
    print(error)
"""


def test_a_disk_that_is_full_is_one_sentence(plain: Folder, tmp_path: Path):
    """The system's own error, by a limit on the size of a file."""
    command = [sys.executable, "-c", FILLED, str(plain.path), str(tmp_path / "out")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    sentence = f"{tmp_path / 'out'}: cannot be written, the file is too large; when it can, the same command goes on"
    assert result.stdout.startswith(sentence), result.stderr
    assert result.stdout.count("\n") == 1
    assert run_convert(plain.path, tmp_path / "out", chunk_bytes=CHUNK_BYTES).left == 0


@pytest.mark.parametrize("full_after", [0, 30_000, 400_000])
def test_no_space_is_left(plain: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_after: int):
    """The same with the other error, after some bytes were written."""
    written = 0
    write = conversion._Chunks.write

    def filling(self: Any, data: memoryview) -> None:
        nonlocal written
        written += len(data)
        if written > full_after:
            raise OSError(28, "No space left on device")
        write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(conversion._Chunks, "write", filling)
        with pytest.raises(InputError, match="out: cannot be written, the disk is full; when it can"):
            run_convert(plain.path, tmp_path / "out")
    run_convert(plain.path, tmp_path / "out")
    run_convert(plain.path, tmp_path / "whole")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


# Export.


def test_an_export_goes_on(converted_plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    planned = plan_export(converted_plain, tmp_path / "out", ConversionOptions(), shard_bytes=200_000)
    left = threading.Semaphore(3)
    run = workers.run

    def stopping(units: Any, work: Any, **keywords: Any) -> Any:
        def unit(*arguments: Any) -> None:
            if not left.acquire(blocking=False):
                raise StopError
            work(*arguments)

        return run(units, unit, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr("glm52_jax.checkpoint.export.export.run", stopping)
        with pytest.raises(StopError):
            export(planned)
    assert not (tmp_path / "out" / "config.json").exists()
    with pytest.raises(InputError, match=r"out: is not finished; `glm52 export .* --shard-size 200000` goes on"):
        load_params(tmp_path / "out")
    with pytest.raises(InputError, match="was begun with shard_bytes 200000, and now it is 300000"):
        export(plan_export(converted_plain, tmp_path / "out", ConversionOptions(), shard_bytes=300_000))
    times = {f: f.stat().st_mtime_ns for f in (tmp_path / "out").glob("*.safetensors")}
    assert 1 <= len(times) <= 3  # a unit that was in flight may or may not have been finished
    export(plan_export(converted_plain, tmp_path / "out", ConversionOptions(), shard_bytes=200_000))
    assert {f: f.stat().st_mtime_ns for f in times} == times
    export(plan_export(converted_plain, tmp_path / "whole", ConversionOptions(), shard_bytes=200_000))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.fixture
def converted_plain(tmp_path: Path, plain: Folder) -> Path:
    run_convert(plain.path, tmp_path / "converted")
    return tmp_path / "converted"
