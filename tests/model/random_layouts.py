"""Layouts and rules at random on eight CPU devices: each is refused, or it computes what one device does.

    python -m tests.model.random_layouts --count 300 --seed 0

draws 300 layouts, of which some are refused, and prints a line for each that differs and one with the counts. A trial
compares logits, hidden states, selections and experts of a walk through the cache, then greedy texts of `generate`.
`--first N` leaves out the first N draws, `--only N` takes one, `--walks` is the walk alone with a smaller model, in a
fifth of the time. A few of these are among the checks of `on_mesh`.
"""

import argparse
import dataclasses
import os
import sys
import time
from functools import cache
from typing import Any
from unittest.mock import patch

from tests.quick_flags import with_devices

# Compilation takes nearly all of the time.
os.environ["XLA_FLAGS"] = with_devices(8, quickly=True)

import jax
import numpy as np

from glm52_jax.cache.cache_format import CACHE_FORMATS
from glm52_jax.config import ModelConfig, QuantizationConfig
from glm52_jax.model.decoder_layer import ExecutionPolicy
from glm52_jax.model.dispatch_policy import DispatchPolicy
from glm52_jax.params.sharding import param_specs
from infer.generate import generate
from infer.selftest.tiny_model import in_blocks
from sharding.errors import InputError
from sharding.layout import AXES, DEFAULT_RULES, Layout, logical_names
from tests.model.cases import complaints, figures
from tests.model.mesh_paths import MeshWalk, device_put_args
from tests.model.tiny import TinyCase, random_params, random_tokens, tiny, tiny_case

