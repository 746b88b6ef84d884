"""What is measured: a kernel, or a peer of it, at a real shape, and what no form of it can do without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

OURS = "glm52"


@dataclasses.dataclass(frozen=True)
class Built:
    """A function for one device, ready to be compiled.

    Attributes:
        function: pure, with its backend bound.
        arguments: trees of `jax.ShapeDtypeStruct`.
        donate: numbers of the arguments whose memory the results may take over.
        scalars: values of what decides the control flow, since none are there when a kernel is only compiled: by
            (part of the kernel's name, number of its operand), an int array: lengths, page tables, group sizes.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    scalars: Mapping[tuple[str, int], Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """One form of one operation at one shape.

    Attributes:
        op: folder in `glm52_jax/kernels`.
        shape: in words, the same for all forms that do the same work: "decode b8 128k".
        form: `OURS`, a variant of it ("glm52 rows"), or the name of a peer ("xla", "megablox", "lax.top_k").
        build: the function for a chip.
        hbm_bytes, flops: the least that must be moved and computed, on one device.
        copies: row or block copies that the form must issue one by one.
        dtype: operand type of the products, as `Chip.peak` takes it.
        chips: for which it is meant.
        measured: whether the table has it; others are compiled in the grid alone.
        short: chips of which the short grid has it.
    """

    op: str
    shape: str
    form: str
    build: Callable[[str], Built]
    hbm_bytes: float
    flops: float
    copies: int = 0
    dtype: str = "bf16"
    chips: tuple[str, ...] = ("v5e", "v5p", "v6e", "tpu7x")
    measured: bool = True
    short: tuple[str, ...] = ()
