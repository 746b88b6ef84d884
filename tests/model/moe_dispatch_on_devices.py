"""Checks of dispatched experts over eight devices, run in a process of its own.

    python -m tests.model.moe_dispatch_on_devices [quick]

With `quick` each check takes a part of its layouts. It prints the name of each check that holds; `test_moe_dispatch`
runs it.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from tests.quick_flags import with_devices

os.environ["XLA_FLAGS"] = with_devices(8, quickly=True)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from glm52_jax.kernels.experts.api import routed_experts
from glm52_jax.model import expert_dispatch
from glm52_jax.model.dispatch_policy import GATHER, DispatchPolicy
from glm52_jax.model.expert_dispatch import dispatch_experts, expert_loads
from glm52_jax.params.quantization import FLOAT8, BlockQuantized, quantize_blocks
from sharding.layout import Layout
from sharding.partition import partition

LAYERS, EXPERTS, EMBED, WIDTH, K = 2, 16, 16, 8, 4
BLOCK = (4, 4)
LAYER = 1
GENERATOR = np.random.default_rng(5)
SENT = DispatchPolicy("all_to_all")
STACKS = {
    "gate_up": GENERATOR.standard_normal((LAYERS, EXPERTS, 2, WIDTH, EMBED)).astype(np.float32),
    "down": GENERATOR.standard_normal((LAYERS, EXPERTS, EMBED, WIDTH)).astype(np.float32),
}
AXES = {"gate_up": (None, "experts", None, "expert_mlp", None), "down": (None, "experts", None, "expert_mlp")}
KINDS = {"plain": None, "fp8": FLOAT8, "int8": jnp.int8}


def layouts() -> dict[str, Layout]:
    """Every way to divide tokens, experts and widths that the presets and a user's own layouts may have."""
    made = {
        "1x8x1": Layout(expert=8),
        "2x4x1": Layout(data=2, expert=4),
        "1x4x2": Layout(expert=4, tensor=2),
        "2x2x2": Layout(data=2, expert=2, tensor=2),
        "1x1x8": Layout(tensor=8),
        "8x1x1": Layout(data=8),
        "1x1x1": Layout(),
    }
    narrow = {"expert_mlp": ()}  # eight devices cannot divide a width of two blocks
    made["1x1x8"] = made["1x1x8"].with_rules(**narrow)
    made["experts over tensor too, 1x4x2"] = made["1x4x2"].with_rules(experts=("expert", "tensor"), **narrow)
    made["experts over tensor too, 1x1x8"] = made["1x1x8"].with_rules(experts=("expert", "tensor"))
    made["experts over all, 2x4x1"] = made["2x4x1"].with_rules(experts=("data", "expert"))
    made["experts over all, 2x2x2"] = made["2x2x2"].with_rules(experts=("data", "expert"))
    made["experts over all, 8x1x1"] = made["8x1x1"].with_rules(experts=("data", "expert"))
    made["batch over data only, 2x2x2"] = made["2x2x2"].with_rules(batch=("data",))
    made["tokens over tensor, 1x4x2"] = made["1x4x2"].with_rules(tokens=("tensor",))
    return made


LAYOUTS = layouts()
QUICK = sys.argv[1:] == ["quick"]
ONE_DEVICE = jax.jit(partial(routed_experts, backend="reference"))


def junk(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What a TPU may find in a buffer that nothing was written to; on the CPU it would be zeros."""
    return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 3, dtype)


expert_dispatch.uninitialized = junk
CHECKS: list[Callable[[], None]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


@cache
def stacks(kind: str) -> tuple[Any, Any]:
    """gate_up and down, plain or in small blocks."""

    def one(weights: np.ndarray) -> Any:
        if KINDS[kind] is None:
            return jnp.asarray(weights)
        pairs = [quantize_blocks(w, BLOCK, KINDS[kind]) for w in weights.reshape(-1, *weights.shape[-2:])]
        codes, scales = (np.stack(part) for part in zip(*pairs, strict=True))
        scales = scales.reshape(*weights.shape[:-2], *scales.shape[-2:])
        codes = jnp.asarray(codes.reshape(weights.shape))
        return BlockQuantized(codes, jnp.asarray(scales), logical_shape=weights.shape[-2:], block=BLOCK)

    return one(STACKS["gate_up"]), one(STACKS["down"])


def token_axes(layout: Layout) -> tuple[str, ...]:
    return (*layout.axes_of("batch"), *layout.axes_of("tokens"))


def tokens_of(layout: Layout, each: int, case: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, experts and gates of all tokens; what padding holds is NaN."""
    generator = np.random.default_rng(each)
    devices = layout.size(token_axes(layout))
    count = devices * each
    x = generator.standard_normal((count, EMBED)).astype(np.float32)
    experts = np.argsort(generator.random((count, EXPERTS)), axis=-1)[:, :K].astype(np.int32)
    if case == "one expert":
        experts[:] = -1
        experts[:, 2] = EXPERTS - 1
    if case == "one device":
        experts = (EXPERTS - K + np.argsort(generator.random((count, K)), axis=-1)).astype(np.int32)
    if case == "no token":
        experts[:] = -1
    if case == "some padding":
        experts[generator.random(count) < 0.4] = -1
    if case == "padding devices":  # all but the last, whose tokens go everywhere
        experts[: (devices - 1) * each] = -1
    gates = np.where(experts >= 0, generator.random(experts.shape), 0).astype(np.float32)
    x[(experts < 0).all(-1)] = np.nan
    return x, experts, gates


CASES = ("all real", "some padding", "padding devices", "one device", "one expert", "no token")


@cache
def build(layout: Layout, kind: str, form: DispatchPolicy, backend: str = "reference") -> Callable[..., Any]:
    """The dispatched experts and their loads on the whole mesh."""
    mesh = layout.mesh(jax.devices()[: layout.devices])
    specs = [partition(layout, AXES[name], STACKS[name].shape, what=name) for name in ("gate_up", "down")]
    rows = P(token_axes(layout) or None)

    def run(x: Any, experts: Any, gates: Any, gate_up: Any, down: Any) -> Any:
        out = dispatch_experts(layout, x, experts, gates, gate_up, down, LAYER, backend=backend, form=form)
        return out, expert_loads(layout, experts, EXPERTS)

    # What each device returns is kept apart, so that no device can have another result than the others.
    each = P(("data", "expert", "tensor"))
    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=(rows, rows, rows, *specs), out_specs=(each, each), check_vma=False)
    )


