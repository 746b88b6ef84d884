"""Conversion, verification and export beside `cp` of the same bytes to the same disk, in the same run.

    .venv/bin/python -m benchmarks.convert --dir /somewhere --gigabytes 8

The checkpoint has GLM-5.2's widths, names and types, and as many experts in four layers (dense and full, dense and
shared, sparse and full, MTP) as make the size; its values are random. BF16 and FP8 come one after another. Before
them, files of the whole models' sizes without values show that memory stays under what is stated there too. Every stage
is a process of its own, flushes what it writes, and goes before the next one needs the room: the disk holds the
checkpoint at most three times. Rates are bytes of the checkpoint a second; memory is the largest anonymous memory of
the process, sampled ten times a second.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, file_layout, tensor_bytes
from glm52_jax.checkpoint.journal.workers import anonymous_bytes
from glm52_jax.config import BUILT_IN, ModelConfig, QuantizationConfig
from glm52_jax.params.spec import Tensor, published_tensors

LARGEST_MEMORY = 3e9
SHARDS = 5
HALF = 0.5


def sized_config(size: float, fp8: bool) -> ModelConfig:
    """GLM-5.2's widths with few layers, and experts until the files have the size."""
    config = dataclasses.replace(
        BUILT_IN["glm-5.2"],
        num_hidden_layers=3,
        indexer_types=("full", "shared", "full"),
        mlp_layer_types=("dense", "dense", "sparse"),
        vocab_size=8 * 1024,
        eos_token_ids=(),
        pad_token_id=None,
        quantization=QuantizationConfig((128, 128)) if fp8 else None,
    )
    for experts in range(8, 257, 8):
        config = dataclasses.replace(config, n_routed_experts=experts)
        if sum(tensor.stored_bytes(config) for _, tensor in published_tensors(config)) >= size:
            break
    return config


def make(folder: Path, config: ModelConfig, shard_count: int = SHARDS, *, sparse: bool = False) -> int:
    """Random tensors under the published names in some shards; how many bytes they have.

    A sparse one has the files' sizes and none of their values: the disk holds nothing but headers.
    """
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(1 << 22).astype(np.float32) * 0.02
    tensors = [tensor for _, tensor in published_tensors(config)]
    total = sum(tensor.stored_bytes(config) for tensor in tensors)
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if size > total / shard_count:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.stored_bytes(config)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        kinds = {name: kind for tensor in shard for name, kind in stored(tensor, config).items()}
        weight_map |= dict.fromkeys(kinds, file)
        header, starts = file_layout(kinds)
        with (folder / file).open("wb") as out:
            out.write(header)
            if sparse:
                out.truncate(max(starts[name] + tensor_bytes(*kind) for name, kind in kinds.items()))
            for name in () if sparse else kinds:
                out.seek(starts[name])
                for part in values(noise, *kinds[name], rng, name.endswith("_scale_inv")):
                    out.write(part)
            out.flush()
            os.fsync(out.fileno())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "generation_config.json").write_text(json.dumps(config.generation_dict()))
    return total


def stored(tensor: Tensor, config: ModelConfig) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    if tensor.quantized and config.quantization:
        grid = tensor.scale_shape(config.quantization.block)
        return {tensor.name: (DTYPES["F8_E4M3"], tensor.shape), tensor.scale_name: (DTYPES["F32"], grid)}
    return {tensor.name: (DTYPES["F32" if tensor.float32 else "BF16"], tensor.shape)}


def values(
    noise: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator, scale: bool
) -> Iterator[memoryview]:
    """Random values from a pool, begun somewhere else in it each time, so that no two tensors are equal."""
    left = int(np.prod(shape))
    pool = np.abs(noise) if scale else noise * (200 if dtype.itemsize == 1 else 1)
    pool = pool.astype(dtype) if dtype.itemsize > 1 or left > 1 << 20 else pool[: 1 << 20].astype(dtype)
    while left:
        start = int(rng.integers(0, pool.size))
        part = pool[start : start + left]
        yield part.view(np.uint8).data
        left -= part.size


@dataclasses.dataclass
class Stage:
    """One process: seconds from start to end, and its peak of anonymous memory."""

    name: str
    seconds: float
    peak: int


def run(name: str, *command: str) -> Stage:
    begin, peak = time.perf_counter(), 0
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while child.poll() is None:
        peak = max(peak, anonymous_bytes(child.pid) or 0)
        time.sleep(0.1)
    seconds = time.perf_counter() - begin
    assert child.stderr is not None
    errors = child.stderr.read()
    if child.returncode:
        raise SystemExit(f"{name} failed: {errors}")
    return Stage(name, seconds, peak)


def glm52(*arguments: object) -> tuple[str, ...]:
    return (sys.executable, "-c", "from glm52_jax.cli import main; main()", *map(str, arguments))


def copy(source: Path, destination: Path) -> Stage:
    """`cp` and a flush of each file, by a shell, so that neither starts an interpreter."""
    script = 'mkdir "$2" && cp "$1"/* "$2"/ && sync "$2"/*'
    stage = run("cp", "sh", "-c", script, "sh", str(source), str(destination))
    shutil.rmtree(destination)
    return stage


