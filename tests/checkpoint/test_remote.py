"""A source in a bucket, by fsspec's own stand-ins for one."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from click.testing import CliRunner

from glm52_jax.checkpoint import commands
from glm52_jax.checkpoint.sources import remote
from glm52_jax.checkpoint.sources.open_source import opened
from glm52_jax.verification import command
from sharding.errors import InputError
from tests.checkpoint.builders import Folder
from tests.checkpoint.conversions import contents, run_convert


@pytest.fixture
def bucket(fp8_folder: Folder) -> Generator[str, None, None]:
    """The FP8 checkpoint in memory."""
    files = fsspec.filesystem("memory")
    for name, data in contents(fp8_folder.path).items():
        files.pipe(f"/models/glm/{name}", data)
    yield "memory://models/glm"
    files.rm("/models", recursive=True)


def invoke(command: Any, *arguments: Any) -> Any:
    return CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_a_bucket_is_converted_like_a_folder(tmp_path: Path, bucket: str, fp8_folder: Folder, dtype: str):
    options = ("--dtype", dtype, "--chunk-size", "8192")
    result = invoke(commands.convert, bucket, tmp_path / "c", *options)
    assert result.exit_code == 0, result.output
    run_convert(fp8_folder.path, tmp_path / "expected", dtype=dtype)
    assert contents(tmp_path / "c") == contents(tmp_path / "expected")
    assert invoke(command.verify, tmp_path / "c", "--against", bucket).exit_code == 0


def test_a_file_url_is_a_folder(tmp_path: Path, fp8_folder: Folder):
    result = invoke(commands.convert, f"file://{fp8_folder.path}", tmp_path / "c")
    assert result.exit_code == 0, result.output


def test_values_are_read_in_few_requests(
    tmp_path: Path, bucket: str, fp8_folder: Folder, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    request = remote._request

    def counting(path: str, ask: Any) -> Any:
        got = request(path, ask)
        asked.append(len(got))
        return got

    with opened(bucket) as source:
        stand_in = sum(f.stat().st_blocks * 512 for f in source.folder.iterdir())
        monkeypatch.setattr(remote, "_request", counting)
        name = "model.embed_tokens.weight"
        size = source.entry(name).stop - source.entry(name).start
        values = bytearray(size)
        for at in range(0, size, 1000):
            source.pread(name, at, memoryview(values)[at : at + 1000])
    assert asked == [size]
    assert bytes(values) == fp8_folder.tensors()[name].tobytes()
    assert stand_in < sum((fp8_folder.path / f).stat().st_size for f in fp8_folder.files)
    assert not source.folder.exists()


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("memory://models/nothing", "memory://models/nothing: is not there|nothing: is not there"),
        ("nonsense://models", "nonsense://models: is no place that can be read"),
    ],
)
def test_a_place_that_is_not_there_is_one_sentence(tmp_path: Path, url: str, sentence: str):
    result = invoke(commands.convert, url, tmp_path / "c")
    assert isinstance(result.exception, InputError)
    with pytest.raises(InputError, match=sentence):
        raise result.exception
    assert not (tmp_path / "c").exists()


def test_sentences_name_the_url(tmp_path: Path, bucket: str):
    files = fsspec.filesystem("memory")
    file = "/models/glm/model-00003-of-00005.safetensors"
    files.pipe(file, files.cat_file(file)[:-1])
    result = invoke(commands.convert, bucket, tmp_path / "c")
    assert str(result.exception).startswith(f"{bucket}/model-00003-of-00005.safetensors: ")
    assert "but its header describes" in str(result.exception)


def test_a_request_is_made_again_and_then_given_up(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    monkeypatch.setattr(remote.time, "sleep", pauses.append)
    answers = iter([OSError("reset"), OSError("reset"), b"data"])

    def ask() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert remote._request("x", ask) == b"data"
    assert pauses == [1.0, 4.0]
    answers = iter([OSError("reset")] * 4)
    with pytest.raises(InputError, match="x: can no longer be read"):
        remote._request("x", ask)


def test_a_hub_id_is_told_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert remote.remote_url("zai-org/GLM-5.2") == "hf://zai-org/GLM-5.2"
    assert remote.remote_url("zai-org/GLM-5.2@main") == "hf://zai-org/GLM-5.2@main"
    assert remote.remote_url("gs://bucket/path") == "gs://bucket/path"
    (tmp_path / "zai-org" / "GLM-5.2").mkdir(parents=True)
    for local in ("zai-org/GLM-5.2", "GLM-5.2", "/a/b", "../x", "a/b/c", f"file://{tmp_path}"):
        assert remote.remote_url(local) is None
    (tmp_path / "file").write_text("")
    assert remote.remote_url("file/x") is None
