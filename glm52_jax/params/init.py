"""Building the parameter tree from the parameter table: paths, random weights, sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from glm52_jax.config import ModelConfig
from glm52_jax.params.quantization import FLOAT8, BlockQuantized
from glm52_jax.params.spec import Param, parameters
from sharding.jax_settings import with_project_settings


def build_tree(config: ModelConfig, make: Callable[[Param], Any]) -> dict[str, Any]:
    """The nested dictionaries of `Params` with `make(param)` at each path; a None is left out."""
    tree: dict[str, Any] = {}
    for param in parameters(config):
        leaf = make(param)
        if leaf is not None:
            *parents, name = param.path.split(".")
            node = tree
            for parent in parents:
                node = node.setdefault(parent, {})
            node[name] = leaf
    return tree


def leaf_at(params: dict[str, Any], path: str) -> Any:
    """The leaf of a parameter tree at a path of the table; None where there is none."""
    node: Any = params
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node


def abstract_params(config: ModelConfig, *, dtype: Any = None) -> dict[str, Any]:
    """Shapes and types of the parameters as `load_params` makes them, without any of their bytes.

    Args:
        dtype: of all but the float32 parameters and the codes; the config's when None.
    """
    dtype, quantization = jnp.dtype(dtype or config.dtype), config.quantization

    def make(param: Param) -> Any:
        if param.optional:
            return None
        shape = param.stacked_shape(config)
        tensors = param.published(config, param.layers(config)[0])
        if quantization is None or param.dequantize or not all(tensor.quantized for tensor in tensors):
            return jax.ShapeDtypeStruct(shape, jnp.float32 if param.float32 else dtype)
        lead = shape[: len(shape) - len(param.piece_shape)]
        codes = jnp.int8 if quantization.codes == "I8" else FLOAT8
        shapes: dict[str, Any] = {
            "codes": jax.ShapeDtypeStruct((*lead, *param.tensor_shape), codes),
            "scales": jax.ShapeDtypeStruct((*lead, *tensors[0].scale_shape(quantization.block)), jnp.float32),
        }
        return BlockQuantized(
            **shapes,
            logical_shape=tuple(param.logical_shape or param.tensor_shape),
            block=quantization.block,
            row_dims=param.row_dims,
        )

    return build_tree(config, make)


@with_project_settings
def init_params(config: ModelConfig, key: jax.Array, *, dtype: Any = None) -> dict[str, Any]:
    """Random weights: normal with `initializer_range`, norms one, biases zero.

    Args:
        key: a `jax.random.key`; each parameter takes its own by path, so adding one leaves the others as they are.
        dtype: of all but the float32 parameters; the config's when None.
    """
    dtype = jnp.dtype(dtype or config.dtype)

    def make(param: Param) -> jax.Array | None:
        if param.optional:
            return None
        shape, kind = param.stacked_shape(config), jnp.dtype(jnp.float32) if param.float32 else dtype
        if param.init == "normal":
            own = jax.random.fold_in(key, _stable_hash(param.path))
            return (config.initializer_range * jax.random.normal(own, shape, jnp.float32)).astype(kind)
        return jnp.full(shape, {"ones": 1, "zeros": 0}[param.init], kind)

    # One compiled program: an operation a leaf would be compiled a leaf.
    return jax.jit(lambda: build_tree(config, make))()


def _stable_hash(text: str) -> int:
    """The same 32-bit number for a text in every process, unlike `hash`."""
    value = 0
    for byte in text.encode():
        value = (value * 131 + byte) & 0x7FFFFFFF
    return value
