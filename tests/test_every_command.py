"""Every command with each kind of name that cannot be used, and with files that the system refuses: one sentence."""

import builtins
import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.cli import COMMANDS, run
from glm52_jax.config import BUILT_IN
from glm52_jax.text import write_byte_tokenizer
from tests.checkpoint.builders import random_params, small_config
from tests.needs import package

NAMES = {
    "too long": "a" * 300,
    "a path too long": "/".join(["b" * 200] * 30),
    "NUL": "a\0b",
    "no UTF-8": os.fsdecode(b"\xff\xfe"),
    "half a pair": "a\ud800",
    "a line break": "a\nb",
    "markup": "out[/v2]x",
    "an escape": "a\x1b[2Jb",
    "empty": "",
    "a file": "./FILE",
    "below a file": "./FILE/x",
    "a loop": "LOOP",
    "a dead link": "DEAD",
    "a device": "/dev/null",
    "no such folder": "/proc/nowhere/x",
}
READING = {
    "chat": [["chat", "NAME"], ["chat", "CHECKPOINT", "--layout", "NAME.toml"]],
    "convert": [["convert", "NAME", "new"]],
    "export": [["export", "NAME", "new"]],
    "generate": [["generate", "NAME", "x"], ["generate", "CHECKPOINT", "x", "--layout", "NAME.toml"]],
    "inspect": [["inspect", "NAME"]],
    "plan": [
        ["plan", "NAME", "--topology", "v5e:2x2"],
        ["plan", "glm-5.2", "--topology", "NAME"],
        ["plan", "glm-5.2", "--topology", "v5e:2x2", "--layout", "NAME.toml"],
    ],
    "precision": [["precision", "NAME"], ["precision", "CHECKPOINT", "--tokens", "NAME"]],
    "verify": [["verify", "NAME", "--against", "CHECKPOINT"], ["verify", "CHECKPOINT", "--against", "NAME"]],
}
WRITING = {
    "convert": [["convert", "CHECKPOINT", "NAME"]],
    "demo": [["demo", "NAME"]],
    "generate": [["generate", "CHECKPOINT", "x", "--profile", "NAME"]],
    "plan": [["plan", "glm-5.2", "--topology", "v5e:2x2", "--plot", "NAME.png"]],
    "selftest": [["selftest", "--report", "NAME.json"]],
}
UNWRITABLE = ("too long", "a path too long", "NUL", "half a pair", "below a file", "no such folder")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every") / "checkpoint"
    vocab = BUILT_IN["glm-5.2-tiny"].vocab_size
    config = small_config(
        vocab_size=vocab, num_hidden_layers=1, indexer_types=("full",), mlp_layer_types=("dense",)
    ).without_mtp()
    write_checkpoint(folder, config, random_params(config))
    write_byte_tokenizer(folder, vocab_size=vocab)
    return folder


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file and links that lead nowhere."""
    (tmp_path / "FILE").write_text("no checkpoint")
    (tmp_path / "LOOP").symlink_to("LOOP")
    (tmp_path / "DEAD").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    return tmp_path


def refused(arguments: list[str], checkpoint: Path, name: str, said: pytest.CaptureFixture[str]) -> str:
    """The sentence with which a command ends; nothing but it, and exit code 2."""
    code = run([part.replace("NAME", name).replace("CHECKPOINT", str(checkpoint)) for part in arguments])
    out, err = said.readouterr()
    sentence = err.splitlines()[-1]
    assert (code, out) == (2, ""), err
    assert sentence.startswith("glm52: ")
    assert err.count("glm52: ") == 1
    assert "Traceback" not in err
    return sentence


def test_every_command_is_tried() -> None:
    assert {*READING, *WRITING} == set(COMMANDS)


@pytest.mark.parametrize("command", READING)
@pytest.mark.usefixtures("places")
def test_names_that_cannot_be_read(command: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, name in NAMES.items():
        for arguments in READING[command]:
            if kind == "empty" and "--tokens" not in arguments and "NAME" not in arguments:
                continue
            assert refused(arguments, checkpoint, name, capsys), kind


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.usefixtures("places")
def test_names_that_cannot_be_written(
    command: str, checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any weight is read and any step compiled."""
    if command == "plan":
        package("matplotlib")
    monkeypatch.setattr("glm52_jax.checkpoint.load.loader.load_with_report", lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr("infer.commands.demo._run", lambda *_: pytest.fail("begun"))
    monkeypatch.setattr("infer.planning.command._made", lambda *_: pytest.fail("compiled"))
    for kind in UNWRITABLE:
        for arguments in WRITING[command]:
            assert refused(arguments, checkpoint, NAMES[kind], capsys), kind


def refusing(monkeypatch: pytest.MonkeyPatch, folder: Path, number: int) -> None:
    """Files below a folder give an error of the system, whatever is done with them; tests may run as root."""

    def patched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if str(text).startswith(f"{folder}/"):
                raise OSError(number, os.strerror(number), text)
            return function(path, *arguments, **options)

        return call

    for module, names in (
        (os, ("open", "stat", "mkdir", "scandir", "listdir")),
        (io, ("open",)),
        (builtins, ("open",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, patched(getattr(module, name)))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("command", READING)
def test_files_that_the_system_refuses(
    command: str, number: int, checkpoint: Path, places: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (places / "refused").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        refusing(patch, places / "refused", number)
        for arguments in READING[command]:
            name = "refused" if arguments[-1] == "NAME" and arguments[1] == "NAME" else "refused/x"
            refused(arguments, checkpoint, str(places / name), capsys)