CONFIG = tiny(
    num_attention_heads=8,
    intermediate_size=64,
    moe_intermediate_size=64,
    qk_nope_head_dim=8,
    v_head_dim=8,
    index_head_dim=16,
)
"""Every size is a multiple of eight, and of eight blocks where it is in codes."""
QUICK = dataclasses.replace(
    CONFIG,
    num_hidden_layers=2,
    indexer_types=("full", "full"),
    mlp_layer_types=("sparse", "sparse"),
    num_nextn_predict_layers=0,
)
"""Of layers all alike, so that no branch is compiled that is not taken."""
LENGTHS = (29, 17, 3, 22)  # three of them longer than `index_topk`
NEW_TOKENS = 8
FORMS = (
    ExecutionPolicy("absorbed", "indices", "cpu"),
    ExecutionPolicy("absorbed", "mask", "reference"),
    ExecutionPolicy("expanded", "mask", "cpu"),
)
QUICK_DRAWS = 8
METHODS = {"fp8": "fp8", "int8": "blockwise_int8"}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One layout and how to run it.

    Attributes:
        weights: "plain", "fp8" or "int8", in blocks of eight.
        kv: see `CACHE_FORMATS`.
        form: of attention and selection in the walk.
        dispatch: of experts there.
        size: tokens of a step of the walk, and of a prefill step of generation.
        page_size: of the walk.
        drafts: of generation.
        quick: the smaller model, and the walk alone.
    """

    layout: Layout
    weights: str = "plain"
    kv: str = "plain"
    form: ExecutionPolicy = FORMS[0]
    dispatch: DispatchPolicy | None = None
    size: int = 8
    page_size: int = 2
    drafts: int = 0
    quick: bool = False

    @property
    def words(self) -> str:
        layout = self.layout
        changed = {n: a for n, a in layout.rules if a != dict(DEFAULT_RULES).get(n, ())}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in ("layout", "form")}
        sizes = f"data {layout.data} x expert {layout.expert} x tensor {layout.tensor} ({layout.slices} slices)"
        return f"{sizes} {changed} {self.form.attention}-{self.form.selection} {rest}"

    def refusal(self) -> str | None:
        """Why a step cannot have the layout, None where it can."""
        try:
            param_specs(_params(self.weights, self.quick), _config(self.weights, self.quick), self.layout)
        except InputError as error:
            return str(error)
        return None

    def problems(self) -> list[str]:
        """What differs from one device."""
        problems = self._walk()
        return problems if self.quick else problems + self._generate()

    def _walk(self) -> list[str]:
        case, parts = _case(self.weights, self.kv, self.quick), self.layout.parts("tokens")
        policy = dataclasses.replace(self.form, dispatch=self.dispatch)
        walk = MeshWalk(case, case.made_params, self.layout, page_size=self.page_size, form=CACHE_FORMATS[self.kv])
        seen = walk.run(-(-self.size // parts) * parts, policy).seen
        if self.kv == "plain":
            return list(complaints(case, seen))
        found = figures(case, seen)  # a row that is rounded the other way moves what is made of it
        return [f"{found}"] if found["logits"] > 0.05 or found["topk"] > 0.05 else []

    def _generate(self) -> list[str]:
        config, params = _config(self.weights, self.quick), _params(self.weights, self.quick)
        alone = _texts(self.weights, self.kv, self.quick)
        options: dict[str, Any] = {}
        if self.layout.devices > 1:
            mesh = self.layout.mesh(jax.devices()[: self.layout.devices])
            params, options = device_put_args(params, config, self.layout, mesh), {"layout": self.layout}
        # A smaller layout has the first of the devices, where `generate` would want all that there are.
        first = jax.devices()[: self.layout.devices]
        with patch.object(jax, "devices", lambda *_: first):
            found = _generated(params, config, self.kv, self.size, self.drafts, **options)
        return [f"texts {found}, not {alone}"] if found != alone else []


def _generated(params: Any, config: ModelConfig, kv: str, size: int, drafts: int, **options: Any) -> list[list[int]]:
    return generate(
        params, config, _prompts(), NEW_TOKENS, 0.0, drafts, stop_ids=(), chunk=size, backend=None,
        cache_format=CACHE_FORMATS[kv], **options,
    )  # fmt: skip


def _config(weights: str, quick: bool) -> ModelConfig:
    config = QUICK if quick else CONFIG
    if weights == "plain":
        return config
    return dataclasses.replace(config, quantization=QuantizationConfig((8, 8), method=METHODS[weights]))


@cache
def _params(weights: str, quick: bool) -> dict[str, Any]:
    params = random_params(QUICK if quick else CONFIG)
    return params if weights == "plain" else in_blocks(params, _config(weights, quick))


@cache
def _case(weights: str, kv: str, quick: bool) -> TinyCase:
    return tiny_case(_config(weights, quick), LENGTHS, params=_params(weights, quick), cache_format=CACHE_FORMATS[kv])


def _prompts() -> list[list[int]]:
    tokens = random_tokens(len(LENGTHS), max(LENGTHS), seed=1)
    return [row[:length].tolist() for row, length in zip(tokens, LENGTHS, strict=True)]


@cache
def _texts(weights: str, kv: str, quick: bool) -> list[list[int]]:
    return _generated(_params(weights, quick), _config(weights, quick), kv, 16, 0)


def draw(seed: int) -> Trial:
    """A trial of eight devices at most, often of rules that a step can have."""
    rng = np.random.default_rng(seed)
    devices = int(rng.choice([1, 2, 4, 8], p=[0.02, 0.08, 0.2, 0.7]))
    sizes = _factors(rng, devices)
    names = logical_names()
    # What cannot be divided is refused at once, so that those names are drawn less often.
    weight = np.array([0.25 if name in ("embed", "kv_lora", "q_lora", "layers") else 1.0 for name in names])
    changed = rng.choice(names, size=int(rng.integers(1, 4)), replace=False, p=weight / weight.sum())
    rules = {}
    for name in changed.tolist():
        count = int(rng.choice([0, 1, 2, 3], p=[0.1, 0.45, 0.35, 0.1]))
        rules[name] = tuple(rng.permutation(AXES)[:count].tolist())
    if rng.random() < 0.5:  # free axes for heads, pages and tokens
        rules["batch"] = rules.get("batch", ("data",)) if rng.random() < 0.8 else ()
    data = sizes[0]
    slices = int(rng.choice([s for s in (1, 2, 4) if data % s == 0]))
    exchange_implementation = (
        DispatchPolicy("all_to_all", overlap=bool(rng.random() < 0.3)) if rng.random() < 0.5 else None
    )
    return Trial(
        Layout(*sizes, slices=slices, name=f"draw-{seed}").with_rules(**rules),
        weights=str(rng.choice(["plain", "fp8", "int8"], p=[0.7, 0.2, 0.1])),
        kv=str(rng.choice(list(CACHE_FORMATS), p=[0.8, 0.1, 0.1])),
        form=FORMS[int(rng.integers(len(FORMS)))],
        dispatch=exchange_implementation,
        size=int(rng.choice([5, 8, 16])),
        page_size=int(rng.choice([1, 2, 3, 8])),
        drafts=int(rng.choice([0, 3])),
    )


def _factors(rng: np.random.Generator, devices: int) -> tuple[int, int, int]:
    sizes = [1, 1, 1]
    while devices > 1:
        sizes[int(rng.integers(3))] *= 2
        devices //= 2
    return sizes[0], sizes[1], sizes[2]


def _on(data: int, expert: int, tensor: int, **rules: tuple[str, ...]) -> Layout:
    return Layout(data, expert, tensor, name="quick").with_rules(**rules)


# Each rule once gave other texts than one device.
ONCE_WRONG = (
    Trial(_on(1, 4, 2, mlp=("expert", "tensor"), vocab=("expert", "tensor"), router_experts=("tensor",))),
    Trial(_on(8, 1, 1, vocab=("data",), index_heads=("data",), mlp=("data",))),
    Trial(_on(1, 4, 2, batch=("data",), tokens=("expert",)), form=FORMS[0]),
    Trial(_on(2, 2, 2, vocab=("tensor", "data"), index_heads=("expert", "tensor"), router_experts=("data", "tensor"))),
)


# Collectives beside each other in a branch and outside of it once stopped this one, see `collectives.after`.
ONCE_STOPPED = Trial(_on(1, 4, 2, batch=(), heads=(), vocab=("expert",)), size=16)


def quick_trials() -> list[Trial]:
    """Walks alone, of the smaller model: the rules that were wrong, and the first draws of a seed."""
    drawn = [dataclasses.replace(draw(seed), weights="plain", kv="plain") for seed in range(QUICK_DRAWS)]
    return [dataclasses.replace(trial, quick=True) for trial in (*ONCE_WRONG, *drawn)]


def run(trials: list[Trial], *, say: bool = False) -> int:
    """Runs the trials that are not refused; returns how many were wrong."""
    refused = wrong = right = 0
    start = time.time()
    for number, trial in enumerate(trials):
        if say and number % 10 == 0:
            jax.clear_caches()  # thousands of programs would fill the memory
            print(f"... {number} drawn, {right} equal, {refused} refused, {time.time() - start:.0f} s", flush=True)
        if trial.refusal() is not None:
            refused += 1
            continue
        try:
            problems = trial.problems()
        except Exception as error:  # a fault too, and the others are still worth a look
            problems = [f"{type(error).__name__}: {error}"]
        wrong, right = wrong + bool(problems), right + (not problems)
        if problems:
            print(f"WRONG {trial.layout.name} {trial.words}: {'; '.join(problems)}", flush=True)
    if say:
        print(f"{len(trials)} layouts: {right} equal, {refused} refused, {wrong} wrong", flush=True)
    return wrong


def main() -> None:
    assert len(jax.devices()) == 8
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--walks", action="store_true")
    asked = parser.parse_args()
    numbers = range(asked.first, asked.count) if asked.only is None else [asked.only]
    trials = [draw(asked.seed * 100_000 + number) for number in numbers]
    if asked.walks:
        trials = [dataclasses.replace(trial, quick=True) for trial in trials]
    elif asked.only is None and not asked.first:
        trials.insert(0, ONCE_STOPPED)
    sys.exit(bool(run(trials, say=True)))


if __name__ == "__main__":
    main()
