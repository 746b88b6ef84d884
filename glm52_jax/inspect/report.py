"""The account as people read it: tables that fit 80 columns, with colour in a terminal and without it elsewhere.

It turns numbers into text and decides no number. Units are decimal (1 GB is 10^9 bytes), lengths are not (128k is
131,072 tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from glm52_jax.config import ModelConfig
from glm52_jax.inputs.lengths import short_length
from glm52_jax.inspect.account import CacheRows, ModelBreakdown, index_key_bytes, latent_row_bytes
from glm52_jax.io.terminal import screen
from glm52_jax.params.spec import config_notes

_FORMATS = {"bf16": "BF16", "fp8_groups": "FP8 groups", "fp8_tensor": "FP8 tensor", "fp8": "FP8"}
_WHY = (
    "Index keys are read for each sequence, weights once a step: the gain grows with the context, and with the batch "
    "once most experts are read anyway."
)


def show(
    config: ModelConfig,
    account: ModelBreakdown,
    *,
    files: dict[str, Any] | None = None,
    note: str | None = None,
    operators: dict[str, Any] | None = None,
    console: Console | None = None,
) -> None:
    """Prints the account of `config`.

    Args:
        files: what a folder holds: tensors, bytes, notes (those on the config too); its other keys are not shown.
        note: a sentence to print below the heading.
        operators: as `operators.operators` gives it.
        console: where to; standard output when None.
    """
    console = console or screen()
    console.print(Text(account.name, "bold"), soft_wrap=True)
    console.print(_heading(account, note))
    _section(console, "Published files", _published(account, files, config_notes(config)))
    _section(console, "Layers", _layers(account))
    _section(console, "Parameters", _parameters(account))
    _section(console, "Cache", _cache(config, account))
    _section(console, "FLOPs of one decoded token", _flops(config, account))
    if operators is not None:
        _section(console, _step_title("Prefill", operators, operators["chunk"]), _step(operators["prefill"]))
        _section(console, _step_title("Decode", operators, 1), _step(operators["decode"]))
        if account.layers.shared:
            _section(console, "What sharing saves of a decode step, whole model", _saved_by_batch(operators))


def si(value: float, unit: str = "") -> str:
    """Three digits and a decimal prefix: `si(1.5067e12, "B")` is "1.51 TB"; nothing for zero."""
    if not value:
        return ""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 0.9995 * 10**power:
            scaled = value / 10**power
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()


def billions(parameters: float) -> str:
    """A number of parameters: "743.38 B", "9.4 M", "12,288"."""
    for power, letter, decimals in ((9, "B", 2), (6, "M", 1)):
        if parameters >= 10**power:
            return f"{parameters / 10**power:,.{decimals}f} {letter}"
    return f"{parameters:,.0f}"


def percent(part: float) -> str:
    """One decimal below ten percent, none from there on: "2.7%", "64%"; nothing for zero."""
    return f"{100 * part:.{0 if part >= 0.0995 else 1}f}%" if part else ""


def ranges(layers: Sequence[int]) -> str:
    """Layer numbers in short: (0, 1, 2, 6, 10, 14) is "0-2, 6-14 by 4"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and (len(runs[-1]) == 1 or layer - runs[-1][-1] == runs[-1][1] - runs[-1][0]):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(_run(run) for run in runs)


def _run(run: list[int]) -> str:
    if len(run) < 3:
        return ", ".join(map(str, run))
    step = run[1] - run[0]
    return f"{run[0]}-{run[-1]}" + (f" by {step}" if step > 1 else "")


def _section(console: Console, title: str, content: Sequence[RenderableType]) -> None:
    console.print()
    console.print(Text(title, "bold cyan"))
    for block in content:
        console.print(Padding(block, (0, 0, 0, 2), expand=False))


def _heading(account: ModelBreakdown, note: str | None) -> RenderableType:
    counts = account.parameters
    text = f"{billions(counts.total_without_mtp)} parameters, {billions(counts.active)} of them active a token"
    if account.layers.mtp:
        text += f"; the MTP layer adds {billions(counts.total - counts.total_without_mtp)}"
    return Group(Text(text), *([Text(note, "yellow")] if note else []))


