"""Comparing a checkpoint with the one it was made from: names, types, totals, and every value.

What a value has to be is what the conversion's own streams give for the types that are found, so a target that was cast
or dequantised is compared exactly too. It must not write anything.
"""

from __future__ import annotations

import dataclasses
import threading
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from glm52_jax.checkpoint.convert.options import changes
from glm52_jax.checkpoint.convert.transform import Output, Piece, ValueCounts, piece, values
from glm52_jax.checkpoint.formats.manifest import sentences_of
from glm52_jax.checkpoint.formats.orbax_layout import params_folder
from glm52_jax.checkpoint.formats.orbax_view import OrbaxView
from glm52_jax.checkpoint.formats.safetensors_file import DTYPES
from glm52_jax.checkpoint.journal.workers import Meter, Pulse, WorkStats, run
from glm52_jax.checkpoint.sources.converted import ConvertedCheckpoint
from glm52_jax.checkpoint.sources.open_source import Checkpoint
from glm52_jax.checkpoint.sources.published import CheckpointContents
from glm52_jax.checkpoint.value_checks import BadValueCounts, sentences
from glm52_jax.config import ModelConfig

_UNIT_BYTES = 64 * 2**20


@dataclasses.dataclass
class VerificationReport:
    """What a comparison found.

    Attributes:
        tensors: compared.
        bytes: of the target, in them.
        differences: a sentence each, in order of the names.
        changed: sentences on values that are not the source's but what they should have become.
        notes: what a user should know: what the source has that is not used.
        account: time and memory of comparing values; None where only the manifest was.
    """

    tensors: int
    bytes: int
    differences: list[str]
    changed: list[str]
    notes: list[str]
    account: WorkStats | None = None


def verify(
    target: Checkpoint,
    source: Checkpoint,
    *,
    quick: bool = False,
    jobs: int = 2,
    meter: Callable[[int, int], Meter] | None = None,
) -> VerificationReport:
    """Compares every tensor of `target` with what `source` makes of it.

    Args:
        target: a converted folder, or a published one that was exported.
        source: what it was made from.
        quick: compare names, types, shapes, sizes and totals only; a converted folder's chunks have been measured when
            it was opened.

    Raises:
        InputError: one of them is not whole in itself.
    """
    partial = isinstance(target, ConvertedCheckpoint) and target.manifest.settings.get("layers") is not None
    if isinstance(target, ConvertedCheckpoint):
        target.partial = True
    found = target.check(ModelConfig.from_folder(target.folder))
    config = ModelConfig.from_folder(source.folder)
    expected = source.check(config if found.config.has_mtp else config.without_mtp())
    differences = _config_differences(found.config, expected.config, target)
    if config.has_mtp and expected.ignored and not found.config.has_mtp and not (partial or _left_out(target)):
        differences.append(f"the MTP layer is missing in {target.folder}")
    work: list[Piece] = []
    for name, stored in expected.tensors.items():
        if name not in found.tensors:
            if not partial:
                differences.append(f"{name} is missing in {target.folder}")
            continue
        entry = target.entry(found.tensors[name].name)
        block = found.config.quantization.block if found.config.quantization else None
        work.append(piece(source, expected, stored.tensor, entry.dtype, block))
    differences += [f"{name} is not in {source.folder}" for name in found.tensors if name not in expected.tensors]
    notes = [f"source: {note}" for note in expected.notes] + [f"target: {note}" for note in found.notes]
    if isinstance(target, ConvertedCheckpoint):
        notes += [f"target: {note}" for note in sentences_of(target.manifest)] if quick else []
    report = VerificationReport(
        sum(len(p.outputs) for p in work), sum(p.bytes for p in work), differences, changes(work), notes
    )
    view = None
    if isinstance(target, ConvertedCheckpoint):
        report.differences += _total_differences(target, work)
        view = OrbaxView(params_folder(target.folder), target.leaves)  # works while values are compared
    try:
        _compare_values(report, target, source, found, work, quick, jobs, meter)
        report.differences += view.differences() if view else []
    finally:
        if view:
            view.end()
    return report


def _compare_values(
    report: VerificationReport,
    target: Checkpoint,
    source: Checkpoint,
    found: CheckpointContents,
    work: Sequence[Piece],
    quick: bool,
    jobs: int,
    meter: Callable[[int, int], Meter] | None,
) -> None:
    if not quick:
        comparison = _Comparison(target, source, found)
        units = _units(work)
        report.account = run(
            units,
            comparison.unit,
            jobs=jobs,
            destination=Path(target.folder),
            meter=meter(report.bytes, 0) if meter else None,
        )
        report.differences += [comparison.found[name] for name in sorted(comparison.found)]
        report.notes += sentences(comparison.counts)


