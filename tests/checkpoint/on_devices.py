"""Checks of loading and saving over several devices, run in a process of eight devices or in two of four.

    python -m tests.checkpoint.on_devices FOLDER
    python -m tests.checkpoint.on_devices FOLDER ADDRESS PROCESS

The first makes its checkpoints in FOLDER and prints the name of each check that holds, the second is one of two
processes; `test_load_sharded` runs them.
"""

import contextlib
import dataclasses
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.quick_flags import with_devices

os.environ["XLA_FLAGS"] = with_devices(8 if len(sys.argv) < 4 else 4)

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load import leaf_arrays
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.checkpoint.sources.open_source import PublishedFiles, open_checkpoint
from glm52_jax.checkpoint.sources.published import PublishedCheckpoint
from glm52_jax.config import ModelConfig, QuantizationConfig, load_config
from glm52_jax.params.spec import Param, Stack
from sharding.errors import InputError
from tests.checkpoint.builders import EXPERTS, FP8, flat, random_params, small_config
from tests.checkpoint.conversions import contents, run_convert
from tests.trees import assert_same

RULES = {
    "experts": "expert",
    "expert_mlp": "tensor",
    "heads": "tensor",
    "index_heads": "tensor",
    "mlp": "tensor",
    "router_experts": "expert",
    "vocab": "tensor",
}
MESHES = [(1, 1), (2, 1), (1, 2), (1, 4), (2, 2), (4, 2), (2, 4), (8, 1)]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"dtype": "bfloat16"},  # cast from float32
    "fp8": {"fp8": "keep"},
    "fused": {},
}
CONFIG = small_config()
# Blocks so small that heads and widths can be cut between them.
FP8_CONFIG = dataclasses.replace(CONFIG, quantization=QuantizationConfig((8, 8)))
ROWS = tuple(
    name + kind
    for name in ("gate_proj", "up_proj", "q_b_proj", "wq_b", "weights_proj", "embed_tokens", "lm_head")
    for kind in (".weight", ".weight_scale_inv")
)
"""Weights whose rows `RULES` divides over `tensor`."""
CHECKS: list[Callable[[Path], None]] = []


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS.append(function)
    return function


def make(folder: Path) -> None:
    params = random_params(CONFIG)
    write_checkpoint(folder / "plain", CONFIG, params)
    write_checkpoint(folder / "fp8", FP8_CONFIG, params, shard_bytes=300_000)
    write_checkpoint(folder / "coarse", dataclasses.replace(CONFIG, quantization=FP8), params)
    write_checkpoint(folder / "fused", CONFIG, params, fused_experts=True)
    for name in ("plain", "fp8"):
        run_convert(folder / name, folder / f"{name}-converted")


def mesh(expert: int, tensor: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: expert * tensor]).reshape(expert, tensor), ("expert", "tensor"))


def by_rules(mesh: Mesh, config: ModelConfig = CONFIG) -> Callable[[Param], NamedSharding]:
    """Experts over one axis, heads, widths and vocabulary over the other, the rest on every device."""

    def sharding(param: Param) -> NamedSharding:
        stacked = len(param.stacked_shape(config)) - len(param.axes)
        return NamedSharding(mesh, PartitionSpec(*[None] * stacked, *map(RULES.get, param.axes)))

    return sharding


def columns(mesh: Mesh) -> Callable[[Param], NamedSharding]:
    """The last dimension of everything that has two, over all devices that divide it."""

    def sharding(param: Param) -> NamedSharding:
        rank = len(param.stacked_shape(CONFIG))
        cut = rank > 1 and param.shape[-1] % 16 == 0
        return NamedSharding(mesh, PartitionSpec(*[None] * (rank - 1), "tensor" if cut else None))

    return sharding


