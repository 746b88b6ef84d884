"""The command table and the imports behind it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest

import glm52_jax
from glm52_jax.cli import COMMANDS, glm52, run
from glm52_jax.own_imports import import_ours
from sharding.errors import InputError

ROOT = Path(__file__).parents[1]


def test_every_command_resolves() -> None:
    context = click.Context(glm52)
    for name in COMMANDS:
        command = glm52.get_command(context, name)
        assert command is not None
        assert command.help


def test_public_names_are_listed_and_resolve() -> None:
    assert {"forward", "generate", "load_params", "trace"} <= set(dir(glm52_jax))
    for name in glm52_jax.__all__:
        assert getattr(glm52_jax, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'plan_a_trip'"):
        _ = glm52_jax.plan_a_trip


def test_a_file_that_hides_a_floor_is_named(tmp_path: Path) -> None:
    (tmp_path / "infer.py").write_text("")
    code = f"import sys; sys.path.append({str(ROOT)!r}); from glm52_jax.cli import main; sys.argv[1:] = ['chat', 'x']"
    result = subprocess.run(
        [sys.executable, "-c", code + "; main()"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("glm52: the package infer of glm52-jax is hidden by ")
    assert "infer.py" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_our_own_floors_are_found() -> None:
    assert import_ours("infer.sampling").__name__ == "infer.sampling"
    with pytest.raises(InputError, match="hidden by an empty folder"):
        import_ours("no_such_package")


ERRORS = [
    (OSError(errno.ENAMETOOLONG, "File name too long", "x"), "glm52: x: File name too long"),
    (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"), "glm52: a -> b: Invalid cross-device link"),
    (PermissionError(errno.EACCES, "Permission denied", "a\nb\udcff"), "glm52: a\\nb\\udcff: Permission denied"),
    (OSError(errno.ENOSPC, "No space left on device"), "glm52: the system: No space left on device"),
    (OSError("the library's own words\nand more"), "glm52: the library's own words"),
    (MemoryError(), "glm52: out of memory"),
    (MemoryError("Unable to allocate 3.64 TiB"), "glm52: out of memory: Unable to allocate 3.64 TiB"),
    (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), "glm52: out of memory: Out of memory"),
    (FloatingPointError("invalid value (nan) encountered in mul"), "glm52: a value is no finite number: invalid"),
    (ValueError("Exceeds the limit (4300 digits) for integer string conversion"), "glm52: a number has more than 4300"),
    (ValueError("embedded null byte"), "glm52: a file name holds a NUL byte"),
    (UnicodeEncodeError("utf-8", "a\ud800", 1, 2, "surrogates not allowed"), "glm52: a text is not utf-8"),
    (InputError("a: wrong\x1b[2J"), "glm52: a: wrong\\x1b[2J"),
]


@pytest.mark.parametrize(("error", "said"), ERRORS)
def test_errors_of_the_machine_are_one_sentence(
    error: Exception, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever command they come from, since they come through the same place."""
    assert _run_raising(error, monkeypatch) == 2
    found = capsys.readouterr().err
    assert found.startswith(said)
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize(
    "error", [TypeError("x"), AssertionError(), RuntimeError("bug"), ValueError("bug"), KeyError(1)]
)
def test_faults_of_the_program_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)):
        _run_raising(error, monkeypatch)


def test_interruptions_and_readers_that_leave(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_raising(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err.strip() == "glm52: interrupted"
    assert _run_raising(BrokenPipeError(errno.EPIPE, "Broken pipe"), monkeypatch) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_wrong_command_lines_are_one_sentence(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--nonsense"], ["a\0b"], [os.fsdecode(b"--n\xff[/x]")]):
        assert run([command, *arguments]) == 2
        found = capsys.readouterr().err
        assert found.startswith("glm52: ")
        assert len(found.splitlines()) == 1
    assert "NUL" in str(found) or f"glm52 {command} --help" in found


def _run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    """`glm52 fails`, a command that raises."""

    @click.command
    def fails() -> None:
        raise error

    monkeypatch.setitem(COMMANDS, "fails", ("tests:fails", "Fails."))
    monkeypatch.setattr(glm52, "get_command", lambda *_: fails)
    return run(["fails"])
