"""Fourth section: a tiny model from prompts to tokens on the whole mesh, beside one device.

The model has GLM-5.2's layer plan and random weights wide enough that no choice is a close call, in float32: the tokens
have to be the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from glm52_jax.cache.cache_format import CACHE_FORMATS
from glm52_jax.config import BUILT_IN, ModelConfig, QuantizationConfig
from glm52_jax.params.init import abstract_params, build_tree, init_params, leaf_at
from glm52_jax.params.quantization import BlockQuantized, quantize_blocks
from glm52_jax.params.sharding import named_shardings, param_specs
from glm52_jax.params.spec import Param
from infer.generate import generate
from infer.selftest.checks import Check, CheckFailed, Passed, RunOnce
from infer.selftest.machine import Machine
from sharding.layout import Layout

_BLOCK = 8  # of FP8 weights: 128 would leave one block of most widths
_LENGTHS = (45, 9, 38)  # two of them longer than `index_topk`
_NEW_TOKENS = 12
_DRAFTS = 3

Tokens = list[list[int]]


def tiny_config(layout: Layout) -> ModelConfig:
    """`glm-5.2-tiny` with its sizes rounded up to what the layout divides."""
    tiny = BUILT_IN["glm-5.2-tiny"]

    def up(size: int, names: tuple[str, ...], unit: int = 1) -> int:
        parts = math.lcm(*(layout.parts(name) for name in names)) * unit
        return -(-size // parts) * parts

    return dataclasses.replace(
        tiny,
        n_routed_experts=up(tiny.n_routed_experts, ("experts", "router_experts")),
        index_n_heads=up(tiny.index_n_heads, ("index_heads",)),
        num_attention_heads=up(tiny.num_attention_heads, ("heads",)),
        vocab_size=up(tiny.vocab_size, ("vocab",)),
        intermediate_size=up(tiny.intermediate_size, ("mlp",), _BLOCK),
        moe_intermediate_size=up(tiny.moe_intermediate_size, ("mlp", "expert_mlp"), _BLOCK),
        initializer_range=0.2,
        dtype="float32",
    )


class _Tiny:
    """The model, and its tokens on one device, each made when it is first needed."""

    def __init__(self, machine: Machine):
        self.machine, self.layout = machine, machine.layout
        self.config = tiny_config(machine.layout)
        generator = np.random.default_rng(0)
        self.prompts = [generator.integers(self.config.vocab_size, size=length).tolist() for length in _LENGTHS]
        self.params = RunOnce("weights", self._weights)
        self.fp8_config = dataclasses.replace(self.config, quantization=QuantizationConfig((_BLOCK, _BLOCK)))
        self.fp8_params = RunOnce("FP8 weights", lambda: in_blocks(self.params(), self.fp8_config))
        # What the codes stand for. It runs in the steps of plain weights, so that nothing is compiled for it.
        self.plain_fp8 = RunOnce("FP8 weights", lambda: dequantized(self.fp8_params()))
        self.one_device = RunOnce("tokens of one device", lambda: self.alone(self.params()))

    def _weights(self) -> dict[str, Any]:
        with jax.default_device(self.machine.first):
            return init_params(self.config, jax.random.key(0))

    def alone(self, params: Any, **options: Any) -> Tokens:
        """Tokens by the first device."""
        with jax.default_device(self.machine.first):
            return self._generate(jax.device_put(params, self.machine.first), self.config, **options)

    def together(self, params: Any, config: ModelConfig, **options: Any) -> Tokens:
        """Tokens by the mesh."""
        if self.layout.devices == 1:
            return self._generate(params, config, **options)
        specs = param_specs(params, config, self.layout, self.machine.mesh)
        placed = jax.tree.map(_put, params, named_shardings(specs, self.machine.mesh))
        return self._generate(placed, config, layout=self.layout, **options)

    def _generate(self, params: Any, config: ModelConfig, **options: Any) -> Tokens:
        with _cheap_compiler() if self.machine.quick and self.machine.platform == "cpu" else nullcontext():
            return generate(params, config, self.prompts, _NEW_TOKENS, stop_ids=(), **options)


@contextmanager
def _cheap_compiler() -> Generator[None]:
    """Compiles without the costly passes: on a CPU most of the time of this section is compilation."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


