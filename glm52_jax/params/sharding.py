"""Where every array of the model is on a mesh: parameters by the table's logical axes, caches by their pages.

A spec says which mesh axes divide which dimension. Whoever runs a step on shards takes specs from here, whoever loads
or plans takes shardings, so that both always agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from glm52_jax.config import ModelConfig
from glm52_jax.params.axis_rules import check_rules
from glm52_jax.params.init import build_tree, leaf_at
from glm52_jax.params.quantization import BlockQuantized
from glm52_jax.params.sharding_checks import quantized_shardings
from glm52_jax.params.spec import Param
from sharding.layout import AXES, Layout
from sharding.partition import partition


def param_spec(param: Param, config: ModelConfig, layout: Layout) -> PartitionSpec:
    """The spec of one parameter over `param.stacked_shape(config)`.

    Raises:
        InputError: a size that the layout does not divide.
    """
    shape = param.stacked_shape(config)
    axes = (*("layers",) * (len(shape) - len(param.axes)), *param.axes)
    return partition(layout, axes, shape, what=param.path)


def param_shardings(config: ModelConfig, layout: Layout, mesh: Mesh | None = None) -> Callable[[Param], NamedSharding]:
    """The sharding of each parameter, in the form that `load_params` takes; over all devices when `mesh` is None.

    Raises:
        InputError: rules under which a step would go wrong, see `check_rules`; a size that the layout does not divide,
            here or when a sharding is asked for; another number of devices.
    """
    check_rules(layout)
    if mesh is None:
        build_tree(config, lambda param: param_spec(param, config, layout))  # what no mesh would make right
        mesh = layout.mesh()
    return lambda param: NamedSharding(mesh, param_spec(param, config, layout))


def abstract_mesh(layout: Layout) -> AbstractMesh:
    """The layout's mesh without devices."""
    return AbstractMesh((layout.data, layout.expert, layout.tensor), AXES)


def param_specs(params: Any, config: ModelConfig, layout: Layout, mesh: Mesh | AbstractMesh | None = None) -> Any:
    """A tree of specs like `params`; codes and their scales have one each.

    Args:
        mesh: the layout's, which need not have devices.

    Raises:
        InputError: rules under which a step would go wrong, see `check_rules`; a size that the layout does not divide,
            blocks of codes with one scale among them.
    """
    check_rules(layout)
    mesh = abstract_mesh(layout) if mesh is None else mesh

    def specs(param: Param) -> Any:
        leaf = leaf_at(params, param.path)
        if leaf is None:
            return None
        spec = param_spec(param, config, layout)
        if not isinstance(leaf, BlockQuantized):
            return spec
        shape = param.stacked_shape(config)
        codes, scales = quantized_shardings(param, shape, NamedSharding(mesh, spec), leaf.block)
        assert isinstance(codes, NamedSharding)
        assert isinstance(scales, NamedSharding)
        parts: dict[str, Any] = {"codes": codes.spec, "scales": scales.spec}
        return dataclasses.replace(leaf, **parts)

    return build_tree(config, specs)


def batch_spec(layout: Layout, *names: str) -> PartitionSpec:
    """Spec of an array whose first dimension runs over the sequences, the others over what has these names."""
    return partition(layout, ("batch", *names))


def named_shardings(specs: Any, mesh: Mesh) -> Any:
    """Shardings of a tree of specs."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