def _remark(sentence: str) -> Text:
    return Text(sentence, "dim")


def _table(*columns: str, footer: Sequence[str] = (), words: int = 1, gap: int = 2) -> Table:
    """A table whose first `words` columns are text and the others numbers; the footer holds the totals."""
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, show_footer=bool(footer), header_style="dim")
    table.padding = (0, 0, 0, gap - 1)  # the box puts one more space between columns
    for i, (name, total) in enumerate(zip_longest(columns, footer, fillvalue="")):
        table.add_column(name, total, justify="left" if i < words else "right", no_wrap=True, footer_style="bold")
    return table


def _published(account: ModelBreakdown, files: dict[str, Any] | None, notes: Sequence[str]) -> list[RenderableType]:
    published = account.published
    table = _table("", "table", *(["files"] if files else []))
    columns = [(published.tensors, published.bytes), *([(files["tensors"], files["bytes"])] if files else [])]
    table.add_row("tensors", *(f"{tensors:,}" for tensors, _ in columns))
    table.add_row("bytes", *(f"{size:,}" for _, size in columns))
    table.add_row("size", *(si(size, "B") for _, size in columns))
    table.add_row("values", f"{published.elements:,}")
    for name, elements in published.elements_by_dtype.items():
        table.add_row(f"  {name}", f"{elements:,}")
    return [table, *(Text(f"Note: {note}.", "yellow") for note in (files["notes"] if files else notes))]


def _layers(account: ModelBreakdown) -> list[RenderableType]:
    plan = account.layers
    mtp = ", and the MTP layer (sparse, full)" if plan.mtp else ""
    shared = f"{plan.shared}, with the selection of the last full layer before them" if plan.shared else "none"
    lines = {
        "all": f"{plan.total}: {plan.dense} dense, {plan.sparse} sparse{mtp}",
        "full": f"{plan.full}: {ranges(plan.full_layers)}",
        "shared": shared,
    }
    return [Text(f"{name:<8}{line}") for name, line in lines.items()]


def _parameters(account: ModelBreakdown) -> list[RenderableType]:
    counts, stored = account.parameters, account.published
    footer = ("total", billions(counts.total), "100%", billions(counts.active), si(stored.bytes, "B"))
    table = _table("", "parameters", "share", "active", "stored", footer=footer)
    for part, number in counts.by_part.items():
        active = counts.active_by_part.get(part)
        table.add_row(
            part,
            billions(number),
            percent(number / counts.total),
            billions(active) if active else "",
            si(stored.bytes_by_part[part], "B"),
        )
    mtp = counts.total - counts.total_without_mtp
    return [table, *([_remark(f"Of these, {billions(mtp)} are the MTP layer's; active leaves it out.")] if mtp else [])]


def _cache(config: ModelConfig, account: ModelBreakdown) -> list[RenderableType]:
    cache, plan, contexts = account.cache, account.layers, _contexts(config, account)
    lengths = [f"at {short_length(context)}" for context in contexts]
    table = _table("", "a row", "layers", "a token", *lengths, gap=2 if len(contexts) < 4 else 1)
    kinds = (
        ("latent", latent_row_bytes(config), plan.total, cache.latent),
        ("index key", index_key_bytes(config), plan.full, cache.index_keys),
    )
    for kind, rows, layers, totals in kinds:
        for name, size in totals.items():
            sizes = [si(size * context, "B") for context in contexts]
            table.add_row(f"{kind} {_FORMATS[name]}", f"{rows[name]:,} B", str(layers), f"{size:,} B", *sizes)
    return [table, *([_remark(_mtp_rows(cache.mtp))] if plan.mtp else [])]


def _mtp_rows(mtp: CacheRows) -> str:
    plain, least = (mtp.latent[a] + mtp.index_keys[b] for a, b in (("bf16", "bf16"), ("fp8_groups", "fp8")))
    return f"The MTP layer adds {plain:,} B a token in BF16, {least:,} B in FP8 groups."


