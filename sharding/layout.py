"""`Layout`: the sizes of a mesh over `data`, `expert` and `tensor`, and which dimensions of arrays each axis divides.

One scheme, whose sizes are the presets: batches over `data` and `expert`, experts over `expert`, heads, widths,
vocabulary and cache pages over `tensor`. `data` is the outermost axis, so that it alone crosses slices. A layout is
plain data: it is hashed, printed and compared, and given to functions that are compiled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from sharding.errors import InputError

DATA, EXPERT, TENSOR = AXES = ("data", "expert", "tensor")

Rules = tuple[tuple[str, tuple[str, ...]], ...]
"""Mesh axes of each logical name; a name without axes is on every device."""

DEFAULT_RULES: Rules = (
    ("batch", (DATA, EXPERT)),
    ("tokens", ()),
    ("kv_pages", (TENSOR,)),
    ("experts", (EXPERT,)),
    ("expert_mlp", (TENSOR,)),
    ("heads", (TENSOR,)),
    ("mlp", (TENSOR,)),
    ("vocab", (TENSOR,)),
    ("embed", ()),
    ("layers", ()),
)
"""Rules of a layout that states none. A model declares its further names, see `declare_names`."""

_declared: dict[str, None] = {}


def declare_names(names: Iterable[str]) -> None:
    """Adds logical names of a model to those that a layout knows; without a rule they are on every device."""
    _declared.update(dict.fromkeys(name for name in names if name not in dict(DEFAULT_RULES)))


def logical_names() -> tuple[str, ...]:
    """All logical names that a rule may be for."""
    return tuple({**dict(DEFAULT_RULES), **_declared})


@dataclasses.dataclass(frozen=True)
class Layout:
    """Sizes of the mesh axes, and the rules from logical names to them.

    Attributes:
        data, expert, tensor: size of each axis.
        slices: slices that the devices are in; `data` is a multiple of it.
        rules: mesh axes of each logical name, a sequence or one by its name.
        name: what to call it.

    Raises:
        InputError: a size that is not positive, slices that do not divide `data`, a rule for an axis that is none, an
            axis twice in one rule, or two rules for one name.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1
    slices: int = 1
    rules: Rules = DEFAULT_RULES
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in (*AXES, "slices"):
            size = getattr(self, field)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InputError(f"layout {self.name}: {field} is {size!r}, expected a positive number")
        if self.data % self.slices:
            raise InputError(
                f"layout {self.name}: data is {self.data}, expected a multiple of {self.slices}, the number of slices"
            )
        # Hashed with the layout, so a list or one axis by its name becomes what it stands for.
        rules = tuple((name, (axes,) if isinstance(axes, str) else tuple(axes)) for name, axes in self.rules)
        object.__setattr__(self, "rules", rules)
        names = [name for name, _ in self.rules]
        for name, axes in self.rules:
            if names.count(name) > 1:
                raise InputError(f"layout {self.name}: {name} has two rules, expected one")
            for axis in axes:
                if axis not in AXES:
                    raise InputError(
                        f"layout {self.name}: {name} is over {axis!r}, which is no mesh axis, expected one of "
                        f"{', '.join(AXES)}"
                    )
                if axes.count(axis) > 1:
                    raise InputError(f"layout {self.name}: {name} is over {axis} twice, expected each axis once")

    @property
    def devices(self) -> int:
        """How many devices it needs."""
        return self.data * self.expert * self.tensor

    def axes_of(self, name: str) -> tuple[str, ...]:
        """Mesh axes of a logical name, those of size one left out.

        Raises:
            InputError: there is no rule for it, and no model has declared it.
        """
        for known, axes in self.rules:
            if known == name:
                return tuple(axis for axis in axes if self.size(axis) > 1)
        if name in _declared:
            return ()
        names = {**dict(self.rules), **_declared}
        raise InputError(f"layout {self.name}: no rule for {name!r}, expected one of {', '.join(names)}")

    def size(self, axes: str | Sequence[str]) -> int:
        """Devices along one mesh axis or several."""
        return math.prod(getattr(self, axis) for axis in ([axes] if isinstance(axes, str) else axes))

    def parts(self, name: str) -> int:
        """Into how many parts a dimension of that logical name is divided."""
        return self.size(self.axes_of(name))

    def with_rules(self, **changes: Sequence[str]) -> Layout:
        """The same layout with other axes for some names."""
        rules = dict(self.rules) | changes
        return dataclasses.replace(self, rules=tuple(rules.items()))  # type: ignore[arg-type]

    def mesh(self, devices: Sequence[jax.Device] | np.ndarray | None = None) -> Mesh:
        """The mesh over these devices (all there are when None), in the order given.

        Raises:
            InputError: another number of devices than the layout has.
        """
        found = np.asarray(jax.devices() if devices is None else devices)
        if found.size != self.devices:
            raise InputError(
                f"layout {self.name} is {self.data} x {self.expert} x {self.tensor} (data x expert x tensor), which "
                f"needs {self.devices} devices, found {found.size}"
            )
        shape = (self.data, self.expert, self.tensor)
        return Mesh(found.reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


SINGLE = Layout(name="single")
"""One device."""
