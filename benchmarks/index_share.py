"""What IndexShare saves on a slice: the released layer plan beside one with an indexer on every layer.

    .venv/bin/python -m benchmarks.index_share [--topology v5p:4x4x8] [--layout throughput]

Both are compiled for the slice by the TPU compiler (`make plan` installs it), a decode step at every batch and context
that fits. Index-key bytes are those of one device; operations are all multiplications of its step.
"""

from __future__ import annotations

import argparse
import dataclasses

from rich.console import Console
from rich.table import Table

from glm52_jax.config import FULL, load_config
from glm52_jax.inputs.lengths import short_length
from infer.planning.request import plan_request
from infer.planning.slice_plan import SlicePlan
from infer.planning.stored_plans import stored_plan

BATCHES, CONTEXTS = (1, 64, 256), (32 * 1024, 128 * 1024, 1024 * 1024)
FEW = 8


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="glm-5.2")
    parser.add_argument("--topology", default="v5p:4x4x8")
    parser.add_argument("--layout", default="throughput", help="of all but the smallest batches")
    arguments = parser.parse_args()
    released = load_config(arguments.model)
    everywhere = dataclasses.replace(released, indexer_types=(FULL,) * released.num_hidden_layers)
    console = Console(width=150)
    table = Table(title=f"{arguments.model} on {arguments.topology}, decode: released / an indexer on every layer")
    columns = (
        "batch",
        "context",
        "layout",
        "index keys, GiB",
        "GFLOP a device",
        "HBM, GB",
        "largest lower bound, ms",
        "fits",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for batch in BATCHES:
        for context in CONTEXTS:
            # A few sequences leave most devices of a throughput layout without one.
            name = arguments.layout if batch > FEW else "long_context"
            asked = plan_request(released, arguments.topology, name, batch=batch, context=context)
            same = plan_request(everywhere, arguments.topology, asked.layout, batch=batch, context=context)
            made = [stored_plan(one) for one in (asked, same)]
            table.add_row(*_row(made, batch, context))
    console.print(table)


def _row(made: list[SlicePlan], batch: int, context: int) -> list[str]:
    def both(value: object, digits: int = 2) -> str:
        return " / ".join(f"{value(plan):,.{digits}f}" for plan in made)  # type: ignore[operator]

    r = made[0].request
    filled = "" if r["batch"] == batch else f" (as {r['batch']})"
    return [
        f"{batch}{filled}",
        short_length(context),
        f"{r['data']}x{r['expert']}x{r['tensor']}",
        both(lambda plan: plan.account.index_keys / 2**30),
        both(lambda plan: sum(plan.flops.values()) / 1e9, 0),
        both(lambda plan: plan.hbm_bytes / 1e9, 1),
        both(lambda plan: plan.floors[0].seconds * 1e3),
        " / ".join("yes" if plan.fits else "no" for plan in made),
    ]


if __name__ == "__main__":
    main()
