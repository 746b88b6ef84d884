"""Bytes of one device's share of the model and its caches, by arithmetic: no compiler and no device is needed."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import jax
from jax.sharding import PartitionSpec

from glm52_jax.cache.row_formats import parts_of
from glm52_jax.config import ModelConfig
from glm52_jax.params.init import abstract_params, leaf_at
from glm52_jax.params.sharding import param_spec, param_specs
from glm52_jax.params.spec import parameters
from infer.steps import State
from sharding.layout import Layout


@dataclasses.dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one device.

    Attributes:
        parameters: by part of the model.
        latent, index_keys: caches of this device's sequences and pages.
        state: the rest of the state: page table, tokens, windows of drafts.
        replicated: parameters of at least 64 MB that every device has whole, by path.
    """

    parameters: dict[str, int]
    latent: int
    index_keys: int
    state: int
    replicated: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parameters.values()) + self.latent + self.index_keys + self.state


REPLICATED_FROM = 64 * 10**6


def parameter_bytes(config: ModelConfig, layout: Layout) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of a device's parameters by part, and those that every device has whole by path.

    Raises:
        InputError: the layout does not divide a parameter, or no step computes right under its rules.
    """
    params = abstract_params(config)
    specs = param_specs(params, config, layout)
    by_part: Counter[str] = Counter()
    replicated = {}
    for param in parameters(config):
        leaf = leaf_at(params, param.path)
        if leaf is None:
            continue
        size = own_bytes(layout, leaf, leaf_at(specs, param.path))
        by_part[param.part] += size
        if not any(param_spec(param, config, layout)) and size >= REPLICATED_FROM and layout.devices > 1:
            replicated[param.path] = size
    return dict(by_part), replicated


def own_bytes(layout: Layout, tree: Any, specs: Any) -> int:
    """Bytes of a device's part of a tree of shapes."""

    def one(spec: PartitionSpec, leaf: Any) -> int:
        axes = [axis for entry in spec if entry for axis in ([entry] if isinstance(entry, str) else entry)]
        return math.prod(leaf.shape) * leaf.dtype.itemsize // layout.size(axes)

    sizes = jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return sum(jax.tree.leaves(sizes))


def memory_breakdown(config: ModelConfig, layout: Layout, state: State) -> MemoryBreakdown:
    """The account of a step.

    Args:
        state: shapes of one device's part of it, as `StepProvider.own_state` gives them.

    Raises:
        InputError: the layout does not divide a parameter.
    """
    by_part, replicated = parameter_bytes(config, layout)
    latent, keys = (
        sum(part.size * part.dtype.itemsize for part in parts_of(stack).values())
        for stack in (state.cache.latent, state.cache.index_keys)
    )
    everything = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    return MemoryBreakdown(by_part, latent, keys, everything - latent - keys, replicated)
