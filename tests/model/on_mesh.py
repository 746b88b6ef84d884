"""The model on meshes of up to eight devices, beside what the reference says; run in a process that has the devices.

    python -m tests.model.on_mesh CHECK...

prints the name of each check that holds. `test_mesh` runs them.
"""

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.quick_flags import with_devices

os.environ["XLA_FLAGS"] = with_devices(8, quickly=True)

import jax
import numpy as np

from glm52_jax.cache.cache_format import CacheFormat
from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.config import QuantizationConfig
from glm52_jax.model.decoder_layer import ExecutionPolicy
from glm52_jax.model.dispatch_policy import DispatchPolicy
from glm52_jax.params.sharding import param_shardings
from infer.generate import generate
from sharding.errors import InputError
from sharding.layout import Layout
from tests.model.cases import FORMS, ON_TPUS, all_cases, check, figures
from tests.model.mesh_paths import MeshWalk
from tests.model.random_layouts import quick_trials
from tests.model.random_layouts import run as random_layouts_run
from tests.model.tiny import random_params, tiny, tiny_case

LONG = {"experts": ("expert", "tensor"), "expert_mlp": ()}
# One prompt's chunk over `expert` too, and its pages over everything.
WHOLE = {"batch": ("data",), "tokens": ("expert",), "kv_pages": ("expert", "tensor")}
CHECKS: dict[str, Callable[[], None]] = {}


def walk(
    name: str,
    case: str,
    layout: Layout,
    form: str,
    size: int,
    page_size: int = 3,
    dispatch: DispatchPolicy | None = None,
) -> None:
    def run() -> None:
        found, policy = all_cases()[case], dataclasses.replace((FORMS | ON_TPUS)[form], dispatch=dispatch)
        result = MeshWalk(found, found.spoiled_params(), layout, page_size=page_size).run(size, policy)
        check(found, result.seen)

    CHECKS[name] = run


walk("batch-and-experts", "released_plan", Layout(2, 4, 1), "absorbed-indices-cpu", 7)
walk("pages-and-heads", "released_plan", Layout(1, 1, 4), "absorbed-indices-cpu", 7)
walk("pages-and-heads-mask", "irregular_plan", Layout(1, 2, 2), "absorbed-mask-reference", 7)
walk("pages-and-heads-expanded", "left_padded", Layout(1, 2, 2), "expanded-mask-cpu", 16)
walk("all-axes", "grouped_bias", Layout(2, 2, 2), "absorbed-indices-reference", 5)
walk("one-token-a-step", "left_padded", Layout(1, 2, 4), "absorbed-indices-cpu", 1, 2)
walk("more-pages-than-devices", "all_full", Layout(1, 2, 4), "absorbed-indices-cpu", 16, 1)
walk("experts-over-tensor", "released_plan", Layout(1, 2, 4).with_rules(**LONG), "absorbed-indices-cpu", 16)
walk("rows-to-experts", "released_plan", Layout(1, 4, 2), "absorbed-indices-cpu", 16, 3, DispatchPolicy("all_to_all"))
walk("fp8-weights", "fp8", Layout(1, 4, 1), "absorbed-indices-cpu", 16)
walk("kernels-for-tpus", "released_plan", Layout(1, 2, 2), "absorbed-indices", 16, 4)
walk("kernels-for-tpus-whole", "released_plan", Layout(1, 2, 4).with_rules(**WHOLE), "absorbed-indices", 16, 8)
walk("one-prompt-over-all", "released_plan", Layout(1, 2, 4).with_rules(**WHOLE), "absorbed-indices-cpu", 8)
walk("one-prompt-over-all-expanded", "irregular_plan", Layout(2, 2, 2).with_rules(**WHOLE), "expanded-mask-cpu", 16)


