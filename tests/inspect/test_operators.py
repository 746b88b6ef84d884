"""The operator table: every weight in one operator, sums equal to the account, rules of counting kept."""

import dataclasses
import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from glm52_jax.config import BUILT_IN
from glm52_jax.inspect.account import all_full, flops_per_token
from glm52_jax.inspect.operators import (
    LAYER,
    StepShape,
    experts_read,
    layer_cost,
    layer_operators,
    operators,
    saved,
    saved_layer,
    step_cost,
    typical_layer,
)
from glm52_jax.params.spec import Stack, parameters
from sharding.errors import InputError

GLM52, FP8, TINY = BUILT_IN["glm-5.2"], BUILT_IN["glm-5.2-fp8"], BUILT_IN["glm-5.2-tiny"]
KILO, MEGA = 1024, 1024**2


@pytest.mark.parametrize("config", [GLM52, dataclasses.replace(TINY, attention_bias=True)])
def test_every_weight_of_a_layer_is_in_one_operator(config):
    named = [path for _, paths in LAYER for path in paths]
    assert len(named) == len(set(named))
    held = {p.path for p in parameters(config) if p.stack not in (Stack.GLOBAL, Stack.MTP)}
    assert held <= set(named)


@pytest.mark.parametrize("context", [100, 32 * KILO, 128 * KILO, MEGA])
@pytest.mark.parametrize("config", [GLM52, FP8, all_full(GLM52)])
def test_operators_add_up_to_the_account(config, context):
    """Layer by layer, without the shortcut of `step_cost` that counts one layer of each kind."""
    layers = sum(layer_cost(config, layer, StepShape(1, context)).flops for layer in range(78))
    final_norm_and_head = 2 * (6144 + 154_880 * 6144)
    assert layers + final_norm_and_head == flops_per_token(config, context).total
    assert step_cost(config, StepShape(1, context)).flops == flops_per_token(config, context).total


def test_decode_from_raw_numbers():
    """A shared and a full MoE layer at batch 4 and 128k, recounted from published shapes."""
    batch, context = 4, 128 * KILO
    expected = {  # name: (FLOPs, bytes)
        "norms": (2 * 14_848 * batch, 2 * 14_848),
        "q_a": (2 * 2048 * 6144 * batch, 2 * 2048 * 6144),
        "q_b": (2 * 16_384 * 2048 * batch, 2 * 16_384 * 2048),
        "kv_a": (2 * 576 * 6144 * batch, 2 * 576 * 6144),
        "index q": (2 * 4096 * 2048 * batch, 2 * 4096 * 2048),
        "index k": (2 * (128 * 6144 + 256) * batch, 2 * (128 * 6144 + 256)),
        "index weights": (2 * 32 * 6144 * batch, 2 * 32 * 6144),
        "index scores": (2 * 32 * (128 + 1) * context * batch, 256 * context * batch),
        "top-k": (0, 4 * context * batch),
        "absorb k_up": (2 * 64 * 192 * 512 * batch, 2 * 64 * 192 * 512),
        "sparse attention": (2 * 64 * 2048 * (576 + 512) * batch, 1152 * 2048 * batch),
        "v_up": (2 * 64 * 256 * 512 * batch, 2 * 64 * 256 * 512),
        "o": (2 * 6144 * 16_384 * batch, 2 * 6144 * 16_384),
        "router": (2 * (256 * 6144 + 256) * batch, 2 * 256 * 6144 + 4 * 256),
        "routed experts": (2 * 8 * 3 * 2048 * 6144 * batch, round(2 * 3 * 2048 * 6144 * 256 * (1 - (31 / 32) ** 4))),
        "shared expert": (2 * 3 * 2048 * 6144 * batch, 2 * 3 * 2048 * 6144),
    }
    full = {row.name: (row.flops, row.bytes) for row in layer_operators(GLM52, 6, StepShape(batch, context))}
    assert full == expected
    shared = {row.name: (row.flops, row.bytes) for row in layer_operators(GLM52, 3, StepShape(batch, context))}
    indexer = {"index q", "index k", "index weights", "index scores", "top-k"}
    assert shared == {name: row for name, row in expected.items() if name not in indexer}


def test_a_dense_layer():
    rows = {row.name: row for row in layer_operators(GLM52, 0, StepShape(1, 4096))}
    assert rows["dense MLP"].flops == 2 * 3 * 12_288 * 6144
    assert not {"router", "routed experts", "shared expert"} & set(rows)


