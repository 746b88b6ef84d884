"""Any checkpoint to the published layout: shards streamed one by one, an index, the config and its companions.

Shards are written under temporary names and renamed when whole; a rerun keeps those that are there. `config.json` comes
last, and with it the note that the folder is unfinished goes.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from glm52_jax.checkpoint.convert.conversion import config_text, memory_bound, refuse_nested, refuse_too_little_room
from glm52_jax.checkpoint.convert.options import (
    ConversionOptions,
    changes,
    checked,
    command_line,
    pieces,
    target_config,
    target_json,
)
from glm52_jax.checkpoint.convert.transform import Piece, ValueCounts, values
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, SafetensorsFile, file_layout
from glm52_jax.checkpoint.journal.journal import Journal, JournalFolder
from glm52_jax.checkpoint.journal.workers import Meter, Pulse, WorkStats, run, unwritable
from glm52_jax.checkpoint.sources.converted import ConvertedCheckpoint
from glm52_jax.checkpoint.sources.open_source import Checkpoint, open_checkpoint
from glm52_jax.checkpoint.sources.published import CODES, INDEX_FILE, SINGLE_FILE, fused_name
from glm52_jax.checkpoint.sources.sidecar_files import copy_sidecar_files, sidecar_files
from glm52_jax.checkpoint.value_checks import BadValueCounts, sentences
from glm52_jax.config import ModelConfig
from glm52_jax.io import files
from glm52_jax.io.json_fields import read_json
from sharding.errors import InputError

SHARD_BYTES = 5 * 10**9

Kinds = dict[str, tuple[str, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class _Group:
    """Pieces that stay together in one file: a weight with its scale, or all the experts of a fused tensor.

    Attributes:
        tensors: safetensors type and shape, by the name in the file.
        pieces: each with the tensor that every output of it goes to; they fill it one after another.
    """

    tensors: Kinds
    pieces: tuple[tuple[Piece, tuple[str, ...]], ...]

    @property
    def bytes(self) -> int:
        return sum(p.bytes for p, _ in self.pieces)


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file to write."""

    file: str
    groups: tuple[_Group, ...]

    @property
    def tensors(self) -> Kinds:
        return {name: kind for group in self.groups for name, kind in group.tensors.items()}

    @property
    def bytes(self) -> int:
        return sum(group.bytes for group in self.groups)


@dataclasses.dataclass(frozen=True)
class ExportPlan:
    """An export that has been found possible; `notes` are sentences a user should read before it starts."""

    source: Checkpoint
    destination: Path
    settings: ConversionOptions
    fused_experts: bool
    shard_bytes: int
    shards: tuple[Shard, ...]
    config_text: str
    notes: tuple[str, ...]
    beside: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    @property
    def tensors(self) -> int:
        return sum(len(shard.tensors) for shard in self.shards)

    def memory_bound(self, jobs: int) -> int:
        """Anonymous memory that the export stays under."""
        return memory_bound(
            self.source, [p for shard in self.shards for group in shard.groups for p, _ in group.pieces], jobs
        )

    def command(self, options: Sequence[str] = ()) -> str:
        """What goes on with it, as a shell takes it; `options` are those that do not change the result."""
        own = ["--shard-size", str(self.shard_bytes)] if self.shard_bytes != SHARD_BYTES else []
        own += ["--fused-experts"] * self.fused_experts
        return command_line("export", self.source.name, self.destination, [*self.settings.options(), *own, *options])


def plan(
    source: str | Path | Checkpoint,
    destination: str | Path,
    settings: ConversionOptions,
    *,
    shard_bytes: int = SHARD_BYTES,
    fused_experts: bool = False,
) -> ExportPlan:
    """Lays out the files, reading headers only.

    Raises:
        InputError: the source is not whole; the destination is in use; experts in codes are to be fused.
    """
    opened = open_checkpoint(source) if isinstance(source, str | Path) else source
    folder = Path(destination)
    refuse_nested(opened.folder, folder)
    config = ModelConfig.from_folder(opened.folder)
    contents = checked(opened, config, settings)
    work = pieces(opened, contents, settings)
    target = target_config(contents, settings, work)
    edited = target_json(read_json(opened.folder / "config.json"), config, target)
    earlier = list(opened.manifest.notes) if isinstance(opened, ConvertedCheckpoint) else []
    groups = _groups(work, target, fused_experts)
    planned = ExportPlan(
        opened,
        folder,
        settings,
        fused_experts,
        shard_bytes,
        _shards(groups, shard_bytes),
        config_text(opened, edited),
        (*contents.notes, *(f"in the conversion: {note}" for note in earlier), *changes(work)),
        tuple(copy_sidecar_files(opened.folder)),
    )
    names = [shard.file for shard in planned.shards]
    JournalFolder(folder).refuse_others(
        "an unfinished export", _identity(planned), lambda: _small_files(planned) | dict.fromkeys(names)
    )
    return planned


def export(
    planned: ExportPlan,
    *,
    jobs: int = 2,
    meter: Callable[[int, int], Meter] | None = None,
    options: Sequence[str] = (),
) -> WorkStats:
    """Carries out a plan, or what is left of it.

    Args:
        options: of the command that do not change the result, for the sentence on how to go on.

    Returns:
        What it took; its `notes` are sentences on the values.

    Raises:
        InputError: other settings than those it was begun with; the destination cannot be written or flushed; the
            source can no longer be read; a value has no form in the target.
    """
    work = JournalFolder(planned.destination)
    try:
        work.begin(_identity(planned), planned.command(options))
        with work.taking_part("export") as journal:
            left = [shard for shard in planned.shards if not _is_there(planned.destination / shard.file, shard)]
            rest = sum(shard.bytes for shard in left)
            refuse_too_little_room(planned.destination, rest)
            writer = _Writer(planned, work, journal)
            account = run(
                left,
                writer.shard,
                jobs=jobs,
                destination=planned.destination,
                meter=meter(planned.bytes, planned.bytes - rest) if meter else None,
            )
            account.notes = tuple(sentences({name: BadValueCounts(**noted) for name, noted in work.done().items()}))
            _finish(planned, work)
    except OSError as error:
        raise unwritable(planned.destination, error) from None
    return account


