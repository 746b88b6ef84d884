"""Layouts by name (`throughput`, `latency`, `long_context`, `train`), from text, and from a user's TOML file.

A preset is nothing but mesh sizes of the one scheme in `sharding.layout`: a list of candidates, the one to try first at
the front. Whoever knows the model takes the first that divides its arrays and fits.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sharding.errors import InputError
from sharding.layout import AXES, DATA, DEFAULT_RULES, EXPERT, TENSOR, Layout, Rules, logical_names

MOST_WIDTH_PARTS = 8
"""Largest `tensor` at which one expert's width is still divided; above, each expert is whole on one device."""

_SIZES = (*AXES, "slices")


def throughput(devices: int, slices: int = 1, *, experts: int | None = None) -> tuple[Layout, ...]:
    """Smallest `tensor` first: each device has whole sequences, and the most devices share the experts.

    Args:
        devices: in all slices together.
        slices: equal slices that the devices are in; `data` alone crosses them.
        experts: of the model; the devices that share them then divide that number, and the rest goes to `data`.

    Raises:
        InputError: slices do not divide the devices.
    """
    return _layouts("throughput", devices, slices, experts, (1, 2, 4, 8, 16, 32, 64))


def latency(devices: int, slices: int = 1, *, experts: int | None = None) -> tuple[Layout, ...]:
    """`tensor` of 8 or 16 first: a token's heads and widths are shared by neighbours. Arguments as `throughput`."""
    return _layouts("latency", devices, slices, experts, (8, 16, 4, 32, 2, 64, 1))


def long_context(devices: int, slices: int = 1, *, experts: int | None = None) -> tuple[Layout, ...]:
    """Largest `tensor` first, up to 64: a sequence's cache is shared by that many. Arguments as `throughput`."""
    return _layouts("long_context", devices, slices, experts, (64, 32, 16, 8, 4, 2, 1))


def train(devices: int, slices: int = 1, *, experts: int | None = None) -> tuple[Layout, ...]:
    """Smallest `tensor` first, up to a host's 8: batches and experts over the rest. Arguments as `throughput`."""
    return _layouts("train", devices, slices, experts, (1, 2, 4, 8))


PRESETS: Mapping[str, Callable[..., tuple[Layout, ...]]] = {
    preset.__name__: preset for preset in (throughput, latency, long_context, train)
}


def rules_for(tensor: int, changes: Mapping[str, tuple[str, ...]] | None = None) -> Rules:
    """The rules of a layout with that `tensor`: whole experts over `expert` and `tensor` where it is above 8."""
    rules = dict(DEFAULT_RULES)
    if tensor > MOST_WIDTH_PARTS:
        rules |= {"experts": (EXPERT, TENSOR), "expert_mlp": ()}
    return tuple((rules | dict(changes or {})).items())


def read_layouts(text: str, devices: int, slices: int = 1, *, experts: int | None = None) -> tuple[Layout, ...]:
    """What a user asked for: a preset's name, `data=1,expert=16,tensor=4`, or a TOML file.

    A file has the keys `data`, `expert`, `tensor` and `slices` (1 where left out) and a table `[rules]` from logical
    names to a mesh axis or a list of them. Text or a file gives one layout, a preset its candidates.

    Args:
        devices, slices: what there is.
        experts: as for `throughput`; presets only.

    Raises:
        InputError: no such preset, key, axis or file, or sizes that are not those of the devices, with the nearest
            that would do.
    """
    if text in PRESETS:
        return PRESETS[text](devices, slices, experts=experts)
    if text.endswith(".toml"):
        layout = _from_file(Path(text), slices)
    elif "=" in text:
        layout = _from_sizes(text, _parse_sizes(text), {}, slices)
    else:
        raise InputError(
            f"layout {text!r}, expected one of {', '.join(PRESETS)}, sizes as in data=1,expert=16,tensor=4, or a .toml "
            f"file{_meant(text, PRESETS)}"
        )
    _refuse_other_size(layout, devices, slices)
    return (layout,)


