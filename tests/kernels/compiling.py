"""Compiles a kernel for one device of a TPU, which need not be there; needs libtpu (`jax[tpu]`)."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from sharding.compiler.compile import CompiledStep, compile_for
from sharding.compiler.topology import one_device
from tests import needs


def compiled(function: Any, arguments: Any, chip: str, donate: tuple[int, ...] = ()) -> CompiledStep:
    """`function` (with its backend bound to `tpu:` and the chip) compiled for shapes; skips without the compiler.

    `.program.kernels` has the kernels by name, `.program.copies` what is copied, `.memory` the temporaries.
    """
    __tracebackhide__ = True
    needs.package("libtpu")
    device_put_args = one_device(chip)
    whole = NamedSharding(device_put_args.mesh, PartitionSpec())
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), tuple(arguments))
    return compile_for(function, shapes, device_put_args, donate=donate)
