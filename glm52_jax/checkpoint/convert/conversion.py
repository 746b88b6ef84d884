"""A published folder to an Orbax checkpoint: planned from the headers, then streamed, a unit at a time, resumable.

A unit is some tensors of one file. Its chunks are written under temporary names, renamed, flushed, and only then noted
in the journal: whatever ends the process, what is noted is on disk, and the rest is done again by the same command.
The last process finds everything noted, writes what is no chunk, and the manifest at the very end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from glm52_jax.checkpoint.convert.options import (
    ConversionOptions,
    changes,
    checked,
    command_line,
    pieces,
    target_config,
    target_json,
)
from glm52_jax.checkpoint.convert.transform import WORKER_BYTES, Output, Piece, ValueCounts, values
from glm52_jax.checkpoint.formats.manifest import HEAD, MANIFEST, Manifest, TensorRecord, sentences_of
from glm52_jax.checkpoint.formats.orbax_layout import PARAMS, StoredLeaf, leaf_of, leaves, params_folder, store_files
from glm52_jax.checkpoint.formats.orbax_view import OrbaxView
from glm52_jax.checkpoint.journal.journal import PART, Journal, JournalFolder
from glm52_jax.checkpoint.journal.workers import Meter, Pulse, WorkStats, run, unwritable
from glm52_jax.checkpoint.sources.open_source import Checkpoint, open_checkpoint
from glm52_jax.checkpoint.sources.sidecar_files import copy_sidecar_files, sidecar_files
from glm52_jax.checkpoint.value_checks import BadValueCounts
from glm52_jax.config import ModelConfig
from glm52_jax.inputs.sizes import short_size
from glm52_jax.io import files
from glm52_jax.io.json_fields import read_json, shown
from sharding.errors import InputError

UNIT_BYTES = 256 * 2**20
"""What is lost at most of each worker when it is stopped."""
# Measured: the interpreter with its imports (JAX too, where values change) took 30 and 80 MiB, and the plan and
# manifest of the 118,629 tensors of GLM-5.2-FP8 220 MiB.
_BASE_BYTES = {"copy": 64 * 2**20, "change": 256 * 2**20}
_TENSOR_BYTES = 3 * 2**10


@dataclasses.dataclass(frozen=True)
class ConversionPlan:
    """A conversion that has been found possible.

    Attributes:
        pieces: everything to write, by all processes.
        leaves: the arrays that hold it.
        notes: sentences a user should read before it starts.
        beside: files of the source that are copied as they are.
    """

    source: Checkpoint
    destination: Path
    settings: ConversionOptions
    pieces: tuple[Piece, ...]
    leaves: dict[str, StoredLeaf]
    config_text: str
    manifest: Manifest
    notes: tuple[str, ...]
    beside: tuple[Path, ...]

    @property
    def outputs(self) -> dict[str, tuple[Piece, Output]]:
        """By published name."""
        return {output.name: (p, output) for p in self.pieces for output in p.outputs}

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p in self.pieces)

    def files(self, name: str) -> list[str]:
        """Paths within `params` of the chunks of a tensor."""
        leaf, expert = leaf_of(name)
        return self.leaves[leaf].files(expert)

    def memory_bound(self, jobs: int) -> int:
        """Anonymous memory that the conversion stays under; it grows with the number of tensors, not their bytes."""
        return memory_bound(self.source, self.pieces, jobs)

    def command(self, options: Sequence[str] = ()) -> str:
        """What goes on with it, as a shell takes it; `options` are those that do not change the result."""
        return command_line("convert", self.source.name, self.destination, [*self.settings.options(), *options])


@dataclasses.dataclass(frozen=True)
class ConversionResult:
    """What one process did.

    Attributes:
        left: tensors still to be done by others; the checkpoint is then not finished.
        notes: sentences on the values, of a finished one.
    """

    account: WorkStats
    left: int
    notes: tuple[str, ...] = ()


def memory_bound(source: Checkpoint, work: Sequence[Piece], jobs: int) -> int:
    """Anonymous memory of streaming these pieces with so many workers."""
    kind = "copy" if all(p.kind == "copy" for p in work) else "change"
    tensors = sum(len(p.outputs) for p in work)
    return _BASE_BYTES[kind] + _TENSOR_BYTES * tensors + jobs * (WORKER_BYTES[kind] + source.read_ahead)


def plan(source: str | Path | Checkpoint, destination: str | Path, settings: ConversionOptions) -> ConversionPlan:
    """Reads headers only, and refuses what cannot be converted.

    Raises:
        InputError: the source is not whole, or holds another model than its config says; the destination is in use or
            lies within the source.
    """
    opened = open_checkpoint(source) if isinstance(source, str | Path) else source
    folder = Path(destination)
    refuse_nested(opened.folder, folder)
    config = ModelConfig.from_folder(opened.folder)
    contents = checked(opened, config, settings)
    work = tuple(pieces(opened, contents, settings))
    target = target_config(contents, settings, list(work))
    raw = read_json(opened.folder / "config.json")
    edited = target_json(raw, config, target)
    notes = (*contents.notes, *changes(list(work)))
    sizes = {file: _file_size(opened, file) for file in sorted({p.file for p in work})}
    stored = {o.name: (o.dtype, o.shape) for p in work for o in p.outputs}
    planned = ConversionPlan(
        opened,
        folder,
        settings,
        work,
        leaves(stored, settings.chunk_bytes),
        config_text(opened, edited),
        Manifest(settings.as_json(), sizes, dict(sorted(contents.ignored.items())), notes, {}),
        notes,
        tuple(copy_sidecar_files(opened.folder)),
    )
    _refuse_occupied(planned)
    return planned


def convert(
    planned: ConversionPlan,
    *,
    jobs: int = 2,
    process: tuple[int, int] = (1, 1),
    unit_bytes: int = UNIT_BYTES,
    meter: Callable[[int, int], Meter] | None = None,
    options: Sequence[str] = (),
) -> ConversionResult:
    """Carries out a plan, or the part of it that is left.

    Args:
        jobs: threads.
        process: number and count of the processes that share the work, from (1, 1) on.
        unit_bytes: how much a unit writes.
        meter: called with the bytes that this process has to write and those that are done; told of the rest.
        options: of the command that do not change the result, for the sentence on how to go on.

    Raises:
        InputError: other settings than those it was begun with; the destination cannot be written or flushed; the
            source can no longer be read; a value has no form in the target; Orbax does not read the result.
    """
    work = JournalFolder(planned.destination)
    try:
        finished = _finished(planned)
        if finished is not None:
            return ConversionResult(WorkStats(), 0, sentences_of(finished))
        work.begin(_identity(planned), planned.command(options))
        return _carry_out(planned, work, jobs, process, unit_bytes, meter)
    except OSError as error:
        with files.writing(planned.destination):
            gone = isinstance(error, FileNotFoundError) and not work.exists
            finished = _finished(planned) if gone else None
        if finished is None:
            raise unwritable(planned.destination, error) from None
        return ConversionResult(WorkStats(), 0, sentences_of(finished))  # another process finished it and cleared up


def _carry_out(
    planned: ConversionPlan,
    work: JournalFolder,
    jobs: int,
    process: tuple[int, int],
    unit_bytes: int,
    meter: Callable[[int, int], Meter] | None,
) -> ConversionResult:
    number, count = process
    who = f"process-{number}-of-{count}"
    with work.taking_part(who) as journal:
        mine = _share(planned.pieces, number, count)
        left = _undone(planned, mine, work.done())
        size, rest = sum(p.bytes for p in mine), sum(p.bytes for p in left)
        refuse_too_little_room(planned.destination, rest)
        writer = _Writer(planned, work, journal, who)
        account = run(
            _units(left, unit_bytes),
            writer.unit,
            jobs=jobs,
            destination=planned.destination,
            meter=meter(size, size - rest) if meter else None,
        )
    with work.finishing():
        done = work.done()
        remaining = len(_undone(planned, planned.pieces, done))
        finished = _finished(planned)  # by another process, which then took away what is noted as done
        if finished is None and not remaining:
            finished = _finish(planned, work, done)
    return ConversionResult(account, 0, sentences_of(finished)) if finished else ConversionResult(account, remaining)


class _Writer:
    """Writes units of pieces as chunks."""

    def __init__(self, planned: ConversionPlan, work: JournalFolder, journal: Journal, who: str):
        self.planned, self.work, self.journal, self.who = planned, work, journal, who
        self.root = params_folder(planned.destination)
        self.lock = threading.Lock()

    def unit(self, unit: Sequence[Piece], pulse: Pulse) -> None:
        noted: dict[str, Any] = {}
        written: list[Path] = []
        for piece in unit:
            noted |= self._piece(piece, pulse, written)
        files.sync(written)
        with self.lock:
            self.journal.add(noted)

    def _piece(self, piece: Piece, pulse: Pulse, written: list[Path]) -> dict[str, Any]:
        """What is to be noted of a piece's tensors: their checksums, and what is wrong with their values."""
        chunks, tally = [_Chunks(self, output) for output in piece.outputs], ValueCounts()
        try:
            for number, part in values(self.planned.source, piece, tally):
                chunks[number].write(part)
                pulse(len(part))
        finally:
            for chunk in chunks:
                chunk.close()
        for chunk in chunks:
            assert chunk.done == chunk.output.bytes, chunk.output.name
            written += chunk.files
        return {
            chunk.output.name: {"crc32": f"{chunk.crc:08x}"} | tally.of(number).as_json()
            for number, chunk in enumerate(chunks)
        }


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
                files.move(self.part, path)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def refuse_nested(source: Path, destination: Path) -> None:
    """A result within its own source, or around it, would be taken for a part of it."""
    files.is_there(destination)  # a link that leads nowhere leads to no folder
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


