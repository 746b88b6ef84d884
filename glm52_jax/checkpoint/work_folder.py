"""The folder `unfinished` inside of a destination: what was asked for, what is done, who is at it.

It is there from the first byte to the last. It knows names and checksums, not what the work is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

from glm52_jax.config import read_json
from glm52_jax.config_json import shown
from glm52_jax.errors import InputError

UNFINISHED = "unfinished"
_SETTINGS, _COMMAND = "settings.json", "command"


class WorkFolder:
    """The work on one destination, shared by every process that takes part in it."""

    def __init__(self, destination: Path):
        self.destination = destination
        self.path = destination / UNFINISHED

    @property
    def exists(self) -> bool:
        return (self.path / _SETTINGS).is_file()

    def begin(self, settings: dict[str, Any], command: str) -> None:
        """Notes what is asked for, or compares it with what was asked for before.

        Raises:
            InputError: the work was begun with other settings.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        if not self.exists:
            own = self.path / f"{_SETTINGS}.{os.getpid()}"
            own.write_text(json.dumps({_COMMAND: command} | settings, indent=1))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(own, self.path / _SETTINGS)
            own.unlink()
        begun = read_json(self.path / _SETTINGS)
        for name, value in settings.items():
            if begun.get(name) != value:
                raise InputError(
                    f"{self.destination}: was begun with {name} {shown(begun.get(name))}, and now it is "
                    f"{shown(value)}; finish it with `{begun.get(_COMMAND)}`, or remove the folder to begin anew"
                )

    def refuse(self) -> InputError:
        """What a reader says of a destination that is not finished."""
        command = read_json(self.path / _SETTINGS).get(_COMMAND) if self.exists else "the command that began it"
        return InputError(f"{self.destination}: is not finished; `{command}` goes on where it was stopped")

    def done(self) -> dict[str, str]:
        """Names of everything finished by any process, with their checksums."""
        found: dict[str, str] = {}
        for journal in sorted(self.path.glob("done-*.jsonl")):
            for line in _whole_lines(journal):
                with contextlib.suppress(ValueError, AttributeError):
                    found |= json.loads(line)
        return found

    @contextlib.contextmanager
    def taking_part(self, who: str) -> Generator[Journal]:
        """The journal of one process of several.

        Raises:
            InputError: a living process is at the same part.
        """
        with _locked(self.path / f"{who}.lock") as free:
            if not free:
                raise InputError(f"{self.destination}: another process is working on {who} of it now")
            with contextlib.closing(Journal(self.path / f"done-{who}.jsonl")) as journal:
                yield journal

    @contextlib.contextmanager
    def finishing(self) -> Generator[None]:
        """One process at a time; the others wait, and then find it finished."""
        with _locked(self.path / "finish.lock", wait=True):
            yield

    def temporary(self, name: str) -> Path:
        return self.path / f"{name}.part"

    def write(self, path: Path, data: bytes) -> None:
        """A file of the destination that is there whole or not at all; `flush_to_disk` makes it last."""
        part = self.temporary(f"{path.name}.{os.getpid()}")
        part.write_bytes(data)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.replace(part, path)

    def remove(self) -> None:
        """After the destination is finished."""
        (self.path / _SETTINGS).unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


class Journal:
    """Lines of checksums by name, appended and on disk before the next unit is begun; half a line does not count."""

    def __init__(self, path: Path):
        whole = sum(len(line) + 1 for line in _whole_lines(path)) if path.exists() else 0
        self._file = path.open("ab")
        self._file.truncate(whole)

    def add(self, checksums: dict[str, str]) -> None:
        self._file.write(json.dumps(checksums).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _whole_lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n")[:-1]


def flush_to_disk(paths: Iterable[Path]) -> None:
    """Waits until files and their names are on disk."""
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


@contextlib.contextmanager
def _locked(path: Path, *, wait: bool = False) -> Generator[bool]:
    """Whether a lock was free; it ends with the process, however that ends. Where there are no locks, it was."""
    try:
        import fcntl
    except ImportError:
        yield True
        return
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks: what is written is the same whoever writes it
            pass
        yield True
