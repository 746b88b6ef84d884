"""Which mesh axes each logical name may be over: the table of what a step communicates for it, and what it cannot.

Loading, generation, plans and the selftest ask `check_rules`, so that all of them refuse a layout by one sentence.
It must not know arrays: sizes that do not divide are found where specs are made (`placement`). Only axes of more than
one device count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from sharding.errors import InputError
from sharding.layout import Layout, declare_names

TOKEN_NAMES = ("batch", "tokens")
"""Names along whose axes devices have different tokens; a decode step divides the first only."""

_ONE_ARRAY = "both are dimensions of one array"


@dataclasses.dataclass(frozen=True)
class AxisRule:
    """What a step does with a logical name that is over mesh axes.

    Attributes:
        how: how the parts of different devices come together; "" where no step does that.
        whole: why the name is not divided, where no step does that.
        apart: names that may not be over the same axis, and why.
    """

    how: str = ""
    whole: str = ""
    apart: Mapping[str, str] = dataclasses.field(default_factory=lambda: MappingProxyType({}))


AXIS_RULES: Mapping[str, AxisRule] = MappingProxyType(
    {
        "batch": AxisRule("each device has its own sequences; their tokens are gathered at the end of a step"),
        "tokens": AxisRule(
            "each device has its own part of a prefill chunk, and asks those that keep other pages",
            apart={"batch": _ONE_ARRAY},
        ),
        "kv_pages": AxisRule(
            "selection and attention of each device's pages are merged",
            apart={"batch": "a device keeps pages of its own sequences only"},
        ),
        "heads": AxisRule(
            "the output projection is summed",
            apart={name: f"the sum over heads would add those of different {name}" for name in TOKEN_NAMES},
        ),
        "experts": AxisRule("tokens are brought to their experts and back"),
        "expert_mlp": AxisRule("shares of an expert's width are summed", apart={"experts": _ONE_ARRAY}),
        "mlp": AxisRule("shares of the width are summed"),
        "vocab": AxisRule("rows of the embedding are summed, logits gathered"),
        "router_experts": AxisRule("scores of experts are gathered"),
        "index_heads": AxisRule("index queries and head weights are gathered"),
        "embed": AxisRule(whole="norms and products take the residual stream whole"),
        "q_lora": AxisRule(whole="the norm of the query latent takes it whole"),
        "kv_lora": AxisRule(whole="the norm of a latent row takes it whole"),
        "layers": AxisRule(whole="every device runs all layers"),
    }
)
declare_names(AXIS_RULES)


def rules_of(layout: Layout) -> dict[str, tuple[str, ...]]:
    """The mesh axes of every logical name as the layout states them, those of size one included."""
    return {**dict.fromkeys(AXIS_RULES, ()), **dict(layout.rules)}


def check_rules(layout: Layout) -> None:
    """Refuses the rules of a layout under which a step would not compute what one device does.

    Raises:
        InputError: a name that is none, one without a rule, one over an axis along which nothing communicates for it,
            or two over one axis that have to be apart: by layout, names, axis and reason.
    """
    for name, _ in layout.rules:
        if name not in AXIS_RULES:
            raise InputError(f"layout {layout.name}: rule for {name!r}, expected one of {', '.join(AXIS_RULES)}")
    for name, division in AXIS_RULES.items():
        axes = layout.axes_of(name)
        if axes and division.whole:
            raise InputError(
                f"layout {layout.name}: {name} is over mesh axis {axes[0]} of {layout.size(axes[0])}, along which no "
                f"step communicates for it ({division.whole}), expected no axis of more than one device"
            )
        for other, why in division.apart.items():
            for axis in axes:
                if axis in layout.axes_of(other):
                    raise InputError(
                        f"layout {layout.name}: {other} and {name} are both over mesh axis {axis} of "
                        f"{layout.size(axis)} ({why}), expected it for one of them"
                    )


def split_by_tokens(layout: Layout, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of the axes along which devices have different tokens, and those along which they have the same."""
    differ = {axis for name in TOKEN_NAMES for axis in layout.axes_of(name)}
    return tuple(axis for axis in axes if axis in differ), tuple(axis for axis in axes if axis not in differ)


def query_gather_axes(layout: Layout) -> tuple[str, ...]:
    """Axes along which devices have different tokens of a sequence, and different pages of it to ask for them."""
    pages = layout.axes_of("kv_pages")
    return tuple(axis for axis in layout.axes_of("tokens") if axis in pages)
