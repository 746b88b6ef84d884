"""docs/tour.md is run as a reader would run it: every command and program, in order, with the outputs that it shows."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.needs import package
from tests.quick_flags import quick_flags
from tests.test_readme import ROOT

PAGE = ROOT / "docs" / "tour.md"
_FENCE = re.compile(r"^```(sh|text|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Texts of random weights and their token ids, rates and cosines, which depend on the machine.
_OTHERWISE = re.compile(r"greedy:|sampled:|tok/s|cosine|^\[\d|^'|│|ms$")


def comparable(text: str) -> list[str]:
    """The lines that every machine prints, with runs of spaces and rules as one."""
    lines = [re.sub(r"─+", "─", re.sub(r"\s+", " ", line.strip())) for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("$") and not _OTHERWISE.search(line)]


def _begins(line: str, shown: str) -> bool:
    """Whether a line is the one shown, which may be cut with "..."."""
    return line.startswith(shown.removesuffix("...")) if shown.endswith("...") else line == shown


def runs(kind: str, block: str) -> list[list[str]]:
    """Command lines of a block: a program, the lines of a shell, or what stands behind a prompt in an output."""
    if kind == "python":
        return [[sys.executable, "-c", block]]
    lines = block.replace("\\\n", " ").splitlines()
    if kind == "text":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [["sh", "-c", line] for line in lines if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `glm52` in `bin`."""
    folder = tmp_path_factory.mktemp("tour")
    command = folder / "bin" / "glm52"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m glm52_jax "$@"\n')
    command.chmod(0o755)
    return folder


@pytest.mark.slow
def test_the_tour(folder: Path) -> None:
    package("libtpu")
    own = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": quick_flags(),
        "COLUMNS": "200",
    }
    program, printed = "", ""
    for kind, block in _FENCE.findall(PAGE.read_text(encoding="utf-8")):
        if kind == "python":
            program = block = program + block  # a reader's session goes on
        for command in runs(kind, block):
            if command[-1].startswith("export "):
                name, _, value = command[-1].removeprefix("export ").partition("=")
                own |= {name: f"{quick_flags()} {value}"} if name == "XLA_FLAGS" else {}
                continue
            found = subprocess.run(
                command, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=600, check=False
            )
            assert found.returncode == 0, f"{command[-1]}: {found.stderr}"
            printed += found.stdout + found.stderr
        if kind == "text":
            there = comparable(printed)
            missing = [line for line in comparable(block) if not any(_begins(other, line) for other in there)]
            assert missing == [], printed
            printed = ""