def _flops(config: ModelConfig, account: ModelBreakdown) -> list[RenderableType]:
    table = _table("context", "total", "linear", "attention", "index", "all full", "ratio")
    for context in _contexts(config, account):
        flops = account.flops[context]
        parts = (flops.total, flops.linear, flops.attention, flops.index, flops.all_full)
        table.add_row(short_length(context), *map(si, parts), f"{flops.ratio:.2f}")
    return [table, _remark("all full: with an indexer on every layer; ratio: all full to total")]


def _contexts(config: ModelConfig, account: ModelBreakdown) -> list[int]:
    """The lengths of the account that the model is made for."""
    return [context for context in account.flops if context <= config.max_position_embeddings]


def _step_title(name: str, operators: dict[str, Any], tokens: int) -> str:
    batch, context = operators["batch"], operators["context"]
    sequences = "1 sequence" if batch == 1 else f"{batch:,} sequences"
    each = f"{short_length(tokens)} tokens" if tokens > 1 else "1 token"
    return f"{name}: {each} of {sequences}, {short_length(context)} tokens in the cache, layer {operators['layer']}"


def _step(step: dict[str, Any]) -> list[RenderableType]:
    full, shared = step["full"], step["shared"]
    if shared is None:
        return [_layer(full), Text("Every layer has an indexer of its own: no layer shares a selection.")]
    own = {row["name"]: row for row in shared["operators"]}
    footer = (
        *("full layer\nshared layer", ""),
        *(f"{si(full['flops'])}\n{si(shared['flops'])}", "100%", "\n100%"),
        *(f"{si(full['bytes'], 'B')}\n{si(shared['bytes'], 'B')}", "100%", "\n100%"),
    )
    columns = ("", "shape", "FLOPs", "full", "shared", "bytes", "full", "shared")
    table = _table(*columns, footer=footer, words=2, gap=1)
    for row in full["operators"]:
        both = (row, own.get(row["name"]))
        flops, size = ([percent(r[f"{what}_share"]) if r else "" for r in both] for what in ("flops", "bytes"))
        style = "" if both[1] else "green"
        table.add_row(row["name"], row["shape"], si(row["flops"]), *flops, si(row["bytes"], "B"), *size, style=style)
    return [table, Text(_summary(step))]


def _layer(layer: dict[str, Any]) -> Table:
    """The operators of one kind of layer."""
    footer = ("layer", "", si(layer["flops"]), "100%", si(layer["bytes"], "B"), "100%")
    table = _table("", "shape", "FLOPs", "share", "bytes", "share", footer=footer, words=2)
    for row in layer["operators"]:
        shares = percent(row["flops_share"]), percent(row["bytes_share"])
        table.add_row(row["name"], row["shape"], si(row["flops"]), shares[0], si(row["bytes"], "B"), shares[1])
    return table


def _summary(step: dict[str, Any]) -> str:
    layer, model = step["saved_layer"], step["saved_model"]
    return (
        f"A shared layer saves {percent(layer['flops'])} of a full layer's FLOPs and {percent(layer['bytes'])} of its "
        f"bytes; over the whole model it is {percent(model['flops'])} and {percent(model['bytes'])}."
    )


def _saved_by_batch(operators: dict[str, Any]) -> list[RenderableType]:
    grid = operators["saved_by_batch"]
    contexts = list(dict.fromkeys(cell["context"] for cell in grid))
    table = _table("", *(short_length(context) for context in contexts))
    cells = {(cell["batch"], cell["context"]): cell for cell in grid}
    batches = list(dict.fromkeys(cell["batch"] for cell in grid))
    table.add_row("FLOPs, any batch", *(percent(cells[batches[0], context]["flops"]) for context in contexts))
    for batch in batches:
        table.add_row(f"bytes, batch {batch}", *(percent(cells[batch, context]["bytes"]) for context in contexts))
    return [table, Text(_WHY)]
