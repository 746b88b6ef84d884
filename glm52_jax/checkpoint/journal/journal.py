"""The folder `unfinished` inside of a destination: what was asked for, what is done, who is at it.

It is there from the first byte to the last. It knows names and checksums, not what the work is. A folder of this name
counts as ours when its `settings.json` says so and nothing else is in it; whatever is not ours is never removed and
never written over.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from glm52_jax.io import files
from glm52_jax.io.json_fields import shown
from glm52_jax.io.unfinished import COMMAND, FORMAT, SETTINGS, UNFINISHED, settings_of
from sharding.errors import InputError

_HEAD = json.dumps({"format": FORMAT}, indent=1)[:-2].encode()
"""How `settings.json` begins."""
_OWN = re.compile(
    r"settings\.json|(process-[0-9]+-of-[0-9]+|export|finish)\.lock|"
    r"done-(process-[0-9]+-of-[0-9]+|export)\.[0-9a-f]+\.jsonl|glm52-.+\.part",
    re.ASCII,
)
_BEGUN = re.compile(r"settings\.json\.[0-9a-f]+(\.part)?", re.ASCII)
PART = re.compile(r"glm52-.+\.part")
"""Names of files that are not whole."""
_WAIT = 2.0
"""Seconds in which a living process has written its settings."""


class JournalFolder:
    """The work on one destination, shared by every process that takes part in it."""

    def __init__(self, destination: Path):
        self.destination = destination
        self.path = destination / UNFINISHED
        self._own = secrets.token_hex(4)  # processes of several hosts can have one number

    @property
    def exists(self) -> bool:
        return settings_of(self.destination) is not None

    def refuse_others(
        self, expected: str, settings: dict[str, Any], contents: Callable[[], Mapping[str, bytes | None]]
    ) -> None:
        """Refuses a destination that holds anything but an unfinished work with these settings, or nothing.

        Args:
            expected: what else than a new folder may be there, such as "an unfinished conversion".
            settings: what is asked for now.
            contents: called for a work that has begun: names that the destination can hold, and of small files what is
                in them.

        Raises:
            InputError: naming what is there; nothing is changed.
        """
        folder = self.destination
        if not files.is_there(folder):
            return
        if not folder.is_dir():
            raise InputError(f"{folder}: is a file, expected a folder to write to")
        self._refuse_foreign(expected)
        begun, known = settings_of(self.destination), None
        if begun is not None:
            self._refuse_other_settings(begun, settings)
        for entry in _entries(folder):
            if entry.name == UNFINISHED:
                continue
            if begun is None:
                raise InputError(f"{folder}: is not empty ({entry.name}), expected a new folder or {expected}")
            known = contents() if known is None else known
            if entry.name not in known or entry.is_symlink():
                raise InputError(
                    f"{folder}: holds {entry.name} beside {expected}, which did not write it; move it away to go on"
                )
            wanted = known[entry.name]
            if wanted is not None and not _holds(folder / entry.name, wanted):
                raise InputError(f"{folder}: holds another {entry.name} than {expected} writes; move it away to go on")

    def begin(self, settings: dict[str, Any], command: str) -> None:
        """Notes what is asked for, or compares it with what was asked for before.

        Raises:
            InputError: the work was begun with other settings.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        begun = self._begun(json.dumps({"format": FORMAT, COMMAND: command} | settings, indent=1).encode())
        self._refuse_other_settings(begun, settings)

    def _refuse_other_settings(self, begun: dict[str, Any], settings: dict[str, Any]) -> None:
        for name, value in settings.items():
            if begun.get(name) != value:
                raise InputError(
                    f"{self.destination}: was begun with {name} {shown(begun.get(name))}, and now it is "
                    f"{shown(value)}; finish it with `{begun.get(COMMAND)}`, or remove the folder to begin anew"
                )

    def _begun(self, text: bytes) -> dict[str, Any]:
        """The settings that the work was begun with: these, unless a process was first."""
        path, deadline = self.path / SETTINGS, time.monotonic() + _WAIT
        if not self.exists:
            files.create_once(path, text)
        while (begun := settings_of(self.destination)) is None:
            if time.monotonic() > deadline:  # who began to write them is gone
                with files.whole_file(path) as file:
                    file.write(text)
            time.sleep(0.05)
        return begun

    def done(self) -> dict[str, Any]:
        """Names of everything finished by any process, with what is noted of each."""
        found: dict[str, Any] = {}
        for journal in sorted(self.path.glob("done-*.jsonl")):
            for line in _whole_lines(journal):
                with contextlib.suppress(ValueError, AttributeError, TypeError):
                    found |= json.loads(line)
        return found

    @contextlib.contextmanager
    def taking_part(self, who: str) -> Generator[Journal]:
        """The journal of one process of several.

        Raises:
            InputError: a living process is at the same part.
        """
        with _locked(self.path / f"{who}.lock") as free:
            if free is False:
                raise InputError(f"{self.destination}: another process is working on {who} of it now")
            if free:  # what a process that was stopped had in hand is nobody's
                for part in self.path.glob(f"glm52-{who}-*.part"):
                    part.unlink(missing_ok=True)
            with contextlib.closing(Journal(self.path / f"done-{who}.{self._own}.jsonl")) as journal:
                yield journal

    @contextlib.contextmanager
    def finishing(self) -> Generator[None]:
        """One process at a time; the others wait, and then find it finished."""
        with _locked(self.path / "finish.lock", wait=True):
            yield

    def temporary(self, name: str) -> Path:
        """A file for what is not whole yet; one that begins with who is at it goes when that part is taken up again."""
        return self.path / f"glm52-{name}-{self._own}.part"

    def write(self, path: Path, data: bytes) -> None:
        """A file of the destination that is there whole or not at all; its folder is to be flushed."""
        part = self.temporary(path.name)
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        path.parent.mkdir(parents=True, exist_ok=True)
        files.move(part, path)

    def remove(self) -> None:
        """After the destination is finished. What says that it is not goes last, and what is not ours stays."""
        if self.exists:
            for entry in _entries(self.path):
                if (_OWN.fullmatch(entry.name) or _BEGUN.fullmatch(entry.name)) and entry.name != SETTINGS:
                    (self.path / entry.name).unlink(missing_ok=True)
            (self.path / SETTINGS).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty, or not there
            self.path.rmdir()

    def _refuse_foreign(self, expected: str) -> None:
        """Refuses a folder `unfinished` that holds, or is, what this module does not write."""
        hint = f"expected {self.destination} to be new, or {expected}"
        if self.path.is_symlink():
            raise InputError(f"{self.path}: is a link to {os.readlink(self.path)}, {hint}")
        if not files.is_there(self.path):
            return
        if not self.path.is_dir():
            raise InputError(f"{self.path}: is a file, {hint}")
        begun = self.exists
        for entry in _entries(self.path):
            if not entry.is_file(follow_symlinks=False) or not self._is_own(entry.name, begun):
                raise InputError(f"{self.path}: holds {entry.name}, {hint}")

    def _is_own(self, name: str, begun: bool) -> bool:
        """Whether a file is one of ours; before there are settings, only the beginning of them is."""
        if _BEGUN.fullmatch(name) or (name == SETTINGS and not begun):
            with (self.path / name).open("rb") as file:
                return file.read(len(_HEAD)) in (_HEAD, _HEAD[: os.fstat(file.fileno()).st_size])
        return begun and _OWN.fullmatch(name) is not None


class Journal:
    """What is noted by name, on disk before the next unit is begun; half a line does not count.

    Every run has a file of its own, made when there is something to note: some mounts append to no file.
    """

    def __init__(self, path: Path):
        self._path = path
        self._file: BinaryIO | None = None

    def add(self, noted: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
        self._file.write(json.dumps(noted).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with files.reading(folder), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _holds(path: Path, wanted: bytes) -> bool:
    try:
        return path.stat().st_size == len(wanted) and path.read_bytes() == wanted
    except OSError:
        return False


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = False) -> Generator[bool | None]:
    """Whether a lock was free; it ends with the process, however that ends. None where there are no locks."""
    try:
        import fcntl
    except ImportError:
        yield None
        return
    with path.open("ab") as file:
        free: bool | None = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            free = False
        except OSError:  # a file system without locks: what is written is the same whoever writes it
            free = None
        yield free