def test_fp8_weights_are_read_as_codes_and_scales():
    rows = {row.name: row.bytes for row in layer_operators(FP8, 6, StepShape(1, 4096))}
    assert rows["q_a"] == 2048 * 6144 + 4 * 16 * 48
    assert rows["kv_a"] == 576 * 6144 + 4 * 5 * 48
    assert rows["routed experts"] == 8 * 3 * (2048 * 6144 + 4 * 16 * 48)
    # No scale block fits a head of kv_b_proj, so its halves are held in plain form; the rest was never quantised.
    assert rows["absorb k_up"] == 2 * 64 * 192 * 512
    assert rows["v_up"] == 2 * 64 * 256 * 512
    assert rows["index weights"] == 2 * 32 * 6144
    assert rows["router"] == 2 * 256 * 6144 + 4 * 256


@given(st.integers(1, 3), st.integers(1, 40), st.integers(0, 40), st.integers(1, 50))
def test_pairs_of_queries_and_positions(batch, tokens, before, topk):
    step = StepShape(batch, before + tokens, tokens)
    seen = [before + i + 1 for i in range(tokens)]
    assert step.visible == batch * sum(seen)
    assert step.attended(topk) == batch * sum(min(topk, n) for n in seen)


def test_a_prefill_in_chunks_does_the_work_of_one():
    """Chunks change what is read again, not what is computed; the head runs once a step."""
    config = TINY
    whole = layer_cost(config, 6, StepShape(2, 96, 96)).flops
    chunks = sum(layer_cost(config, 6, StepShape(2, end, 32)).flops for end in (32, 64, 96))
    assert whole == chunks


def test_experts_read():
    assert experts_read(GLM52, 1) == pytest.approx(8)
    assert experts_read(GLM52, 2) == pytest.approx(16 - 8 / 32)
    assert experts_read(GLM52, 100_000) == pytest.approx(256)


def test_what_sharing_saves():
    """All of it grows with the context; of the bytes it is a small part at batch one and much at a large batch."""
    for batch in (1, 16, 256):
        gains = [saved(GLM52, StepShape(batch, context)) for context in (8 * KILO, 32 * KILO, 128 * KILO, MEGA)]
        for shorter, longer in itertools.pairwise(gains):
            assert longer.flops > shorter.flops
            assert longer.bytes > shorter.bytes
    assert saved(GLM52, StepShape(1, MEGA)).flops == pytest.approx(1 - 1 / flops_per_token(GLM52, MEGA).ratio)
    # Short contexts: the indexer's weights are read once a step, whatever the batch, and the experts are not.
    assert saved(GLM52, StepShape(16, 2 * KILO)).bytes < saved(GLM52, StepShape(1, 2 * KILO)).bytes
    # Long ones: the keys are read for each sequence.
    assert saved(GLM52, StepShape(256, MEGA)).bytes > saved(GLM52, StepShape(1, MEGA)).bytes
    nothing = saved(BUILT_IN["glm-5"], StepShape(1, 128 * KILO))
    assert (nothing.flops, nothing.bytes) == (0, 0)


def test_a_shared_layer_against_a_full_one():
    step = StepShape(1, 128 * KILO)
    rows = layer_operators(GLM52, 6, step)
    index = sum(row.flops for row in rows if row.name.startswith("index"))
    assert saved_layer(GLM52, 3, step).flops == pytest.approx(index / sum(row.flops for row in rows))


def test_typical_layer():
    assert typical_layer(GLM52) == 3
    assert typical_layer(BUILT_IN["glm-5"]) == 3
    dense = dataclasses.replace(TINY, mlp_layer_types=("dense",) * 8)
    assert typical_layer(dense) == 3
    assert typical_layer(all_full(dense)) == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 10, 1), "batch is 0, expected at least 1"),
        ((1, 10, 11), "the chunk of 11 tokens is longer than the context of 10"),
    ],
)
def test_sizes_that_make_no_step_are_refused(sizes, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        StepShape(*sizes)


def test_json_keys_are_stable():
    table = operators(GLM52, batch=2, context=32 * KILO, chunk=512, contexts=(32 * KILO,))
    assert json.loads(json.dumps(table)) == table
    assert set(table) == {"batch", "context", "chunk", "layer", "prefill", "decode", "saved_by_batch"}
    assert [set(cell) for cell in table["saved_by_batch"]] == [{"batch", "context", "flops", "bytes"}] * 3
    for name in ("prefill", "decode"):
        assert set(table[name]) == {"full", "shared", "saved_layer", "saved_model"}
        for kind in ("full", "shared"):
            layer = table[name][kind]
            assert set(layer) == {"flops", "bytes", "operators"}
            for row in layer["operators"]:
                assert set(row) == {"name", "shape", "flops", "bytes", "flops_share", "bytes_share"}
            for what in ("flops", "bytes"):
                assert sum(row[what] for row in layer["operators"]) == layer[what]
                assert sum(row[f"{what}_share"] for row in layer["operators"]) == pytest.approx(1)
        assert set(table[name]["saved_layer"]) == set(table[name]["saved_model"]) == {"flops", "bytes"}
    assert operators(BUILT_IN["glm-5"], batch=1, context=4096, chunk=1, contexts=())["decode"]["shared"] is None
