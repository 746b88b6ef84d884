"""Which form of dispatch a step takes, the buffers that it needs, and the bytes that it moves; all before compiling.

The rule and the account are here, the arrays in `moe_dispatch`, which takes its buffer sizes from here.
"""

from __future__ import annotations

import dataclasses
import math

from glm52_jax.config import ModelConfig
from glm52_jax.params.axis_rules import split_by_tokens
from sharding.errors import InputError
from sharding.exchange import ExchangeGroup
from sharding.layout import DATA, Layout

POLICIES = ("gather", "all_to_all")
STEP_BYTES = 2**19
"""What a link could have moved in the fixed time of a collective or a sort: some 5 us at 100 GB/s, an assumption."""
HBM_PER_LINK = 8
"""How many times faster a device writes and reads a buffer than a link brings it, an assumption."""


@dataclasses.dataclass(frozen=True)
class DispatchPolicy:
    """How tokens reach their experts; static, chosen when a step is built (`choose_policy`), equal in results.

    Attributes:
        name: "gather": every device computes its experts for the tokens of all. "all_to_all": each token's row goes
            once to each device that holds one of its experts, and its sum comes back.
        transport: see `sharding.exchange.resolve_exchange`.
        capacity: rows of a receive buffer as a multiple of the mean load under even routing; the rest takes more
            rounds. A smaller one saves memory, a larger one saves rounds where routing is uneven.
        halves: whether tokens are exchanged and computed in two halves that do not depend on each other, so that one
            half may travel while the other is computed.
        by_slice: whether a row crosses to each slice once, and is spread there, where the layout has slices.
    """

    name: str = "gather"
    exchange_implementation: str = "padded"
    capacity: float = 1.25
    overlap: bool = False
    by_slice: bool = True

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise InputError(f"dispatch of experts: {self.name!r} is not one of {', '.join(POLICIES)}")
        if not self.capacity > 0:
            raise InputError(f"dispatch of experts: capacity is {self.capacity}, expected a positive number")


GATHER = DispatchPolicy("gather")


@dataclasses.dataclass(frozen=True)
class Hop:
    """One exchange of rows on the way to the experts.

    Attributes:
        group: the devices that exchange.
        tokens: rows that a device may want to send on, each to several devices.
        held: experts behind each destination.
        sends: rows of the send buffer, the most that there can be.
        receives: rows of the receive buffer, in one round.
        mean: rows that a device receives in all rounds when routing is even.
    """

    group: ExchangeGroup
    tokens: int
    held: int
    sends: int
    receives: int
    mean: float


def plan_hops(layout: Layout, tokens: int, experts: int, k: int, form: DispatchPolicy) -> tuple[Hop, ...]:
    """The exchanges between a device's tokens and the experts, none when experts are not divided.

    Args:
        tokens: that the device sends for.
        experts: routed experts of the model.
        k: experts of a token.
    """
    axes = layout.axes_of("experts")
    if not axes:
        return ()
    parts = layout.size(axes)

    def hop(group: ExchangeGroup, rows: int, destinations: int) -> Hop:
        held = experts // destinations
        # A token, of `k` different experts, needs one device of many; as many devices send to each as it sends to.
        mean = tokens * destinations * (1 - math.comb(experts - held, k) / math.comb(experts, k))
        most = rows * group.size
        receives = _in_eights(min(most, math.ceil(form.capacity * mean)))
        return Hop(group, rows, held, rows * min(k, group.size), receives, mean)

    if layout.slices == 1 or axes[0] != DATA or not form.by_slice:
        return (hop(ExchangeGroup.along(layout, axes), tokens, parts),)
    across = hop(ExchangeGroup.across_slices(layout), tokens, layout.slices)
    inside = ExchangeGroup.inside_slice(layout, axes)
    return (across, hop(inside, across.receives, parts)) if inside.size > 1 else (across,)