def _layouts(name: str, devices: int, slices: int, experts: int | None, order: Iterable[int]) -> tuple[Layout, ...]:
    if devices < 1 or slices < 1 or devices % slices:
        raise InputError(f"layout {name}: {devices} devices in {slices} slices, expected equal slices")
    per_slice = devices // slices
    found = []
    for tensor in order:
        if per_slice % tensor:
            continue
        rest = per_slice // tensor
        # Devices that share the experts, beside those that share one expert's width.
        whole = tensor if tensor > MOST_WIDTH_PARTS else 1
        if experts is not None and experts % whole:
            continue
        expert = rest if experts is None else math.gcd(rest, experts // whole)
        found.append(
            Layout(
                data=slices * rest // expert,
                expert=expert,
                tensor=tensor,
                slices=slices,
                rules=rules_for(tensor),
                name=name,
            )
        )
    return tuple(found)


def _parse_sizes(text: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for item in text.split(","):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in _SIZES:
            raise InputError(f"layout {text!r} sets {key!r}, expected {', '.join(_SIZES)}{_meant(key, _SIZES)}")
        if key in sizes:
            raise InputError(f"layout {text!r} sets {key} twice, expected once")
        if not value.isdecimal() or int(value) < 1:
            raise InputError(f"layout {text!r}: {key} is {value!r}, expected a positive number")
        sizes[key] = int(value)
    return sizes


def _from_sizes(name: str, sizes: Mapping[str, int], rules: Mapping[str, tuple[str, ...]], slices: int) -> Layout:
    filled = {DATA: slices, "slices": slices} | dict(sizes)
    return Layout(**filled, rules=rules_for(sizes.get(TENSOR, 1), rules), name=name)


def _from_file(path: Path, slices: int) -> Layout:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"layout file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"layout file {path} is no TOML: {error}") from error
    known = (*_SIZES, "rules")
    sizes: dict[str, int] = {}
    for key, value in content.items():
        if key not in known:
            raise InputError(f"layout file {path} sets {key!r}, expected {', '.join(known)}{_meant(key, known)}")
        if key == "rules":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"layout file {path}: {key} is {value!r}, expected a positive number")
        sizes[key] = value
    return _from_sizes(path.stem, sizes, _read_rules(path, content.get("rules", {})), slices)


def _read_rules(path: Path, table: Any) -> dict[str, tuple[str, ...]]:
    if not isinstance(table, dict):
        raise InputError(f"layout file {path}: rules is {table!r}, expected a table from logical names to mesh axes")
    names = logical_names()
    rules = {}
    for name, axes in table.items():
        if name not in names:
            raise InputError(
                f"layout file {path}: rule for {name!r}, expected one of {', '.join(names)}{_meant(name, names)}"
            )
        axes = [axes] if isinstance(axes, str) else axes
        if not isinstance(axes, list) or any(axis not in AXES for axis in axes):
            raise InputError(f"layout file {path}: {name} is over {axes!r}, expected a list of {', '.join(AXES)}")
        rules[name] = tuple(axes)
    return rules


def _refuse_other_size(layout: Layout, devices: int, slices: int) -> None:
    if layout.slices != slices:
        raise InputError(f"layout {layout.name} is for {layout.slices} slices, expected {slices}")
    if layout.devices == devices:
        return
    found = (
        f"layout {layout.name} has {layout.data} x {layout.expert} x {layout.tensor} = {layout.devices} devices, "
        f"expected {devices}"
    )
    # The same scheme at the right size: the axis that shares the experts takes up the difference.
    for axis in (EXPERT, TENSOR, DATA):
        others = math.prod(layout.size(other) for other in AXES if other != axis)
        if devices % others == 0 and (axis != DATA or devices // others % slices == 0):
            raise InputError(f"{found}: for example with {axis}={devices // others}")
    raise InputError(f"{found}: for example data={slices},expert={devices // slices},tensor=1")


def _meant(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else ""