@contextlib.contextmanager
def changed(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def in_stages() -> Any:
    """As on an accelerator, in stages so small that most arrays take several."""
    return changed(leaf_arrays, _in_host_memory=leaf_arrays._in_device_memory, STAGE_BYTES=40_000)


@contextlib.contextmanager
def counting() -> Iterator[Counter]:
    """Bytes that are read of each tensor of a published folder."""
    counts: Counter = Counter()
    pread = PublishedFiles.pread

    def count(self: PublishedFiles, name: str, offset: int, out: memoryview) -> None:
        counts[name] += len(out)
        pread(self, name, offset, out)

    with changed(PublishedFiles, pread=count):
        yield counts


def sizes(folder: Path) -> dict[str, int]:
    opened: PublishedCheckpoint = open_checkpoint(folder)
    return {name: opened.entry(name).stop - opened.entry(name).start for name in opened.where}


def no_more_than_its_part(params: dict[str, Any], used: Mesh) -> None:
    """Each device holds the part that its sharding gives it, and devices that hold the same share one buffer."""
    for path, leaf in flat(params).items():
        for array in jax.tree.leaves(leaf):
            part = array.sharding.shard_shape(array.shape)
            pointers: dict[str, set[int]] = {}
            for shard in array.addressable_shards:
                assert shard.data.shape == part, path
                pointers.setdefault(str(shard.index), set()).add(shard.data.unsafe_buffer_pointer())
            assert all(len(p) == 1 for p in pointers.values()), path
    for array in jax.tree.leaves(params["moe"]["down"]):
        part = array.addressable_shards[0].data.shape
        assert part[1] == EXPERTS // used.shape["expert"]
        assert part[3] == array.shape[3] // used.shape["tensor"]


@check
def published_shards_equal_the_whole(folder: Path) -> None:
    for kind, keywords in KINDS.items():
        whole = load_params(folder / kind, **keywords)
        for shape in MESHES:
            found = load_params(folder / kind, **keywords, shardings=by_rules(mesh(*shape)))
            assert_same(found, whole)
            no_more_than_its_part(found, mesh(*shape))


@check
def converted_shards_equal_the_whole(folder: Path) -> None:
    for kind in ("plain", "fp8"):
        whole = load_params(folder / kind, **KINDS[kind])
        for shape in ((1, 1), (2, 1), (2, 2), (2, 4)):
            rules = by_rules(mesh(*shape))
            assert_same(load_params(folder / f"{kind}-converted", **KINDS[kind], shardings=rules), whole)


@check
def dequantized_shards_equal_the_whole(folder: Path) -> None:
    for kind in ("fp8", "coarse"):  # in the coarse one a head of kv_b begins in the middle of a block
        whole = load_params(folder / kind, fp8="dequantize")
        for shardings in (by_rules(mesh(2, 4)), columns(mesh(1, 8))):
            assert_same(load_params(folder / kind, fp8="dequantize", shardings=shardings), whole)


@check
def stages_equal_the_whole(folder: Path) -> None:
    for kind, shape in (("plain", None), ("fp8", (2, 2))):
        whole = load_params(folder / kind)
        with in_stages():
            assert_same(load_params(folder / kind, shardings=shape and by_rules(mesh(*shape))), whole)


@check
def shardings_are_those_that_were_asked_for(folder: Path) -> None:
    rules = by_rules(mesh(2, 4))
    params = flat(load_params(folder / "plain", shardings=rules))
    assert params["moe.down"].sharding.spec == PartitionSpec(None, "expert", None, "tensor")
    assert params["attention.input_norm"].sharding.is_fully_replicated
    fp8 = flat(load_params(folder / "fp8", shardings=rules))
    assert fp8["attention.q_b"].codes.sharding.spec == PartitionSpec(None, "tensor", None)
    assert fp8["attention.o"].codes.sharding.spec == PartitionSpec(None, None, "tensor")
    assert fp8["attention.o"].scales.sharding == fp8["attention.o"].codes.sharding


@check
def one_device_may_be_another_than_the_default(folder: Path) -> None:
    device = jax.devices()[5]
    for kind in ("plain", "fp8"):
        whole, found = (load_params(folder / kind, shardings=s) for s in (None, lambda _: SingleDeviceSharding(device)))
        assert_same(found, whole)
        assert {d for leaf in jax.tree.leaves(found) for d in leaf.devices()} == {device}
    assert not any(leaf.committed for leaf in jax.tree.leaves(whole))


@check
def every_byte_is_read_once(folder: Path) -> None:
    for kind in KINDS:
        for shardings in (None, by_rules(mesh(2, 4)), by_rules(mesh(1, 2))):
            with counting() as counts:
                load_params(folder / kind, **KINDS[kind], shardings=shardings)
            for name, size in sizes(folder / kind).items():
                if "kv_b" in name:  # two parameters are made of it, and slices of heads share rows of scales
                    assert size <= counts[name] <= 2.5 * size, name
                else:
                    assert counts[name] == size, name


@check
def shardings_that_do_not_fit_are_refused_before_reading(folder: Path) -> None:
    def over(axes: dict[str | None, str], used: Mesh) -> Callable[[Param], Any]:
        return lambda p: NamedSharding(
            used, PartitionSpec(*[None] * (p.stack is not Stack.GLOBAL), *map(axes.get, p.axes))
        )

    three, eight = Mesh(np.array(jax.devices()[:3]), ("expert",)), Mesh(np.array(jax.devices()), ("tensor",))
    abstract = AbstractMesh((8,), ("tensor",))
    cases: list[tuple[str, Callable[[Param], Any], str]] = [
        (
            "plain",
            over({"router_experts": "expert"}, three),
            "moe.router (5, 8, 64) cannot be sharded: dimension 1 (router_experts) has size 8, which mesh axis expert "
            "of 3 does not divide",
        ),
        (
            "plain",
            over({"heads": "tensor"}, eight),
            "attention.q_b (6, 4, 40, 48) cannot be sharded: dimension 1 (heads) has size 4, which mesh axis tensor of "
            "8 does not divide",
        ),
        (
            "fp8",
            over({"expert_mlp": "tensor"}, eight),
            "moe.gate_up is in codes with a scale for each 8 x 8 of them, and mesh axis tensor of 8 would cut its 32 "
            "rows into 4 each, expected a multiple of 8",
        ),
        (
            "fp8",
            lambda p: NamedSharding(eight, PartitionSpec(None, None, "tensor") if p.logical_shape else PartitionSpec()),
            "attention.q_b (6, 4, 40, 48) is in codes of which dimensions 1 to 2 are one, so dimension 2 cannot be "
            "sharded over mesh axis tensor of 8, only dimension 1 can",
        ),
        ("plain", lambda p: NamedSharding(abstract, PartitionSpec()), "is over a mesh without devices"),
        ("plain", lambda p: PartitionSpec(), "sharding of embed is a P, expected a jax.sharding.Sharding"),
        ("plain", lambda p: NamedSharding(eight, PartitionSpec(*[None] * 9)), "at most 2 entries for (96, 64)"),
    ]
    for kind, shardings, sentence in cases:
        with counting() as counts, pytest.raises(InputError, match=re.escape(sentence)):
            load_params(folder / kind, shardings=shardings)
        assert not counts


# Saving: from any number of devices to any other.


@check
def what_is_written_from_shards_is_what_is_written_from_one_device(folder: Path) -> None:
    for kind in ("plain", "fp8"):
        config = load_config(folder / kind)
        whole = load_params(folder / kind)
        write_checkpoint(folder / f"{kind}-one", config, whole, shard_bytes=200_000)
        for shape in ((2, 4), (8, 1)):
            target = folder / f"{kind}-{shape[0]}"
            params = load_params(folder / kind, shardings=by_rules(mesh(*shape)))
            write_checkpoint(target, config, params, shard_bytes=200_000)
            assert contents(target) == contents(folder / f"{kind}-one")


@check
def orbax_takes_parameters_from_any_number_of_devices_to_any_other(folder: Path) -> None:
    import orbax.checkpoint as ocp

    shapes = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (2, 4)}
    trees = {n: load_params(folder / "fp8", shardings=by_rules(mesh(*shape)))["moe"] for n, shape in shapes.items()}
    with ocp.StandardCheckpointer() as checkpointer:
        for saved, restored in ((1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (8, 1), (8, 2)):
            path = folder / f"orbax-{saved}"
            if not path.exists():
                checkpointer.save(path, trees[saved])
                checkpointer.wait_until_finished()
            found = checkpointer.restore(path, jax.tree.map(ocp.utils.to_shape_dtype_struct, trees[restored]))
            assert_same(found, trees[1])
            shardings = [[a.sharding for a in jax.tree.leaves(tree)] for tree in (found, trees[restored])]
            assert shardings[0] == shardings[1]


@check
def a_converted_folder_is_restored_on_any_number_of_devices(folder: Path) -> None:
    """With Orbax alone, from what one process on one device wrote; `test_convert` has FP8 on 2, 4 and 8."""
    import orbax.checkpoint as ocp

    whole = load_params(folder / "plain")
    with ocp.StandardCheckpointer() as checkpointer:
        path = folder / "plain-converted" / "params"
        saved = checkpointer.metadata(path).item_metadata
        for devices in (1, 2, 4, 8):
            used = Mesh(np.array(jax.devices()[:devices]), ("expert",))

            def abstract(leaf: Any, used: Mesh = used) -> Any:
                spec = PartitionSpec("expert") if ".experts." in leaf.name else PartitionSpec()
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(used, spec))

            found = checkpointer.restore(path, jax.tree.map(abstract, saved))
            for number, layer in enumerate(range(1, 6)):
                down = found["model"]["layers"][str(layer)]["mlp"]["experts"]["down_proj"]["weight"]
                assert down.addressable_shards[0].data.shape[0] == EXPERTS // devices
                assert np.array_equal(down, whole["moe"]["down"][number])
            assert np.array_equal(found["lm_head"]["weight"], whole["head"])


