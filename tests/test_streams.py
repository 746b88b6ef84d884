"""Standard streams that are closed, full, or not in the encoding they should be in."""

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm52_jax.cli import run
from glm52_jax.io import streams
from glm52_jax.io.streams import read_all, read_line
from sharding.errors import InputError

ROOT = Path(__file__).parents[1]
needs_full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")


def bytes_in(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")


def test_a_line_that_is_not_utf_8_is_refused_and_the_next_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", bytes_in(b"one\n\xff two\n\xed\xa0\x80\nthree \xc3\xa9\n"))
    assert read_line() == "one"
    for _ in range(2):
        with pytest.raises(InputError, match=r"standard input is not utf-8: byte 0x(ff|ed) at character 1$"):
            read_line()
    assert read_line() == "three é"
    with pytest.raises(EOFError):
        read_line()


def test_all_of_an_input_that_is_not_utf_8_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", bytes_in(b"text \xc3\n"))
    with pytest.raises(InputError, match="byte 0xc3 at character 6"):
        read_all()


def test_what_an_encoding_lacks_is_written_as_escapes(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as file:
        stream = streams.writer(file.fileno(), io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
        stream.write("é \udcff")
        stream.flush()
    assert (tmp_path / "out").read_bytes() == b"\\xe9 \\udcff"


class Full(io.StringIO):
    """A stream whose device is full."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "standard output")


def test_a_full_standard_output_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdout", Full())
    for command in (["inspect", "glm-5.2"], ["inspect", "glm-5.2", "--json"], ["--version"], ["plan", "--help"]):
        assert run(command) == 2
        assert capsys.readouterr().err == "glm52: standard output: No space left on device\n"


PROGRAM = """
import sys
from glm52_jax.cli import main
sys.argv[1:] = {arguments}
main()
"""


def program(arguments: list[str], redirections: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """The program as a shell starts it, with its streams redirected."""
    code = PROGRAM.format(arguments=arguments)
    command = ["bash", "-c", f'"$@" {redirections}', "bash", sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False, env=os.environ | environment)


@needs_full
@pytest.mark.parametrize(
    ("arguments", "redirections", "code", "said"),
    [
        (["inspect", "glm-5.2"], "> /dev/full", 2, b"glm52: standard output: No space left on device\n"),
        (["inspect", "glm-5.2"], ">&-", 2, b"glm52: standard output: closed\n"),
        (["inspect", "nowhere"], "2> /dev/full", 2, b""),
        (["inspect", "nowhere"], "<&- >&- 2>&-", 2, b""),
        (["inspect", "glm-5.2"], "| true; exit ${PIPESTATUS[0]}", 1, b""),
    ],
)
def test_streams_of_the_program(arguments: list[str], redirections: str, code: int, said: bytes) -> None:
    """No traceback, no "Exception ignored", no exit code 0 for a result that nobody got."""
    result = program(arguments, redirections)
    assert (result.returncode, result.stderr) == (code, said)


def test_the_program_writes_in_any_encoding(tmp_path: Path) -> None:
    result = program(["inspect", os.fsdecode(b"no\xff\xc3\xa9where")], "", PYTHONIOENCODING="ascii", LC_ALL="C.UTF-8")
    assert (result.returncode, result.stdout) == (2, b"")
    assert result.stderr.startswith(b"glm52: no\\udcff\\xe9where: neither a checkpoint folder")
    assert len(result.stderr.splitlines()) == 1
