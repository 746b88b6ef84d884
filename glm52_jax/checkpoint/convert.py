"""A published folder to an Orbax checkpoint: planned from the headers, then streamed, a unit at a time, resumable.

A unit is some tensors of one file. Its chunks are written under temporary names, renamed, flushed, and only then noted
in the journal: whatever ends the process, what is noted is on disk, and the rest is done again by the same command.
The last process finds everything noted, writes what is no chunk, and the manifest at the very end.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glm52_jax.checkpoint.companions import companions
from glm52_jax.checkpoint.manifest import MANIFEST, Manifest, Record
from glm52_jax.checkpoint.settings import Settings, changes, checked, pieces, target_config, target_json
from glm52_jax.checkpoint.sizes import short_size
from glm52_jax.checkpoint.sources import Checkpoint, open_checkpoint
from glm52_jax.checkpoint.store import Leaf, leaf_of, leaves, params_folder, store_files
from glm52_jax.checkpoint.transform import WORKER_BYTES, Output, Piece, values
from glm52_jax.checkpoint.work_folder import Journal, WorkFolder, flush_to_disk
from glm52_jax.checkpoint.workers import Account, Meter, Pulse, run, unwritable
from glm52_jax.config import ModelConfig, read_json
from glm52_jax.config_json import shown
from glm52_jax.errors import InputError

UNIT_BYTES = 256 * 2**20
"""What is lost at most of each worker when it is stopped."""
# Measured: the interpreter with its imports (JAX too, where values change) took 30 and 80 MiB, and the plan and
# manifest of the 118,629 tensors of GLM-5.2-FP8 220 MiB.
_BASE_BYTES = {"copy": 64 * 2**20, "change": 256 * 2**20}
_TENSOR_BYTES = 3 * 2**10


@dataclasses.dataclass(frozen=True)
class Plan:
    """A conversion that has been found possible.

    Attributes:
        pieces: everything to write, by all processes.
        leaves: the arrays that hold it.
        notes: sentences a user should read before it starts.
    """

    source: Checkpoint
    destination: Path
    settings: Settings
    pieces: tuple[Piece, ...]
    leaves: dict[str, Leaf]
    config_text: str
    manifest: Manifest
    notes: tuple[str, ...]

    @property
    def outputs(self) -> dict[str, tuple[Piece, Output]]:
        """By published name."""
        return {output.name: (p, output) for p in self.pieces for output in p.outputs}

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.pieces)

    def memory_bound(self, jobs: int) -> int:
        """Anonymous memory that the conversion stays under; it grows with the number of tensors, not their bytes."""
        return memory_bound(self.source, self.pieces, jobs)

    def command(self) -> str:
        return f"glm52 convert {self.source.name} {self.destination}{self.settings.options()}"


@dataclasses.dataclass(frozen=True)
class Result:
    """What one process did; `left` tensors are still to be done by others, and the checkpoint is then not finished."""

    account: Account
    left: int


def memory_bound(source: Checkpoint, work: Sequence[Piece], jobs: int) -> int:
    """Anonymous memory of streaming these pieces with so many workers."""
    kind = "copy" if all(p.kind == "copy" for p in work) else "change"
    tensors = sum(len(p.outputs) for p in work)
    return _BASE_BYTES[kind] + _TENSOR_BYTES * tensors + jobs * (WORKER_BYTES[kind] + source.read_ahead)


def plan(source: str | Path | Checkpoint, destination: str | Path, settings: Settings) -> Plan:
    """Reads headers only, and refuses what cannot be converted.

    Raises:
        InputError: the source is not whole, or holds another model than its config says; the destination is in use or
            lies within the source.
    """
    opened = open_checkpoint(source) if isinstance(source, str | Path) else source
    folder = Path(destination)
    refuse_nested(opened.folder, folder)
    _refuse_occupied(folder)
    config = ModelConfig.from_folder(opened.folder)
    contents = checked(opened, config, settings)
    work = tuple(pieces(opened, contents, settings))
    target = target_config(contents, settings, list(work))
    raw = read_json(opened.folder / "config.json")
    edited = target_json(raw, config, target)
    text = config_text(opened, edited)
    notes = (*contents.notes, *changes(list(work)))
    files = {file: _file_size(opened, file) for file in sorted({p.file for p in work})}
    stored = {o.name: (o.dtype, o.shape) for p in work for o in p.outputs}
    return Plan(
        opened,
        folder,
        settings,
        work,
        leaves(stored, settings.chunk_bytes),
        text,
        Manifest(settings.as_json(), files, dict(sorted(contents.ignored.items())), notes, {}),
        notes,
    )


def convert(
    planned: Plan,
    *,
    jobs: int = 2,
    process: tuple[int, int] = (1, 1),
    unit_bytes: int = UNIT_BYTES,
    meter: Callable[[int, int], Meter] | None = None,
) -> Result:
    """Carries out a plan, or the part of it that is left.

    Args:
        jobs: threads.
        process: number and count of the processes that share the work, from (1, 1) on.
        unit_bytes: how much a unit writes.
        meter: called with the bytes that this process has to write and those that are done; told of the rest.

    Raises:
        InputError: other settings than those it was begun with; the disk is full; the source can no longer be read.
    """
    work = WorkFolder(planned.destination)
    try:
        if _is_finished(planned):
            return Result(Account(), 0)
        work.begin(_identity(planned), planned.command())
        if _is_finished(planned):  # by another process, in between
            return Result(Account(), 0)
        number, count = process
        who = f"process-{number}-of-{count}"
        with work.taking_part(who) as journal:
            mine = _share(planned.pieces, number, count)
            left = _undone(planned, mine, work)
            size, rest = sum(p.bytes for p in mine), sum(p.bytes for p in left)
            _refuse_too_little_room(planned.destination, rest)
            writer = _Writer(planned, work, journal, who)
            account = run(
                _units(left, unit_bytes),
                writer.unit,
                jobs=jobs,
                destination=planned.destination,
                meter=meter(size, size - rest) if meter else None,
            )
        with work.finishing():
            remaining = 0 if _is_finished(planned) else len(_undone(planned, planned.pieces, work))
            if not remaining and not _is_finished(planned):
                _finish(planned, work)
    except OSError as error:
        if (planned.destination / MANIFEST).exists():  # another process finished it and cleared up
            return Result(Account(), 0)
        raise unwritable(planned.destination, error) from None
    return Result(account, remaining)


class _Writer:
    """Writes units of pieces as chunks."""

    def __init__(self, planned: Plan, work: WorkFolder, journal: Journal, who: str):
        self.planned, self.work, self.journal, self.who = planned, work, journal, who
        self.root = params_folder(planned.destination)
        self.lock = threading.Lock()

    def unit(self, unit: Sequence[Piece], pulse: Pulse) -> None:
        checksums: dict[str, str] = {}
        written: list[Path] = []
        for piece in unit:
            checksums |= self._piece(piece, pulse, written)
        flush_to_disk(written)
        with self.lock:
            self.journal.add(checksums)

    def _piece(self, piece: Piece, pulse: Pulse, written: list[Path]) -> dict[str, str]:
        chunks = [_Chunks(self, output) for output in piece.outputs]
        try:
            for number, part in values(self.planned.source, piece):
                chunks[number].write(part)
                pulse(len(part))
        finally:
            for chunk in chunks:
                chunk.close()
        for chunk in chunks:
            assert chunk.done == chunk.output.bytes, chunk.output.name
            written += chunk.files
        return {chunk.output.name: f"{chunk.crc:08x}" for chunk in chunks}


class _Chunks:
    """The chunks of one tensor, written from front to back; each gets its name when it is whole."""

    def __init__(self, writer: _Writer, output: Output):
        leaf, expert = leaf_of(output.name)
        self.output, self.leaf = output, writer.planned.leaves[leaf]
        self.files = [writer.root / file for file in self.leaf.files(expert)]
        self.part = writer.work.temporary(f"{writer.who}-{threading.get_native_id()}-{output.dtype}")
        self.done, self.crc = 0, 0
        self.file: io.FileIO | None = None

    def write(self, data: memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        size = self.leaf.chunk_bytes
        while data:
            if self.file is None:
                self.file = self.part.open("wb", buffering=0)
            room = size - self.done % size
            written = self.file.write(data[:room])
            self.done += written
            data = data[written:]
            if self.done % size == 0:
                self.close()
                path = self.files[self.done // size - 1]
                path.parent.mkdir(parents=True, exist_ok=True)
                self.part.replace(path)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def refuse_nested(source: Path, destination: Path) -> None:
    """A result within its own source, or around it, would be taken for a part of it."""
    inner, outer = destination.resolve(), source.resolve()
    if inner == outer:
        raise InputError(f"{destination}: is the source itself, expected another folder")
    if outer in inner.parents:
        raise InputError(f"{destination}: lies inside the source {source}, expected a folder outside of it")
    if inner in outer.parents:
        raise InputError(f"{destination}: holds the source {source}, expected a folder of its own")


def config_text(source: Checkpoint, edited: dict[str, Any] | None) -> str:
    """The target's `config.json`: the source's to the letter where nothing changes."""
    if edited is None:
        return (source.folder / "config.json").read_bytes().decode()
    return json.dumps(edited, indent=2) + "\n"


def _refuse_occupied(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: is a file, expected a folder to write to")
    if folder.is_dir() and not WorkFolder(folder).exists and not (folder / MANIFEST).exists():
        other = next(
            (entry.name for entry in sorted(folder.iterdir()) if entry.name != WorkFolder(folder).path.name), None
        )
        if other is not None:
            raise InputError(f"{folder}: is not empty ({other}), expected a new folder or an unfinished conversion")


def _refuse_too_little_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{folder}: the disk has {short_size(free)} free, expected {short_size(needed)} for what is left"
        )


def _is_finished(planned: Plan) -> bool:
    """Whether the destination is finished; one with other settings is refused."""
    if not (planned.destination / MANIFEST).exists():
        return False
    begun, asked = Manifest.read(planned.destination), planned.manifest
    for what, found, wanted in (
        *((name, begun.settings.get(name), value) for name, value in asked.settings.items()),
        ("source files", begun.files, asked.files),
    ):
        if found != wanted:
            raise InputError(
                f"{planned.destination}: is finished with {what} {shown(found)}, and now it is {shown(wanted)}; "
                "expected a new folder"
            )
    WorkFolder(planned.destination).remove()
    return True


def _identity(planned: Plan) -> dict[str, object]:
    """Whatever two runs must have in common to work on one destination."""
    outputs = [(o.name, o.dtype, o.shape, o.source_dtype, p.file, p.offset) for p in planned.pieces for o in p.outputs]
    plan = json.dumps([outputs, planned.manifest.files, planned.config_text])
    return planned.settings.as_json() | {"source": f"{zlib.crc32(plan.encode()):08x}"}


def _share(work: Sequence[Piece], number: int, count: int) -> list[Piece]:
    """The part of one process: as many bytes as the others, and neighbours in the files."""
    total, before, mine = sum(p.bytes for p in work), 0, []
    for p in work:
        if before * count // max(1, total) == number - 1:
            mine.append(p)
        before += p.bytes
    return mine


def _undone(planned: Plan, work: Sequence[Piece], folder: WorkFolder) -> list[Piece]:
    done, root = folder.done(), params_folder(planned.destination)

    def is_done(output: Output) -> bool:
        leaf, expert = leaf_of(output.name)
        size = planned.leaves[leaf].chunk_bytes
        try:
            return output.name in done and all(
                (root / file).stat().st_size == size for file in planned.leaves[leaf].files(expert)
            )
        except OSError:
            return False

    return [p for p in work if not all(is_done(output) for output in p.outputs)]


def _units(work: Sequence[Piece], unit_bytes: int) -> list[list[Piece]]:
    units: list[list[Piece]] = []
    size = 0
    for p in work:
        if not units or size + p.bytes > unit_bytes or units[-1][0].file != p.file:
            units.append([])
            size = 0
        units[-1].append(p)
        size += p.bytes
    return units


def _finish(planned: Plan, work: WorkFolder) -> None:
    """Everything but the chunks, flushed; then the manifest, which makes it a checkpoint."""
    root, folder = params_folder(planned.destination), planned.destination
    written: list[Path] = []
    texts = [(root / path, text.encode()) for path, text in store_files(planned.leaves.values())]
    texts += [(folder / path.name, path.read_bytes()) for path in companions(planned.source.folder)]
    texts += [(folder / "config.json", planned.config_text.encode())]
    for path, data in texts:
        work.write(path, data)
        written.append(path)
    flush_to_disk(written)
    checksums = work.done()
    tensors = {
        name: Record(p.file, output.source_dtype, output.dtype, output.shape, checksums[name])
        for name, (p, output) in planned.outputs.items()
    }
    manifest = dataclasses.replace(planned.manifest, tensors=tensors)
    work.write(folder / MANIFEST, manifest.text().encode())
    flush_to_disk([folder / MANIFEST, folder])
    work.remove()


def _file_size(source: Checkpoint, file: str) -> int:
    path = source.folder / file
    return path.stat().st_size if path.is_file() else 0