@cache
def expected(layout: Layout, each: int, case: str, kind: str) -> np.ndarray:
    x, experts, gates = tokens_of(layout, each, case)
    return np.asarray(ONE_DEVICE(x, experts, gates, *stacks(kind), LAYER))


def compare(
    layout: Layout, form: DispatchPolicy, kind: str = "plain", each: int = 5, backend: str = "reference"
) -> None:
    run = build(layout, kind, form, backend)
    for case in CASES:
        x, experts, gates = tokens_of(layout, each, case)
        out, loads = run(x, experts, gates, *stacks(kind))
        assert out.dtype == jnp.float32
        what = f"{layout} {form} {kind} {case}"
        counts = np.bincount(experts[experts >= 0], minlength=EXPERTS)
        assert (np.asarray(loads).reshape(-1, EXPERTS) == counts).all(), what
        wanted = expected(layout, each, case, kind)
        # [data, expert, tensor, tokens, embed] of every device, and what the rules say each of them should have
        sizes = (layout.data, layout.expert, layout.tensor)
        got = np.asarray(out).reshape(*sizes, each, EMBED)
        there = token_axes(layout)
        shape = [layout.size(axis) if axis in there else 1 for axis in ("data", "expert", "tensor")]
        wanted = np.broadcast_to(wanted.reshape(*shape, each, EMBED), got.shape)
        # Sums in another order: an error is one of the largest terms, of which little may be left.
        np.testing.assert_allclose(got, wanted, atol=5e-7 * np.abs(wanted).max(), rtol=1e-5, err_msg=what)


def part(found: Sequence[Any], first: int = 0) -> Sequence[Any]:
    """All, or every third from one on."""
    return found[first::3] if QUICK else found


@check
def gathered_experts_equal_one_device() -> None:
    for layout in part([*LAYOUTS.values()]):
        compare(layout, GATHER)


@check
def gathered_quantised_experts_equal_one_device() -> None:
    compare(LAYOUTS["2x2x2"], GATHER, "fp8")
    compare(LAYOUTS["experts over all, 2x4x1"], GATHER, "int8")


@check
def experts_sorted_on_their_device_equal_one_device() -> None:
    compare(LAYOUTS["2x2x2"], GATHER, backend="cpu")


@check
def sent_experts_equal_one_device() -> None:
    for layout in part([*LAYOUTS.values()], 1):
        compare(layout, SENT)


@check
def sent_quantised_experts_equal_one_device() -> None:
    compare(LAYOUTS["experts over all, 2x2x2"], SENT, "fp8")
    compare(LAYOUTS["1x4x2"], SENT, "int8")


@check
def many_rounds_of_a_small_buffer_equal_one_device() -> None:
    names = ("1x8x1", "2x2x2", "experts over all, 2x2x2", "experts over tensor too, 1x4x2")
    for name in part(names, 2):
        compare(LAYOUTS[name], replace(SENT, capacity=0.01), each=13)


@check
def halves_equal_one_device() -> None:
    form = replace(SENT, overlap=True, capacity=0.5)
    for name, each in part((("1x8x1", 13), ("2x2x2", 13), ("1x8x1", 1)), 1):
        compare(LAYOUTS[name], form, each=each)


@check
def by_slice_equals_one_device() -> None:
    """Slices of one and of several places along `data`, with the width over `tensor` and without."""
    small = replace(SENT, capacity=0.01)
    four = Layout(data=4, expert=2).with_rules(experts=("data", "expert"))
    cases = (
        (LAYOUTS["experts over all, 2x4x1"], 2, replace(SENT, overlap=True)),
        (LAYOUTS["experts over all, 2x2x2"], 2, small),
        (LAYOUTS["experts over all, 8x1x1"], 2, SENT),
        (four, 2, small),
        (four, 2, replace(SENT, by_slice=False)),
    )
    for layout, slices, form in part(cases):
        compare(replace(layout, slices=slices), form, each=7)


def run_checks() -> Iterator[str]:
    for function in CHECKS:
        begin = time.perf_counter()
        function()
        print(function.__name__, f"{time.perf_counter() - begin:.1f} s", file=sys.stderr)
        yield function.__name__


if __name__ == "__main__":
    for name in run_checks():
        print(name, flush=True)