def _small_files(planned: ConversionPlan) -> dict[str, bytes]:
    return sidecar_files(planned.beside, planned.config_text)


def _refuse_occupied(planned: ConversionPlan) -> None:
    """Refuses a destination with anything in it that this conversion, or one like it, did not write."""
    folder = planned.destination
    work = JournalFolder(folder)
    if not files.is_there(folder / MANIFEST) or work.exists:
        work.refuse_others(
            "an unfinished conversion",
            _identity(planned),
            lambda: _small_files(planned) | dict.fromkeys((PARAMS, MANIFEST)),
        )
        if work.exists:
            _refuse_foreign_chunks(planned)


def _refuse_foreign_chunks(planned: ConversionPlan) -> None:
    """Refuses links and files in `params` that are not of the arrays that are written there."""
    root = params_folder(planned.destination)
    texts = {f"{leaf}/zarr.json" for leaf in planned.leaves} | {"_METADATA", "_CHECKPOINT_METADATA"}
    chunks = {file for name in planned.outputs for file in planned.files(name)}
    waiting = [root] if files.is_there(root) else []
    while waiting:
        folder = waiting.pop()
        with files.reading(folder), os.scandir(folder) as entries:
            for entry in entries:
                path = Path(entry.path).relative_to(root).as_posix()
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(folder / entry.name)
                elif entry.is_symlink() or not (path in chunks or path in texts or PART.fullmatch(entry.name)):
                    raise InputError(
                        f"{folder}: holds {entry.name} beside an unfinished conversion, which did not write it; "
                        "move it away to go on"
                    )


