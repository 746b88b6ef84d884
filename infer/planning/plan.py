"""`glm52_jax.plan`: whether and how a step of the model runs on a slice of TPUs."""

from __future__ import annotations

from typing import Any

from glm52_jax.config import ModelConfig
from infer.planning.request import plan_request
from infer.planning.slice_plan import SlicePlan
from infer.planning.stored_plans import stored_plan
from sharding.layout import Layout


def plan(
    config: ModelConfig,
    topology: str,
    layout: str | Layout = "throughput",
    step: str = "decode",
    *,
    batch: int = 1,
    context: int = 128 * 1024,
    **options: Any,
) -> SlicePlan:
    """Whether and how a step of the model runs on a slice, by the TPU compiler; see `plan_request` for the arguments.

    Plans are kept on disk by what they are made of, and found again. Without libtpu the analytic account is given.

    Raises:
        InputError: as `plan_request`.
    """
    return stored_plan(plan_request(config, topology, layout, step, batch=batch, context=context, **options))