def named(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def note(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS[name] = function
        return function

    return note


@named("fp8-cache")
def fp8_cache() -> None:
    """Rows are rounded one by one, on whichever device they are."""
    config = tiny(index_head_dim=16, index_n_heads=8)
    params, form = random_params(config), CacheFormat("fp8_groups", "fp8_rotated")
    case = tiny_case(config, (29, 17), params=params, cache_format=form)
    found = MeshWalk(case, params, Layout(1, 2, 4), page_size=3, form=form).run(7, FORMS["absorbed-indices-cpu"])
    differences = figures(case, found.seen)
    assert differences["logits"] < 0.01, differences
    assert differences["topk"] == 0, differences


@named("ties-over-devices")
def ties() -> None:
    """Tokens all alike: scores are equal everywhere, and the lowest positions win, whichever devices have them."""
    config = tiny()
    params = random_params(config)
    case = tiny_case(config, (30, 21), params=params, tokens=np.full((2, 30), 5, np.int32), form=ExecutionPolicy())
    found = MeshWalk(case, params, Layout(1, 2, 4), page_size=2).run(7, FORMS["absorbed-indices-cpu"])
    check(case, found.seen)


@named("fp8-blocks-over-tensor")
def fp8_blocks() -> None:
    """Heads and widths in blocks small enough to be divided; scales travel with their codes."""
    config = tiny(quantization=QuantizationConfig((8, 8)), qk_nope_head_dim=8, v_head_dim=8)
    plain = dataclasses.replace(config, quantization=None)
    with _folder() as folder:
        write_checkpoint(folder, config, random_params(plain))
        params = load_params(folder, config, dtype="float32")
    case = tiny_case(config, (25, 18), params=params)
    for policy in (FORMS["absorbed-indices-cpu"], ON_TPUS["absorbed-indices"]):
        check(case, MeshWalk(case, params, Layout(1, 2, 2), page_size=3).run(7, policy).seen)


@named("generation")
def generation() -> None:
    """Greedy texts with and without drafts, sampled ones, and batches that the devices do not divide.

    A weight that is NaN, on one of the devices, ends them all with a sentence.
    """
    case = all_cases()["released_plan"]
    prompts = [row[real].tolist() for row, real in zip(case.tokens, case.real, strict=True)]
    expected = case.golden["greedy"].tolist()
    layout = Layout(2, 2, 2)
    single = case.params()
    params = load_params(
        case.folder, case.config, dtype="float32", shardings=param_shardings(case.config, layout, layout.mesh())
    )
    for drafts in (0, 3):
        found = generate(params, case.config, prompts, len(expected[0]), 0.0, drafts, stop_ids=(), layout=layout)
        assert found == expected, (drafts, found, expected)
        sharding = params["attention"]["o"].sharding
        output = jax.device_put(params["attention"]["o"].at[3, 0, -1, 0].set(np.nan), sharding)
        broken = params | {"attention": params["attention"] | {"o": output}}
        try:
            found = generate(broken, case.config, prompts, len(expected[0]), 0.0, drafts, stop_ids=(), layout=layout)
        except InputError as error:
            found = str(error)
        assert str(found).startswith("prompt 1: the model's output is NaN or infinite from position 0 on"), found
    three = [*prompts, prompts[0][:3]]
    options: dict[str, Any] = {"temperature": 1.0, "seed": 7, "stop_ids": ()}
    one = generate(single, case.config, three, 6, **options)
    assert generate(params, case.config, three, 6, layout=layout, **options) == one


@named("random-layouts")
def random_layouts() -> None:
    """Rules that once gave other texts, and some drawn at random; `tests.model.random_layouts` draws hundreds."""
    assert not random_layouts_run(quick_trials())


def _folder() -> Any:
    import tempfile
    from pathlib import Path

    class Folder(tempfile.TemporaryDirectory):
        def __enter__(self) -> Any:
            return Path(super().__enter__()) / "checkpoint"

    return Folder()


def main() -> None:
    assert len(jax.devices()) == 8
    for name in sys.argv[1:] or CHECKS:
        CHECKS[name]()
        print(name, flush=True)


if __name__ == "__main__":
    main()