def refuse_too_little_room(folder: Path, needed: int) -> None:
    """Refuses a disk that says that so many bytes have no room on it."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:  # some mounts do not say
        return
    if usage.total and usage.free < needed:
        raise InputError(
            f"{folder}: the disk has {short_size(usage.free)} free, expected {short_size(needed)} for what is left"
        )


def _finished(planned: ConversionPlan) -> Manifest | None:
    """The manifest of a destination that is finished; one with other settings is refused."""
    path, work = planned.destination / MANIFEST, JournalFolder(planned.destination)
    if not files.is_there(path) or (work.exists and not _is_whole(path)):
        return None
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
    if work.exists:  # a process was stopped between the two
        files.sync([path, planned.destination])
        work.remove()
    return begun


def _is_whole(manifest: Path) -> bool:
    """Whether a manifest is not the beginning of one: where files cannot be renamed, a copy can be stopped."""
    data = manifest.read_bytes()
    return not data.startswith(HEAD[: len(data)]) or data.endswith(b"}\n }\n}\n")


def _identity(planned: ConversionPlan) -> dict[str, object]:
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


def _undone(planned: ConversionPlan, work: Sequence[Piece], done: Mapping[str, Any]) -> list[Piece]:
    root = params_folder(planned.destination)

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


def _finish(planned: ConversionPlan, work: JournalFolder, done: Mapping[str, Any]) -> Manifest:
    """Everything but the chunks, flushed and read by Orbax; then the manifest, which makes it a checkpoint."""
    root, folder = params_folder(planned.destination), planned.destination
    texts = [(root / path, text.encode()) for path, text in store_files(planned.leaves.values())]
    texts += [(folder / name, data) for name, data in _small_files(planned).items()]
    for path, data in texts:
        work.write(path, data)
    files.sync({path.parent for path, _ in texts})
    differences = OrbaxView(root, planned.leaves).differences()
    if differences:
        raise InputError(f"{differences[0]}; so the conversion is not finished, and the same command goes on from here")
    tensors = {}
    for name, (p, output) in planned.outputs.items():
        noted = dict(done[name])
        crc = noted.pop("crc32")
        tensors[name] = TensorRecord(
            p.file, output.source_dtype, output.dtype, output.shape, crc, BadValueCounts(**noted)
        )
    manifest = dataclasses.replace(planned.manifest, tensors=tensors)
    manifest = dataclasses.replace(manifest, notes=(*manifest.notes, *sentences_of(manifest)))
    work.write(folder / MANIFEST, manifest.text().encode())
    try:
        files.sync([folder])
    except OSError:
        with contextlib.suppress(OSError):  # its name may not last, so it is not finished
            (folder / MANIFEST).unlink()
        raise
    work.remove()
    return manifest


def _file_size(source: Checkpoint, file: str) -> int:
    path = source.folder / file
    return path.stat().st_size if path.is_file() else 0
