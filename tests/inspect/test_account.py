"""The account against the published figures and against a recount of the tensors from their published shapes."""

import dataclasses

import pytest

from glm52_jax.config import BUILT_IN, QuantizationConfig
from glm52_jax.inspect.account import (
    all_full,
    cache_bytes,
    flops_per_token,
    index_key_bytes,
    latent_row_bytes,
    layer_plan,
    model_breakdown,
    parameter_counts,
    published,
)
from glm52_jax.params.spec import published_tensors

GLM52, FP8, TINY = BUILT_IN["glm-5.2"], BUILT_IN["glm-5.2-fp8"], BUILT_IN["glm-5.2-tiny"]
FULL_LAYERS = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)
KILO, MEGA = 1024, 1024**2


def test_published_bf16():
    found = published(GLM52)
    assert found.tensors == 59_585
    assert found.elements == 753_329_940_480
    assert found.bytes == 1_506_659_919_872
    assert found.elements_by_dtype == {"BF16": 753_329_940_480 - 76 * 256, "F32": 76 * 256}


def test_published_fp8():
    found = published(FP8)
    assert found.tensors == 118_629
    assert found.bytes == 755_617_140_416
    assert found.elements_by_dtype == {"F8_E4M3": 751_226_191_872, "BF16": 2_103_729_152, "F32": 45_872_560}
    assert found.elements == sum(found.elements_by_dtype.values())


@pytest.mark.parametrize("config", [GLM52, FP8, TINY, dataclasses.replace(TINY, dtype="float32")])
def test_bytes_are_the_elements_at_their_width(config):
    found = published(config)
    width = {"F8_E4M3": 1, "BF16": 2, "F32": 4}
    assert found.bytes == sum(width[dtype] * elements for dtype, elements in found.elements_by_dtype.items())
    assert found.bytes == sum(found.bytes_by_part.values())


@pytest.mark.parametrize(
    ("layer", "bf16", "fp8"),
    [(0, 17, 27), (2, 17, 27), (3, 782, 1558), (77, 782, 1558), (6, 787, 1565), (74, 787, 1565), (78, 791, 1569)],
)
def test_tensors_of_a_layer(layer, bf16, fp8):
    prefix = f"model.layers.{layer}."
    for config, expected in ((GLM52, bf16), (FP8, fp8)):
        tensors = [t for _, t in published_tensors(config) if t.name.startswith(prefix)]
        assert len(tensors) + sum(t.quantized for t in tensors) == expected


def test_a_list_of_modules_that_stay_in_bf16_is_followed():
    everything = dataclasses.replace(FP8, quantization=QuantizationConfig((128, 128), ("model",)))
    assert published(everything) == published(GLM52)


def test_parameters():
    counts = parameter_counts(GLM52)
    assert counts.total == 753_329_940_480  # the MTP layer's router bias counts, as any weight does
    assert round(counts.total_without_mtp / 1e9, 2) == 743.38
    assert round(counts.active / 1e9, 2) == 40.30
    assert round((counts.total - counts.total_without_mtp) / 1e9, 2) == 9.95
    assert sum(counts.by_part.values()) == counts.total
    assert sum(counts.active_by_part.values()) == counts.active
    assert "embedding" not in counts.active_by_part
    assert counts.active_by_part["output head"] == 154_880 * 6144
    assert parameter_counts(FP8) == counts  # scales are no parameters


def test_parameters_of_the_family():
    totals = {name: round(parameter_counts(BUILT_IN[name]).total_without_mtp / 1e9, 2) for name in BUILT_IN}
    assert totals["glm-5"] == totals["glm-5.1"] == 743.91
    assert totals["glm-5.2"] == totals["glm-5.2-fp8"] == 743.38
    assert round(parameter_counts(BUILT_IN["glm-5"]).total / 1e9, 2) == 753.86


@pytest.mark.parametrize("config", [GLM52, FP8, TINY, dataclasses.replace(TINY, attention_bias=True)])
def test_parameters_are_those_of_the_published_tensors(config):
    """Computed and published form hold the same weights: `kv_b_proj` is split, gate and up are joined."""
    by_part = {}
    for part, tensor in published_tensors(config):
        by_part[part] = by_part.get(part, 0) + tensor.elements
    assert parameter_counts(config).by_part == by_part


