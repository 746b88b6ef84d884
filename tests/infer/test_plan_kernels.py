"""A few layers of the released widths compiled for TPUs: kernels are what runs, and caches are not copied."""

import dataclasses
import re

import pytest

from glm52_jax.cache.paged_cache import PAGE_SIZE
from glm52_jax.config import DENSE, FULL, SHARED, SPARSE, ModelConfig, load_config
from infer.planning.request import plan_request
from infer.planning.slice_plan import SlicePlan, compile_plan
from tests.needs import needs_libtpu

pytestmark = needs_libtpu
KINDS = (FULL, SHARED, FULL, SHARED)
EVERY_STEP = {"block_matmul", "cache_write", "choose_experts"}


def few_layers() -> ModelConfig:
    return dataclasses.replace(
        load_config("glm-5.2-fp8"),
        num_hidden_layers=len(KINDS),
        indexer_types=KINDS,
        mlp_layer_types=(DENSE, SPARSE, SPARSE, SPARSE),
        n_routed_experts=16,
        vocab_size=2048,
        num_nextn_predict_layers=0,
    )


def made(topology: str, layout: str, step: str, **options: object) -> SlicePlan:
    return compile_plan(plan_request(few_layers(), topology, layout, step, **options))


@pytest.mark.parametrize(
    ("topology", "layout", "step", "options", "kernels"),
    [
        ("v5p:2x2x1", "expert=4", "decode", {"batch": 32}, {"experts_few", "index_topk", "sparse_mla_rows"}),
        (
            "v6e:2x2",
            "expert=2,tensor=2",
            "prefill",
            {"batch": 2, "chunk": 1024, "context": 128 * 1024},
            {"experts_hidden", "experts_outputs", "index_scores", "sparse_mla_rows", "topk", "topk_last"},
        ),
        pytest.param(
            "tpu7x:2x2x1",
            "expert=8",
            "decode",
            {"batch": 64, "context": 8192},
            {"experts_few", "dense_mla"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["decode", "prefill", "short"],
)
def test_kernels_run_and_copy_nothing(topology: str, layout: str, step: str, options: dict, kernels: set[str]) -> None:
    plan = made(topology, layout, step, **{"context": 32 * 1024} | options)
    assert plan.fits
    named = {kernel["name"]: kernel for kernel in plan.kernels}
    assert set(named) >= EVERY_STEP | kernels, named
    for kernel in named.values():
        assert kernel["hbm_bytes"] > 0, kernel
        assert kernel["flops"] > 0, kernel
    # Scores of a part of a chunk are the largest of them.
    assert plan.memory["temporaries"] < (2**30 if step == "prefill" else 2**27), plan.temporaries
    caches = [w for w in plan.warnings if re.search(rf"^(copy|transpose).*\[{len(KINDS)},\d+,{PAGE_SIZE},", w)]
    assert not caches, caches


@pytest.mark.slow
def test_plain_forms_can_be_planned_still() -> None:
    plan = made("v5p:2x2x1", "expert=4", "decode", batch=8, context=4096, kernels="reference")
    assert not {kernel["name"] for kernel in plan.kernels} & EVERY_STEP
