"""The largest batch for a context and the largest context for a batch, in three compilations each at most.

Memory is nearly linear in both: the account gives the parameters and the bytes of a sequence, the compiler the
temporaries. A guess by the account is compiled, and corrected by what the compiler made of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from infer.planning.request import PlanRequest, request_memory
from infer.planning.slice_plan import SlicePlan

COMPILATIONS = 3
_MARGIN = 0.98  # of the limit that the first guess fills
_PAGE = 1024  # contexts are multiples of it


@dataclasses.dataclass(frozen=True)
class Fit:
    """The largest that was compiled and fits.

    Attributes:
        batch, context: of it; zero where nothing fits.
        plan: of that size, or of the smallest size tried where nothing fits.
        compilations: how many it took.
    """

    batch: int
    context: int
    plan: SlicePlan
    compilations: int


def largest_batch(request: PlanRequest, make: Callable[[PlanRequest], SlicePlan]) -> Fit:
    """The largest batch for the context of a request.

    Args:
        make: compiles a request.
    """
    unit = request.layout.parts("batch")
    return _largest(request, unit, 10**6, lambda units: request.sized(batch=units * unit), make)


def largest_context(request: PlanRequest, make: Callable[[PlanRequest], SlicePlan]) -> Fit:
    """The largest context for the batch of a request, up to the model's."""
    unit = min(_PAGE * request.layout.parts("kv_pages"), request.config.max_position_embeddings)
    most = request.config.max_position_embeddings // unit

    def sized(units: int) -> PlanRequest:
        # A prefill step takes no more tokens of a sequence than there is room for.
        return dataclasses.replace(request, context=units * unit, chunk=min(request.chunk, units * unit))

    return _largest(request, unit, most, sized, make)


def _largest(
    request: PlanRequest,
    unit: int,
    most: int,
    sized: Callable[[int], PlanRequest],
    make: Callable[[PlanRequest], SlicePlan],
) -> Fit:
    limit = request.topology.chip.hbm_bytes
    one = request_memory(sized(1)).total
    slope = max(1.0, request_memory(sized(2)).total - one) if most > 1 else 1.0
    nothing = one - slope  # what is there without any sequence
    fits: tuple[int, SlicePlan] | None = None
    too_many, last = most + 1, None
    for number in range(1, COMPILATIONS + 1):
        units = int((limit * (_MARGIN if number == 1 else 1.0) - nothing) // slope)
        units = max(fits[0] + 1 if fits else 1, min(units, most, too_many - 1))
        if units >= too_many:
            break
        last = made = make(sized(units))
        if "total" in made.memory:
            # With its temporaries a sequence takes this much, if they grow as the batch or the context does.
            slope = max(1.0, (made.memory["total"] - nothing) / units)
        if made.fits:
            fits = units, made
        else:
            too_many = units
        if fits and (fits[0] == most or fits[0] + 1 == too_many):
            break
    if fits is None:
        assert last is not None
        return Fit(0, 0, last, number)
    final = sized(fits[0])
    return Fit(final.batch, final.context, fits[1], number)