class _Comparison:
    """Compares units of pieces; the first difference of each tensor is kept."""

    def __init__(self, target: Checkpoint, source: Checkpoint, contents: CheckpointContents):
        self.target, self.source, self.contents = target, source, contents
        self.found: dict[str, str] = {}
        self.counts: dict[str, BadValueCounts] = {}
        self.lock = threading.Lock()

    def unit(self, unit: Sequence[Piece], pulse: Pulse) -> None:
        for p in unit:
            tally = ValueCounts()
            difference = self._piece(p, pulse, tally)
            with self.lock:
                self.found |= difference
                self.counts |= {output.name: tally.of(number) for number, output in enumerate(p.outputs)}

    def _piece(self, p: Piece, pulse: Pulse, tally: ValueCounts) -> dict[str, str]:
        stored = self.contents.tensors[p.name]
        names = [stored.name, stored.scale]
        offsets, crcs = [_start(self.target, self.contents, p), 0], [0, 0]
        done = [0, 0]
        different: dict[str, str] = {}
        for number, part in values(self.source, p, tally):
            name, output = names[number], p.outputs[number]
            assert name is not None
            here = memoryview(bytearray(len(part)))
            self.target.pread(name, offsets[number] + done[number], here)
            crcs[number] = zlib.crc32(here, crcs[number])
            if not _equal(here, part) and output.name not in different:
                different[output.name] = _difference(output, done[number], here, part)
            done[number] += len(part)
            pulse(len(part))
        if isinstance(self.target, ConvertedCheckpoint):
            for number, output in enumerate(p.outputs):
                record = self.target.manifest.tensors.get(output.name)
                if record is not None and f"{crcs[number]:08x}" != record.crc32:
                    text = f"{output.name} has checksum {crcs[number]:08x}, but the manifest has {record.crc32}"
                    different.setdefault(output.name, text)
        return different


def _equal(a: memoryview, b: memoryview) -> bool:
    """Compared by eight bytes at a time: a memoryview compares its items one by one."""
    whole = len(a) - len(a) % 8
    first, second = (np.frombuffer(m[:whole], np.uint64) for m in (a, b))
    return np.array_equal(first, second) and a[whole:] == b[whole:]


def _start(target: Checkpoint, contents: CheckpointContents, p: Piece) -> int:
    """Where a weight begins in the target's tensor, which can be a fused one."""
    tensor = p.stored.tensor
    return piece(target, contents, tensor, None, None).offset


def _difference(output: Output, done: int, found: memoryview, expected: memoryview) -> str:
    dtype = DTYPES[output.dtype]
    a, b = (np.frombuffer(m, np.dtype(f"u{dtype.itemsize}")) for m in (found, expected))
    first = int(np.flatnonzero(a != b)[0])
    index = [int(i) for i in np.unravel_index(done // dtype.itemsize + first, output.shape)]
    values = [x[first : first + 1].view(dtype)[0] for x in (a, b)]
    return f"{output.name} differs from {index} on: {values[0]}, expected {values[1]}"


def _config_differences(found: ModelConfig, expected: ModelConfig, target: Checkpoint) -> list[str]:
    """Fields that a conversion does not change."""
    free = {"dtype", "quantization", "num_nextn_predict_layers"}
    return [
        f"{target.folder / 'config.json'}: {field.name} is {getattr(found, field.name)}, "
        f"expected {getattr(expected, field.name)}"
        for field in dataclasses.fields(ModelConfig)
        if field.compare and field.name not in free and getattr(found, field.name) != getattr(expected, field.name)
    ]


def _left_out(target: Checkpoint) -> bool:
    """Whether the MTP layer is missing because that was asked for."""
    return isinstance(target, ConvertedCheckpoint) and bool(target.manifest.settings.get("without_mtp"))


def _total_differences(target: ConvertedCheckpoint, work: Sequence[Piece]) -> list[str]:
    """What the manifest says of names, types and shapes, beside what the source should have given."""
    differences = []
    records = dict(target.manifest.tensors)
    for p in work:
        for output in p.outputs:
            record = records.pop(output.name, None)
            if record is None:
                differences.append(f"{output.name} is missing in the manifest")
            elif (record.dtype, record.shape) != (output.dtype, output.shape):
                differences.append(
                    f"{output.name} is {record.dtype} {list(record.shape)} in the manifest, expected {output.dtype} "
                    f"{list(output.shape)}"
                )
            elif record.source_dtype != output.source_dtype:
                differences.append(
                    f"{output.name} was {record.source_dtype} in the source of the conversion, and is "
                    f"{output.source_dtype} in this one"
                )
    differences += [f"{name} is in the manifest, but not in the source" for name in records]
    total = sum(p.bytes for p in work)
    if target.manifest.total_bytes != total:
        differences.append(f"the manifest has {target.manifest.total_bytes} bytes, expected {total}")
    return differences


def _units(work: Sequence[Piece]) -> list[list[Piece]]:
    units: list[list[Piece]] = []
    size = 0
    for p in sorted(work, key=lambda p: (p.file, p.offset, p.name)):
        if not units or size + p.bytes > _UNIT_BYTES:
            units.append([])
            size = 0
        units[-1].append(p)
        size += p.bytes
    return units