class _Writer:
    """Writes shards."""

    def __init__(self, planned: ExportPlan, work: JournalFolder, journal: Journal):
        self.planned, self.work, self.journal = planned, work, journal
        self.lock = threading.Lock()

    def shard(self, shard: Shard, pulse: Pulse) -> None:
        header, starts = file_layout({name: (DTYPES[dtype], shape) for name, (dtype, shape) in shard.tensors.items()})
        part = self.work.temporary(f"export-{threading.get_native_id()}")
        counts: dict[str, BadValueCounts] = {}
        with part.open("wb", buffering=0) as file:
            file.write(header)
            for group in shard.groups:
                for p, names in group.pieces:
                    tally = ValueCounts()
                    for number, data in values(self.planned.source, p, tally):
                        name, count = names[number], len(data)
                        file.seek(starts[name])
                        while data:
                            data = data[file.write(data) :]
                        starts[name] += count
                        pulse(count)
                    for number, name in enumerate(names):
                        counts[name] = counts.get(name, BadValueCounts()) + tally.of(number)
        files.sync([part])
        noted = {name: found for name, count in counts.items() if (found := count.as_json())}
        if noted:  # before the shard is there, which is then not done again
            with self.lock:
                self.journal.add(noted)
        files.move(part, self.planned.destination / shard.file)


def _groups(work: Sequence[Piece], target: ModelConfig, fused: bool) -> list[_Group]:
    """Pieces by the tensors of the files that they go to, in the order of the layers."""
    groups: dict[str, list[Piece]] = {}
    for p in sorted(work, key=lambda p: _place(p.name, target)):
        whole = fused_name(p.name) if fused else None
        groups.setdefault(whole[0] if whole else p.name, []).append(p)
    return [_group(name, members) for name, members in groups.items()]


def _group(name: str, members: list[Piece]) -> _Group:
    if fused_name(members[0].name) is None or name == members[0].name:
        (p,) = members
        return _Group(
            {output.name: (output.dtype, output.shape) for output in p.outputs},
            ((p, tuple(output.name for output in p.outputs)),),
        )
    codes = next((p.outputs[0].dtype for p in members if p.outputs[0].dtype in CODES), None)
    if codes is not None:
        raise InputError(f"{name} cannot be one tensor of all experts in {codes}, which no reader knows; try --dtype")
    rows, columns = members[0].outputs[0].shape
    places = {p: fused_name(p.name) for p in members}
    members = sorted(members, key=lambda p: (places[p] or ("", 0, 0))[1:])
    experts = len({(places[p] or ("", 0, 0))[1] for p in members})
    shape = (experts, len(members) // experts * rows, columns)
    return _Group({name: (members[0].outputs[0].dtype, shape)}, tuple((p, (name,)) for p in members))


def _place(name: str, target: ModelConfig) -> tuple[int, str, int]:
    """The embedding, the layers, then the final norm and the head; experts by number."""
    parts = name.split(".")
    expert = int(parts[5]) if ".mlp.experts." in name else -1
    layer = int(parts[2]) if parts[1] == "layers" else -1 if "embed" in name else target.num_hidden_layers + 1
    return layer, "" if expert < 0 else "experts", expert


def _shards(groups: Sequence[_Group], shard_bytes: int) -> tuple[Shard, ...]:
    files: list[list[_Group]] = [[]]
    size = 0
    for group in groups:
        if files[-1] and size + group.bytes > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(group)
        size += group.bytes
    names = [SINGLE_FILE] if len(files) == 1 else [_shard_name(i, len(files)) for i in range(1, len(files) + 1)]
    return tuple(Shard(name, tuple(members)) for name, members in zip(names, files, strict=True))


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _identity(planned: ExportPlan) -> dict[str, object]:
    """Whatever two runs must have in common to work on one destination."""
    source = planned.source
    made = source.manifest.text() if isinstance(source, ConvertedCheckpoint) else json.dumps(source.where)
    layout = json.dumps([(shard.file, shard.tensors) for shard in planned.shards])
    return planned.settings.as_json() | {
        "shard_bytes": planned.shard_bytes,
        "fused_experts": planned.fused_experts,
        "source": f"{zlib.crc32((made + layout).encode()):08x}",
    }


def _is_there(path: Path, shard: Shard) -> bool:
    """Whether a shard is there, which has its name only when it is whole."""
    if not files.is_there(path):
        return False
    entries = SafetensorsFile(path).entries
    if {name: (entry.dtype, entry.shape) for name, entry in entries.items()} != shard.tensors:
        raise InputError(f"{path}: holds other tensors than this export writes there; move it away to go on")
    return True


def _small_files(planned: ExportPlan) -> dict[str, bytes]:
    """Everything but the shards; the config last."""
    found: dict[str, bytes] = {}
    if len(planned.shards) > 1:
        weight_map = {name: shard.file for shard in planned.shards for name in shard.tensors}
        found[INDEX_FILE] = _json(
            {"metadata": {"total_size": planned.bytes}, "weight_map": dict(sorted(weight_map.items()))}
        )
    return found | sidecar_files(planned.beside, planned.config_text)


def _finish(planned: ExportPlan, work: JournalFolder) -> None:
    for name, data in _small_files(planned).items():
        work.write(planned.destination / name, data)
    files.sync([planned.destination])
    work.remove()


def _json(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