def _put(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has whole, on the mesh."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part])


def in_blocks(params: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Plain parameters in the codes and scales that the quantisation of `config` stands for."""
    shapes = abstract_params(config)

    def make(param: Param) -> Any:
        leaf, shape = leaf_at(params, param.path), leaf_at(shapes, param.path)
        if not isinstance(shape, BlockQuantized):
            return leaf
        matrices = np.asarray(leaf, np.float32).reshape(-1, *shape.codes.shape[-2:])
        pairs = [quantize_blocks(matrix, shape.block, shape.codes.dtype) for matrix in matrices]
        codes, scales = (jnp.asarray(np.stack(part)) for part in zip(*pairs, strict=True))
        codes, scales = codes.reshape(shape.codes.shape), scales.reshape(shape.scales.shape)
        return BlockQuantized(codes, scales, shape.logical_shape, shape.block, shape.row_dims)

    return build_tree(config, make)


def dequantized(params: dict[str, Any]) -> dict[str, Any]:
    """The plain float32 parameters that codes and scales stand for."""

    def plain(leaf: Any) -> Any:
        return jax.tree.map(jnp.asarray, leaf).dequantize(jnp.float32) if isinstance(leaf, BlockQuantized) else leaf

    return jax.tree.map(plain, params, is_leaf=lambda leaf: isinstance(leaf, BlockQuantized))


def tiny_model(machine: Machine) -> Iterator[Check]:
    """The checks of this section; each compiles a prefill step and one for new tokens."""
    tiny = _Tiny(machine)
    fp8_cache = {"cache_format": CACHE_FORMATS["fp8"]}

    def on_mesh(**options: Any) -> Passed:
        return same(tiny.together(tiny.params(), tiny.config, **options), tiny.one_device())

    def with_fp8_weights(**options: Any) -> Passed:
        got = tiny.together(tiny.fp8_params(), tiny.fp8_config, **options)
        return same(got, tiny.alone(tiny.plain_fp8(), **options))

    def with_fp8_cache() -> Passed:
        return same(tiny.together(tiny.params(), tiny.config, **fp8_cache), tiny.alone(tiny.params(), **fp8_cache))

    where = "mesh" if machine.layout.devices > 1 else "one device"
    yield Check("one device", lambda: _counted(tiny.one_device()))
    if machine.layout.devices > 1 and not machine.quick:
        yield Check("mesh", on_mesh)
    yield Check(f"{where}, {_DRAFTS} drafts", lambda: on_mesh(draft_tokens=_DRAFTS))
    if machine.quick:
        yield Check(f"{where}, FP8 weights and cache", lambda: with_fp8_weights(**fp8_cache))
        return
    yield Check(f"{where}, FP8 weights", with_fp8_weights)
    if machine.layout.devices > 1:
        yield Check("mesh, FP8 cache", with_fp8_cache)
    else:
        yield Check("one device, FP8 cache", lambda: _counted(tiny.alone(tiny.params(), **fp8_cache)))


def _counted(texts: Tokens) -> Passed:
    count = sum(map(len, texts))
    if count != len(_LENGTHS) * _NEW_TOKENS:
        raise CheckFailed(f"{count} tokens, expected {len(_LENGTHS) * _NEW_TOKENS}")
    return Passed(f"{count} tokens after prompts of {', '.join(map(str, _LENGTHS))}")


def same(got: Tokens, expected: Tokens) -> Passed:
    """Whether tokens are those of one device.

    Raises:
        Wrong: they are not, with the first place where they part.
    """
    count = sum(map(len, expected))
    if got == expected:
        return Passed(f"{count} tokens equal to one device's")
    equal = sum(a == b for x, y in zip(got, expected, strict=True) for a, b in zip(x, y, strict=False))
    row = next(row for row, pair in enumerate(zip(got, expected, strict=True)) if pair[0] != pair[1])
    raise CheckFailed(
        f"{equal} of {count} tokens equal to one device's, prompt {row + 1} is the first that differs",
        got=got,
        expected=expected,
    )
