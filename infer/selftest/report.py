"""The report to attach to an issue, without anything that says whose machine it was; and the lines on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import getpass
import json
import re
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from glm52_jax.io.files import check_file, is_there, reading, whole_file, writing
from infer.selftest.checks import FAIL, PASS, SKIP, Outcome
from sharding.errors import InputError

DEFAULT_NAME = "glm52-selftest.json"
_SUFFIXES = (".json", ".md")
_BEGINS = {".json": '{\n "glm52_selftest"', ".md": "# glm52 selftest, "}
# A path from the root: at least one folder and a name behind it, and no part of a URL.
_PATH = re.compile(r"(?<![\w:/.)\]}])/(?!/)(?:[^\s\"'`,;:()<>/]+/)+([^\s\"'`,;:()<>/]*)")
# Of a host; versions of libtpu, which begin with 0, have as many numbers.
_ADDRESS = re.compile(r"\b(?!0)\d{1,3}(?:\.\d{1,3}){3}\b(?!\.)")


@dataclasses.dataclass
class SelftestReport:
    """What a run found so far.

    Attributes:
        options: that it was started with.
        outcomes: of the checks that are through.
        running: the check that had begun when this was written; None at the end. It names the culprit of a hang.
    """

    options: dict[str, Any]
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    running: str | None = None

    @property
    def failed(self) -> bool:
        return any(outcome.status == FAIL for outcome in self.outcomes)

    def summary(self) -> str:
        counts = Counter(outcome.status for outcome in self.outcomes)
        seconds = sum(outcome.seconds for outcome in self.outcomes)
        skipped = f", {counts[SKIP]} skipped" if counts[SKIP] else ""
        return f"{counts[PASS]} passed, {counts[FAIL]} failed{skipped} in {seconds:.0f} s"

    def as_json(self) -> dict[str, Any]:
        return anonymous(
            {
                "glm52_selftest": 1,
                "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
                "options": self.options,
                "passed": not self.failed and self.running is None,
                "summary": self.summary(),
                "running": self.running,
                "checks": [dataclasses.asdict(outcome) for outcome in self.outcomes],
            }
        )

    def as_markdown(self) -> str:
        raw = self.as_json()
        options = ", ".join(f"{name} {value}" for name, value in raw["options"].items())
        lines = [f"# glm52 selftest, {raw['date']}: {raw['summary']}", "", f"Options: {options}."]
        if raw["running"]:
            lines += ["", f"Written while this was running: {raw['running']}."]
        lines += ["", "| section | check | result | seconds | figure |", "|---|---|---|---|---|"]
        for check in raw["checks"]:
            figure = check["figure"].replace("|", "\\|")
            status = check["status"].upper() if check["status"] == FAIL else check["status"]
            lines.append(f"| {check['section']} | {check['name']} | {status} | {check['seconds']:.2f} | {figure} |")
        for check in raw["checks"]:
            if check["values"]:
                values = json.dumps(check["values"], default=str)
                lines += ["", f"**{check['section']}: {check['name']}**", "", f"    {values}"]
            if check["traceback"]:
                indented = check["traceback"].rstrip().replace("\n", "\n    ")
                lines += ["", f"## {check['section']}: {check['name']}", "", f"    {indented}"]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        """Writes it whole or not at all; the form is that of the suffix."""
        text = self.as_markdown() if path.suffix == ".md" else json.dumps(self.as_json(), indent=1, default=str) + "\n"
        with writing(path), whole_file(path) as file:
            file.write(text.encode())


def checked_path(path: Path) -> Path:
    """The file for a report.

    Raises:
        InputError: its suffix is not one of a form, there is no folder that it could be in, or a file is there that is
            no report.
    """
    if path.suffix not in _SUFFIXES:
        raise InputError(f"--report {path}: expected a name that ends in {' or '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise InputError(f"--report {path}: no folder to write that file in")
    if is_there(path):
        with reading(path):
            begin = path.read_bytes()[:100].decode(errors="replace")
        if not begin.startswith(_BEGINS[path.suffix]):
            raise InputError(f"--report {path}: is there already and is no report of a selftest; give another name")
        path = path.resolve()
    try:
        check_file(path)
    except InputError as error:
        raise InputError(f"--report {error}") from None
    return path


def line(outcome: Outcome) -> str:
    """An outcome on one line."""
    where = f"{outcome.section}: {outcome.name}"
    return f"{outcome.status}  {outcome.seconds:7.2f} s  {where:<52}  {outcome.figure}"


def anonymous(value: Any) -> Any:
    """The same without names of hosts and users, addresses and folders, in every text of nested lists and tables."""
    names = _own_names()

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            return _clean_text(value, names)
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        return [clean(item) for item in value] if isinstance(value, list | tuple) else value

    return clean(value)


def _clean_text(text: str, names: Sequence[str]) -> str:
    text = _ADDRESS.sub("ADDRESS", _PATH.sub(_short_path, text))
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "NAME", text)
    return text


def _short_path(match: re.Match[str]) -> str:
    """What is inside of a package is worth knowing, where the package lies is not."""
    path = match[0]
    for mark in ("/site-packages/", "/glm52_jax/", "/infer/", "/sharding/"):
        place = path.rfind(mark)
        if place >= 0:
            return path[place + 1 :].removeprefix("site-packages/")
    return f".../{match[1]}"


def _own_names() -> list[str]:
    """Names of this host and this user, but such as everybody has."""
    found = [socket.gethostname(), socket.gethostname().split(".")[0]]
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container need not know its user
        found.append(getpass.getuser())
    return [name for name in dict.fromkeys(found) if len(name) > 2 and name not in ("root", "user", "localhost")]
