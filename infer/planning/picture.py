"""Plans as a picture: memory by part and lower bounds of the time, one bar for each plan."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from glm52_jax.io.files import check_file, whole_file, writing
from infer.planning.slice_plan import SlicePlan
from sharding.compiler.chips import GIB
from sharding.errors import InputError

FORMATS = (".png", ".pdf", ".svg")


def check(path: Path) -> None:
    """Refuses a picture that could not be drawn, before there are plans to draw.

    Raises:
        InputError: matplotlib is not installed, the name ends in no known format, or the file cannot be written.
    """
    if find_spec("matplotlib") is None:
        raise InputError("--plot needs matplotlib: pip install 'glm52-jax[plan]'")
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"--plot {path}: the name ends in {path.suffix!r}, expected one of {', '.join(FORMATS)}")
    check_file(path)


def draw(path: Path, plans: Sequence[SlicePlan]) -> None:
    """Draws the picture; `check` says beforehand whether it can be.

    Raises:
        InputError: the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["font.size"] = 9
    names = [f"{p.request['topology']}\n{p.request['layout']}, b {p.request['batch']}" for p in plans]
    figure = Figure(figsize=(max(7.0, 1.5 * len(plans) + 3), 7.5), layout="constrained")
    memory, times = figure.subplots(2, 1)
    parts = {
        "experts": lambda p: p.account.parameters.get("routed experts", 0),
        "other parameters": lambda p: (
            sum(p.account.parameters.values()) - p.account.parameters.get("routed experts", 0)
        ),
        "latent cache": lambda p: p.account.latent,
        "index keys": lambda p: p.account.index_keys,
        "temporaries": lambda p: p.memory.get("temporaries", 0),
    }
    bottom = [0.0] * len(plans)
    for label, size in parts.items():
        heights = [size(p) / GIB for p in plans]
        memory.bar(names, heights, 0.6, bottom=bottom, label=label)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    for place, plan in enumerate(plans):
        limit = plan.memory["limit"] / GIB
        memory.plot([place - 0.4, place + 0.4], [limit, limit], color="black", linewidth=1.5, label=None)
    memory.set_ylabel("GiB on a device (line: what there is)")
    memory.legend(fontsize=8)
    resources = list(dict.fromkeys(bound.resource for plan in plans for bound in plan.floors))
    width = 0.8 / max(1, len(resources))
    for number, resource in enumerate(resources):
        heights = [sum(f.seconds for f in plan.floors if f.resource == resource) * 1e3 for plan in plans]
        places = [place - 0.4 + width * (number + 0.5) for place in range(len(plans))]
        times.bar(places, heights, width, label=resource)
    times.set_xticks(range(len(plans)), names)
    times.set_yscale("log")
    times.set_ylabel("lower bound of a step's time, ms")
    times.legend(fontsize=8)
    with writing(path), whole_file(path) as file:
        figure.savefig(file, dpi=150, format=path.suffix[1:].lower())