def test_layer_plan():
    plan = layer_plan(GLM52)
    assert (plan.total, plan.dense, plan.sparse, plan.full, plan.shared, plan.mtp) == (78, 3, 75, 21, 57, 1)
    assert plan.full_layers == FULL_LAYERS
    assert layer_plan(BUILT_IN["glm-5"]).full == 78
    assert layer_plan(GLM52.without_mtp()).mtp == 0


def test_cache_rows():
    assert latent_row_bytes(GLM52) == {"bf16": 1152, "fp8_groups": 656, "fp8_tensor": 576}
    assert index_key_bytes(GLM52) == {"bf16": 256, "fp8": 132}
    # A latent narrower than a group of 128 still has a scale.
    assert latent_row_bytes(TINY) == {"bf16": 96, "fp8_groups": 32 + 4 + 32, "fp8_tensor": 48}


def test_cache_bytes():
    cache = cache_bytes(GLM52)
    assert cache.latent == {"bf16": 89_856, "fp8_groups": 51_168, "fp8_tensor": 78 * 576}
    assert cache.index_keys == {"bf16": 5_376, "fp8": 2_772}
    assert cache.mtp.latent == {"bf16": 1152, "fp8_groups": 656, "fp8_tensor": 576}
    assert cache.mtp.index_keys == {"bf16": 256, "fp8": 132}
    assert cache.latent["bf16"] * MEGA / 2**30 == pytest.approx(87.75)
    without = cache_bytes(GLM52.without_mtp())
    assert (without.latent, without.index_keys) == (cache.latent, cache.index_keys)
    assert set(without.mtp.latent.values()) | set(without.mtp.index_keys.values()) == {0}


@pytest.mark.parametrize("context", [1, 1000, 2048, 32 * KILO, 128 * KILO, MEGA])
def test_flops(context):
    flops = flops_per_token(GLM52, context)
    assert flops.attention == 78 * 2 * 64 * min(2048, context) * (576 + 512)
    assert flops.index == 21 * (2 * 32 * 128 + 2 * 32) * context
    assert flops.linear == pytest.approx(2 * 40.30e9, rel=1e-4)
    assert flops.total == flops.linear + flops.attention + flops.index
    indexers = 2 * 57 * (4096 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144)
    assert flops.all_full == flops.total + indexers + 57 * (2 * 32 * 128 + 2 * 32) * context


def test_flops_ratio():
    """Published as "2.9x" at one million tokens, without a formula; the parts of it that can be meant give 2.7-2.9."""
    ratios = {context: flops_per_token(GLM52, context).ratio for context in (32 * KILO, 128 * KILO, MEGA)}
    assert ratios[32 * KILO] == pytest.approx(1.15, abs=0.005)
    assert ratios[128 * KILO] == pytest.approx(1.50, abs=0.005)
    assert 2.7 <= ratios[MEGA] <= 2.9
    assert flops_per_token(BUILT_IN["glm-5"], MEGA).ratio == 1
    assert flops_per_token(all_full(GLM52), MEGA).total == flops_per_token(GLM52, MEGA).all_full


def test_json_keys_are_stable():
    report = model_breakdown(GLM52, "glm-5.2").as_json()
    parts = {
        "embedding",
        "norms",
        "output head",
        "attention",
        "indexer",
        "dense MLP",
        "router",
        "routed experts",
        "shared experts",
        "MTP",
    }
    rows = {"latent": {"bf16", "fp8_groups", "fp8_tensor"}, "index_keys": {"bf16", "fp8"}}
    flops = {"total", "linear", "attention", "index", "all_full", "ratio"}
    assert _keys(report) == {
        "name": None,
        "published_tensors": None,
        "elements": None,
        "elements_by_dtype": {"BF16", "F32"},
        "tensor_bytes": None,
        "tensor_bytes_by_part": parts,
        "parameters": {
            "total_without_mtp": None,
            "total": None,
            "active": None,
            "by_part": parts,
            "active_by_part": parts - {"embedding", "MTP"},
        },
        "layers": {"total", "dense", "sparse", "full", "shared", "full_layers", "mtp"},
        "cache_bytes_per_token": {**rows, "mtp": rows},
        "flops_per_token": {"32768": flops, "131072": flops, "1048576": flops},
    }


def _keys(value):
    """The keys of nested objects; a set where all values are plain."""
    if not isinstance(value, dict):
        return None
    inner = {key: _keys(item) for key, item in value.items()}
    return set(inner) if not any(inner.values()) else inner