# Two processes, each with half of the devices.


def of_one_process(folder: Path, address: str, process: int) -> None:
    """Each process reads what its devices hold, and no more."""
    folder = folder / str(process)
    make(folder)
    jax.distributed.initialize(address, 2, process)
    with jax.default_device(jax.local_devices()[0]):
        whole = {kind: load_params(folder / kind) for kind in ("plain", "fp8")}
    assert (jax.device_count(), jax.local_device_count()) == (8, 4)
    devices = np.array(jax.devices())
    meshes = {"expert": devices.reshape(2, 4), "tensor": devices.reshape(2, 4).T}  # by the axis that divides processes
    for kind, expected in whole.items():
        for across, grid in meshes.items():
            with counting() as counts:
                found = load_params(folder / kind, shardings=by_rules(Mesh(grid, ("expert", "tensor"))))
            for array, complete in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                for shard in array.addressable_shards:
                    assert np.asarray(shard.data).tobytes() == np.asarray(complete)[shard.index].tobytes()
            check_counts(folder / kind, counts, across, process)
    print("process", process, "reads what it needs", flush=True)


def check_counts(folder: Path, counts: Counter, across: str, process: int) -> None:
    """Of experts all or nothing; of rows that are divided the half; of columns all, since files hold whole rows."""
    for name, size in sizes(folder).items():
        expected = size
        half = ("mlp.gate.weight", "e_score_correction_bias") if across == "expert" else ROWS
        if across == "expert" and ".experts." in name:
            expert = int(name.split(".experts.")[1].split(".")[0])
            expected = size * (expert // (EXPERTS // 2) == process)
        elif name.endswith(half):
            expected = size // 2
        if "kv_b_proj" not in name:
            assert counts[name] == expected, (name, counts[name], expected)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if len(sys.argv) > 3:
        of_one_process(place, sys.argv[2], int(sys.argv[3]))
    else:
        make(place)
        for function in CHECKS:
            begin = time.perf_counter()
            function(place)
            print(function.__name__, f"{time.perf_counter() - begin:.1f} s", file=sys.stderr)
            print(function.__name__, flush=True)