def measure(place: Path, size: float, fp8: bool, jobs: int) -> tuple[int, list[Stage]]:
    """Stages in an order in which at most three copies are on the disk; other work on the machine disturbs both, so
    `cp` and the conversion take turns."""
    source, converted, back = place / "published", place / "converted", place / "exported"
    total = make(source, sized_config(size, fp8))
    options = ("--jobs", jobs)
    stages = []
    for _ in range(2):
        shutil.rmtree(converted, ignore_errors=True)
        stages.append(copy(source, place / "copy"))
        stages.append(run("convert", *glm52("convert", source, converted, *options)))
    stages.append(run("verify", *glm52("verify", converted, "--against", source, *options)))
    stages.append(run("verify --quick", *glm52("verify", converted, "--against", source, "--quick")))
    stages.append(run("export", *glm52("export", converted, back, *options)))
    shutil.rmtree(converted)
    stages.append(run("verify export", *glm52("verify", back, "--against", source, *options)))
    shutil.rmtree(back)
    if fp8:
        changed = ("convert --dtype bfloat16", "--dtype", "bfloat16")
    else:
        changed = ("convert --quantize fp8", "--quantize", "fp8")
    stages.append(run(changed[0], *glm52("convert", source, converted, *changed[1:], *options)))
    shutil.rmtree(converted)
    stages.append(copy(source, place / "copy"))
    shutil.rmtree(source)
    return total, stages


# A conversion that does not ask whether the disk has room, and first makes the manifest that the last step writes.
WHOLE = """
import dataclasses, sys
from pathlib import Path
from glm52_jax.checkpoint.convert import conversion
from glm52_jax.checkpoint.convert.options import ConversionOptions
from glm52_jax.checkpoint.formats.manifest import TensorRecord
conversion.refuse_too_little_room = lambda *_: None
settings = ConversionOptions(**({"dtype": "bfloat16"} if sys.argv[4] == "change" else {}))
planned = conversion.plan(sys.argv[1], Path(sys.argv[2]), settings)
print(len(planned.outputs), planned.bytes, planned.memory_bound(int(sys.argv[3])), flush=True)
tensors = {n: TensorRecord(p.file, o.source_dtype, o.dtype, o.shape, "0" * 8) for n, (p, o) in planned.outputs.items()}
len(dataclasses.replace(planned.manifest, tensors=tensors).text())
conversion.convert(planned, jobs=int(sys.argv[3]))
"""


def whole_model(place: Path, name: str, kind: str, jobs: int, seconds: float) -> tuple[int, int, int, int, float]:
    """Tensors, bytes, stated memory, largest memory and seconds of planning, converting a sparse whole model."""
    source, destination = place / name, place / "out"
    make(source, BUILT_IN[name], 282, sparse=True)
    begin, peak = time.perf_counter(), 0
    command = [sys.executable, "-c", WHOLE, str(source), str(destination), str(jobs), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        tensors, total, bound = map(int, child.stdout.readline().split())
        planned = time.perf_counter() - begin
        while child.poll() is None and time.perf_counter() - begin < planned + seconds:
            peak = max(peak, anonymous_bytes(child.pid) or 0)
            time.sleep(0.05)
        child.kill()
    shutil.rmtree(source)
    shutil.rmtree(destination)
    return tensors, total, bound, peak, planned


def show_whole_models(console: Console, place: Path, jobs: int) -> list[str]:
    """The stated and the measured memory of the released models, in files of their full size without values."""
    table = Table(title="Whole models, sparse files, stopped after 10 s", title_justify="left")
    for column in ("model", "tensors", "TB", "plan, s", "stated MiB", "largest MiB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    missed = []
    for name, kind in (("glm-5.2", "copy"), ("glm-5.2-fp8", "copy"), ("glm-5.2-fp8", "change")):
        tensors, total, bound, peak, planned = whole_model(place, name, kind, jobs, 10)
        sizes = f"{bound / 2**20:,.0f}", f"{peak / 2**20:,.0f}"
        title = name + " --dtype bfloat16" * (kind == "change")
        table.add_row(title, f"{tensors:,}", f"{total / 1e12:.2f}", f"{planned:.1f}", *sizes)
        if peak > bound:
            missed.append(f"stated memory of {title}")
    console.print(table)
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a new folder is made in it, and removed")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the checkpoint; 0 for none")
    parser.add_argument("--jobs", type=int, default=max(4, min(16, 2 * (os.cpu_count() or 2))))
    arguments = parser.parse_args()
    console = Console(width=100)
    place = arguments.dir / f"glm52-convert-{os.getpid()}"
    missed = []
    try:
        missed += show_whole_models(console, place, arguments.jobs)
        for fp8 in (False, True) if arguments.gigabytes else ():
            total, stages = measure(place, arguments.gigabytes * 1e9, fp8, arguments.jobs)
            best = max(total / stage.seconds / 1e6 for stage in stages if stage.name == "cp")
            title = f"{'FP8' if fp8 else 'BF16'}, {total / 1e9:.2f} GB, {arguments.jobs} threads"
            table = Table(title=title, title_justify="left")
            for column in ("stage", "seconds", "MB/s", "of cp", "anonymous MiB"):
                table.add_column(column, justify="left" if column == "stage" else "right")
            for stage in stages:
                rate = total / stage.seconds / 1e6
                table.add_row(
                    stage.name,
                    f"{stage.seconds:.1f}",
                    f"{rate:,.0f}",
                    f"{rate / best:.2f}",
                    f"{stage.peak / 2**20:,.0f}",
                )
                if stage.peak > LARGEST_MEMORY:
                    missed.append(f"{title}: memory of {stage.name}")
            fastest = max(total / stage.seconds / 1e6 for stage in stages if stage.name == "convert")
            if fastest < HALF * best:
                missed.append(f"{title}: rate of convert")
            console.print(table)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    console.print("Goals: the fastest convert at half the rate of the fastest cp, less than 3 GB of anonymous memory.")
    console.print(f"Missed by {', '.join(missed)}." if missed else "Met by all.")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