def _in_eights(rows: int) -> int:
    return max(8, -(-rows // 8) * 8)  # rows of a float32 tile


def dispatch_axes(layout: Layout) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The mesh axes that divide experts or their width: those along which tokens differ, and those along which not."""
    divided = tuple(dict.fromkeys((*layout.axes_of("experts"), *layout.axes_of("expert_mlp"))))
    return split_by_tokens(layout, divided)


@dataclasses.dataclass(frozen=True)
class DispatchCost:
    """What a form costs a device in one MoE layer under even routing.

    Attributes:
        moved: bytes that come from other devices.
        buffers: bytes of the arrays that rows are sent from, received in, computed from, summed in and returned to;
            what the experts themselves need comes on top.
        steps: collectives and sorts, one after another.
    """

    moved: int
    buffers: int
    steps: int

    @property
    def weighed(self) -> int:
        """Bytes over a link that would take as long."""
        return self.moved + self.buffers // HBM_PER_LINK + self.steps * STEP_BYTES


def gather_cost(layout: Layout, tokens: int, config: ModelConfig, itemsize: int) -> DispatchCost:
    """All rows in, float32 sums out; the sums are reduced where tokens are the same."""
    there, alike = dispatch_axes(layout)
    others, same = layout.size(there) - 1, layout.size(alike)
    row, total = _row(config, itemsize)
    moved = tokens * others * (row + total) + 2 * tokens * total * (same - 1) // same
    return DispatchCost(
        moved, tokens * layout.size(there) * (row + total), (3 if others else 0) + (1 if same > 1 else 0)
    )


def all_to_all_cost(
    layout: Layout, tokens: int, config: ModelConfig, itemsize: int, form: DispatchPolicy
) -> DispatchCost:
    """Rows there and float32 sums back at each hop, a gather where widths are divided, the shares joined at the end."""
    _, alike = dispatch_axes(layout)
    share = -(-tokens // layout.size(alike))
    row, total = _row(config, itemsize)
    moved = share * total * (layout.size(alike) - 1)
    buffers = share * total
    trip = plan_hops(layout, share, config.n_routed_experts, config.num_experts_per_tok, form)
    width = layout.size(layout.axes_of("expert_mlp"))
    for hop in trip:
        others = hop.group.size - 1
        moved += math.ceil(hop.mean * others / hop.group.size) * (row + total) + hop.group.size * others * 4
        # What is received and what is returned are held in the form that travels and in that of a product.
        buffers += (hop.sends + 2 * hop.receives) * (row + total)
    arrived = (trip[-1].mean, trip[-1].receives) if trip else (share, share)
    moved += math.ceil(arrived[0]) * (width - 1) * (row + total)
    buffers += arrived[1] * width * (row + total) if width > 1 else 0
    # At a hop: sort, counts, rows, experts and gates, results, and the sum of them.
    count = 6 * len(trip) + (3 if width > 1 else 0) + (1 if alike else 0)
    return DispatchCost(moved, buffers, count)


def _row(config: ModelConfig, itemsize: int) -> tuple[int, int]:
    """Bytes of a row with its experts and gates, and of a float32 sum."""
    return config.hidden_size * itemsize + 8 * config.num_experts_per_tok, config.hidden_size * 4


@dataclasses.dataclass(frozen=True)
class DispatchChoice:
    """A form, and why it was chosen."""

    form: DispatchPolicy
    reason: str
    gather: DispatchCost
    all_to_all: DispatchCost


def choose_policy(
    layout: Layout, tokens: int, config: ModelConfig, *, itemsize: int = 2, exchange_implementation: str = "ragged"
) -> DispatchChoice:
    """The form that moves fewer bytes, when the fixed time of a step and the writing of buffers count as bytes too.

    A gather brings every token to every device, `devices - 1` rows a token; an all-to-all brings it to those that hold
    one of its experts, `min(k, devices)` rows at most, but takes more steps, one after another. So few tokens are
    gathered, and so are any number where most devices need most tokens. The two assumed speeds are `STEP_BYTES` and
    `HBM_PER_LINK`; both forms give the same result, so a layout that was measured may say otherwise.

    Args:
        tokens: of one device.
        itemsize: bytes of a hidden value.
        transport: see `sharding.exchange.resolve_exchange`.
    """
    wide = DispatchPolicy("all_to_all", exchange_implementation)
    gather = gather_cost(layout, tokens, config, itemsize)
    exchanged = all_to_all_cost(layout, tokens, config, itemsize, wide)
    costs = (
        f"gather moves {gather.moved / 2**20:.1f} MiB in {gather.steps} steps, "
        f"all-to-all {exchanged.moved / 2**20:.1f} MiB in {exchanged.steps}"
    )
    if not dispatch_axes(layout)[0]:
        return DispatchChoice(GATHER, "every device has all tokens that its experts may get", gather, exchanged)
    if gather.weighed <= exchanged.weighed:
        return DispatchChoice(GATHER, f"{tokens} tokens a device: {costs}", gather, exchanged)
    return DispatchChoice(wide, f"{tokens} tokens a device: {costs}", gather, exchanged)
