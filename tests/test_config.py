"""Reading the configs that exist, and refusing those that contradict themselves."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.config import ModelConfig
from sharding.errors import InputError
from tests.published_config import ABSENT, PLAN, PUBLISHED, F, S, no_plan, raw, read, refusal, refused


def test_the_published_config():
    config = read()
    assert (config.qk_head_dim, config.latent_width, config.shared_intermediate_size) == (40, 48, 32)
    assert (config.rope_theta, config.max_position_embeddings, config.dtype) == (8e6, 1048576, "bfloat16")
    assert config.full_layers == (0, 1, 2, 6)
    assert config.latent_norm_eps == config.rms_norm_eps == 1e-5
    assert config.has_mtp
    assert not config.without_mtp().has_mtp
    assert (config.temperature, config.top_p, config.quantization) == (1.0, 1.0, None)


# Heads.


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("head_dim", [24, 64, None, ABSENT])
def test_a_stray_head_dim_changes_nothing(place: str, head_dim: Any):
    fields = raw(head_dim=ABSENT)
    stray = {} if head_dim is ABSENT else {"head_dim": head_dim}
    config = ModelConfig.from_dict(stray | fields if place == "before" else fields | stray)
    assert (config.qk_rope_head_dim, config.qk_head_dim) == (16, 40)
    assert config == read()


def test_head_dim_is_no_substitute():
    refused({"qk_rope_head_dim": ABSENT}, "qk_rope_head_dim is missing (head_dim is no substitute")
    refused({"qk_rope_head_dim": ABSENT, "head_dim": ABSENT}, "qk_rope_head_dim is missing")
    refused({"qk_head_dim": 24}, "qk_head_dim is 24, but this model needs 40")


# Which layers are full.


@pytest.mark.parametrize(
    ("fields", "types"),
    [
        ({}, [F] * 7),
        ({"index_topk_freq": None, "index_skip_topk_offset": None}, [F] * 7),
        ({"index_topk_freq": None, "index_skip_topk_offset": 3}, [F] * 7),
        ({"index_topk_freq": 1}, [F] * 7),
        ({"index_topk_freq": 1, "index_skip_topk_offset": 3}, [F] * 7),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, PLAN),
        ({"index_topk_freq": 4}, [F, F, S, S, S, F, S]),  # the default offset is 2
        ({"index_topk_freq": 4, "index_skip_topk_offset": None}, [F, F, S, S, S, F, S]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [F, S, F, S, F, S, F]),
        ({"index_topk_pattern": "FFSSSSF"}, [F, F, S, S, S, S, F]),
        ({"index_topk_pattern": ["full", "shared"] + ["full"] * 5}, [F, S, F, F, F, F, F]),
        ({"indexer_types": PLAN}, PLAN),
        ({"indexer_types": [*PLAN, F]}, PLAN),  # the MTP layer listed too
        ({"index_topk_pattern": "FFFSSSFF"}, PLAN),
        # Of several, the most explicit is taken.
        ({"indexer_types": PLAN, "index_topk_freq": 4}, PLAN),
        ({"indexer_types": PLAN, "index_topk_pattern": "FFFSSSF", "index_topk_freq": 3}, PLAN),
        ({"indexer_types": PLAN, "index_topk_freq": 4, "index_skip_topk_offset": 2}, PLAN),
        ({"index_topk_pattern": "FSFSFSF", "index_topk_freq": 4, "index_skip_topk_offset": 3}, [F, S] * 3 + [F]),
    ],
)
def test_the_plan_of_indexers(fields: dict[str, Any], types: list[str]):
    assert read(**no_plan(**fields)).indexer_types == tuple(types)


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        ({"indexer_types": [S, *PLAN[1:]]}, ["indexer_types[0] is 'shared'", "no earlier layer"]),
        ({"index_topk_pattern": "SFFFFFF"}, ["indexer_types[0] is 'shared'", "no earlier layer"]),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 0}, ["indexer_types[0] is 'shared'"]),
        ({"indexer_types": PLAN[:5]}, ["indexer_types has 5 entries but num_hidden_layers is 7"]),
        ({"indexer_types": []}, ["indexer_types has 0 entries but num_hidden_layers is 7"]),
        ({"indexer_types": [*PLAN, S]}, ["indexer_types has 8 entries"]),
        ({"index_topk_pattern": "FFF"}, ["indexer_types has 3 entries"]),
        ({"indexer_types": [*PLAN[:6], "dense"]}, ["indexer_types[6] is 'dense', expected one of full, shared"]),
        ({"index_topk_pattern": "FFFXXXF"}, ["indexer_types[3] is 'X', expected one of full, shared"]),
        ({"indexer_types": "full"}, ["indexer_types is 'full', expected a list of layer kinds"]),
        ({"indexer_types": 4}, ["indexer_types is 4, expected a list of layer kinds"]),
        ({"indexer_types": [1] * 7}, ["expected a list of layer kinds"]),
        (
            {"indexer_types": PLAN, "index_topk_pattern": "FFFSSFF"},
            ["index_topk_pattern contradicts indexer_types at layer 5"],
        ),
        ({"index_topk_freq": 0}, ["index_topk_freq is 0, expected an integer of at least 1"]),
        ({"index_topk_freq": "4"}, ["index_topk_freq is '4', expected an integer"]),
    ],
)
def test_a_plan_of_indexers_that_cannot_be(fields: dict[str, Any], fragments: list[str]):
    refused(no_plan(**fields), *fragments)


@pytest.mark.parametrize(
    ("fields", "note"),
    [
        ({}, None),
        ({"indexer_types": PLAN, "index_topk_pattern": "FFFSSSF"}, None),
        ({"indexer_types": PLAN, "index_topk_freq": 4}, None),  # the offset that fits is not the default one
        ({"indexer_types": PLAN, "index_topk_freq": 4, "index_skip_topk_offset": 3}, None),
        (
            {"indexer_types": PLAN, "index_topk_freq": 4, "index_skip_topk_offset": 2},
            "indexer_types and index_topk_freq 4 with index_skip_topk_offset 2 differ, first at layer 2; indexer_types",
        ),
        (
            {"indexer_types": PLAN, "index_topk_freq": 3},
            "indexer_types and index_topk_freq 3 differ, first at layer 2; indexer_types is taken",
        ),
        (
            {"index_topk_pattern": "FSFSFSF", "index_topk_freq": 4, "index_skip_topk_offset": 3},
            "index_topk_pattern and index_topk_freq 4 with index_skip_topk_offset 3 differ, first at layer 1; "
            "index_topk_pattern is taken",
        ),
        ({"index_topk_pattern": "FSFSFSF", "index_topk_freq": 1}, "index_topk_pattern and index_topk_freq 1 differ"),
        ({"index_skip_topk_offset": 3}, "index_skip_topk_offset is 3 without index_topk_freq, so every layer has"),
    ],
)
def test_the_plan_that_is_not_taken_is_named(fields: dict[str, Any], note: str | None):
    notes = read(**no_plan(**fields)).notes
    assert len(notes) == (note is not None)
    if note is not None:
        assert notes[0].startswith(f"config.json: {note}")


# Which layers are dense.


@pytest.mark.parametrize(
    ("fields", "dense"),
    [
        ({"first_k_dense_replace": 3, "mlp_layer_types": ABSENT}, [0, 1, 2]),
        ({"first_k_dense_replace": 0, "mlp_layer_types": None}, []),
        ({"first_k_dense_replace": 7, "mlp_layer_types": ABSENT}, list(range(7))),
        ({"first_k_dense_replace": ABSENT, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5}, [0, 1]),
        ({"first_k_dense_replace": ABSENT, "mlp_layer_types": ["sparse", "dense"] * 3 + ["sparse"]}, [1, 3, 5]),
        ({"first_k_dense_replace": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 6}, [0]),
        ({"first_k_dense_replace": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 7}, [0]),  # the MTP layer listed too
    ],
)
def test_the_plan_of_mlps(fields: dict[str, Any], dense: list[int]):
    types = read(**fields).mlp_layer_types
    assert [i for i, kind in enumerate(types) if kind == "dense"] == dense


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        (
            {"first_k_dense_replace": 2},
            ["mlp_layer_types contradicts first_k_dense_replace 2 at layer 1"],
        ),
        (
            {"first_k_dense_replace": 8, "mlp_layer_types": ABSENT},
            ["first_k_dense_replace is 8 but num_hidden_layers is 7"],
        ),
        (
            {"first_k_dense_replace": ABSENT, "mlp_layer_types": ABSENT},
            ["first_k_dense_replace is missing", "mlp_layer_types"],
        ),
        (
            {"first_k_dense_replace": ABSENT, "mlp_layer_types": ["moe"] * 7},
            ["mlp_layer_types[0] is 'moe', expected one of dense, sparse"],
        ),
        ({"first_k_dense_replace": ABSENT, "mlp_layer_types": ["dense"]}, ["mlp_layer_types has 1 entries"]),
    ],
)
def test_a_plan_of_mlps_that_cannot_be(fields: dict[str, Any], fragments: list[str]):
    refused(fields, *fragments)


# Rotary base.


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 8000000, "rope_parameters": ABSENT},
        {"rope_theta": 8e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_theta": 8e6},
        {"rope_parameters": {"rope_theta": 8e6}},
        {"rope_parameters": {"rope_theta": 8e6, "type": "default", "partial_rotary_factor": 1.0}},
        {"rope_parameters": ABSENT, "rope_scaling": {"rope_theta": 8e6, "rope_type": "default"}},
        {"rope_scaling": None},
    ],
)
def test_the_rotary_base(fields: dict[str, Any]):
    assert read(**fields).rope_theta == 8e6


@pytest.mark.parametrize(
    ("fields", "fragments"),
    [
        ({"rope_parameters": ABSENT}, ["rope_theta is missing"]),
        ({"rope_parameters": {"rope_type": "default"}}, ["rope_theta is missing"]),
        ({"rope_theta": 1e6}, ["rope_theta is 1000000 but rope_parameters.rope_theta is 8000000"]),
        ({"rope_scaling": {"rope_theta": 1e6}}, ["rope_scaling.rope_theta is 1000000 but"]),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, ["rope_scaling: type is 'yarn'"]),
        ({"rope_parameters": {"rope_theta": 8e6, "rope_type": "yarn"}}, ["rope_parameters: rope_type is 'yarn'"]),
        (
            {"rope_parameters": {"rope_theta": 8e6, "partial_rotary_factor": 0.5}},
            ["rope_parameters: partial_rotary_factor is 0.5, but this model needs 1"],
        ),
        ({"rope_parameters": 8e6}, ["rope_parameters is 8000000.0, expected an object"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["rope_parameters: rope_theta is 0, expected a positive number"]),
        ({"rope_parameters": {"rope_theta": float("nan")}}, ["rope_theta is nan, expected a positive number"]),
        ({"rope_parameters": {"rope_theta": float("inf")}}, ["rope_theta is inf, expected a positive number"]),
        ({"rope_parameters": {"rope_theta": 10**400}}, ["rope_theta is 1000", "more than a float holds"]),
    ],
)
def test_a_rotary_base_that_cannot_be(fields: dict[str, Any], fragments: list[str]):
    refused(fields, *fragments)


# Ends of a text.


@pytest.mark.parametrize(
    ("own", "generation", "ids"),
    [
        (5, {}, (5,)),
        ([5], {}, (5,)),
        ([5, 6, 7], {}, (5, 6, 7)),
        (0, {}, (0,)),
        (ABSENT, {"eos_token_id": [7]}, (7,)),
        ([5, 6], {"eos_token_id": [6, 8]}, (5, 6, 8)),
        (5, {"eos_token_id": 9}, (5, 9)),
        (None, {}, ()),
        ([], {"eos_token_id": None}, ()),
    ],
)
def test_ends_of_a_text_are_joined(own: Any, generation: dict[str, Any], ids: tuple[int, ...]):
    assert ModelConfig.from_dict(raw(eos_token_id=own), generation=generation).eos_token_ids == ids


@pytest.mark.parametrize("eos", ["</s>", [5, "6"], True, -1, [None], 1.5, 2**31])
def test_an_end_of_a_text_that_is_no_token(eos: Any):
    refused({"eos_token_id": eos}, "eos_token_id holds", "expected token ids")
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id holds"):
        ModelConfig.from_dict(raw(), generation={"eos_token_id": eos})


@pytest.mark.parametrize("eos", [320, [5, 320], [5, 2**31 - 1]])
def test_an_end_of_a_text_beyond_the_vocabulary(eos: Any):
    refused({"eos_token_id": eos}, "config.json: eos_token_id holds", "but the vocabulary has 320 tokens")
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id holds .* vocabulary has 320 tokens"):
        ModelConfig.from_dict(raw(), generation={"eos_token_id": eos})


def defaults(**generation: Any) -> tuple[float, float, int]:
    config = ModelConfig.from_dict(raw(), generation=generation)
    return config.temperature, config.top_p, config.top_k


def test_sampling_defaults():
    config = ModelConfig.from_dict(raw(), generation={"temperature": 0, "top_p": 0.9})
    assert (config.temperature, config.top_p) == (0.0, 0.9)
    assert defaults() == defaults(temperature=None, top_p=None, top_k=None, do_sample=None) == (1.0, 1.0, 0)
    assert defaults(top_k=-1) == defaults(top_k=0) == (1.0, 1.0, 0)
    assert defaults(top_k=20, temperature=0.7, top_p=0.8, do_sample=True) == (0.7, 0.8, 20)
    with pytest.raises(InputError, match=r"generation_config.json: temperature is -1"):
        ModelConfig.from_dict(raw(), generation={"temperature": -1})
    with pytest.raises(InputError, match=r"top_p is 1.5, expected a probability"):
        ModelConfig.from_dict(raw(), generation={"top_p": 1.5})


@pytest.mark.parametrize(
    ("generation", "reason"),
    [
        ({"do_sample": False, "temperature": 0.7}, "do_sample is false"),
        ({"top_k": 1}, "top_k is 1"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_p": 0.0, "do_sample": True, "temperature": 1.0}, "top_p is 0.0"),
    ],
)
def test_a_file_that_asks_for_the_most_likely_token(generation: dict[str, Any], reason: str):
    assert defaults(**generation)[0] == 0.0
    (note,) = ModelConfig.from_dict(raw(), generation=generation).notes
    assert note.startswith(f"generation_config.json: {reason}, so the most likely token is taken")


@pytest.mark.parametrize(
    ("generation", "sentence"),
    [
        ({"do_sample": "false"}, "do_sample is 'false', expected true or false"),
        ({"do_sample": 0}, "do_sample is 0, expected true or false"),
        ({"top_k": -2}, "top_k is -2, expected an integer of at least -1"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"top_k": True}, "top_k is True, expected an integer"),
        ({"top_k": "40"}, "top_k is '40', expected an integer"),
        ({"temperature": "1.0"}, "temperature is '1.0', expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan, expected a number of at least 0"),
        ({"temperature": False}, "temperature is False, expected a number of at least 0"),
        ({"top_p": -0.1}, "top_p is -0.1, expected a number of at least 0"),
        ({"top_p": float("nan")}, "top_p is nan, expected a number of at least 0"),
        ({"top_p": [0.9]}, "top_p is [0.9], expected a number of at least 0"),
    ],
)
def test_sampling_defaults_that_cannot_be(generation: dict[str, Any], sentence: str):
    with pytest.raises(InputError) as error:
        ModelConfig.from_dict(raw(), generation=generation)
    assert sentence in str(error.value)


def test_what_is_not_applied_is_said():
    applied = {"repetition_penalty": 1.0, "num_beams": 1, "min_p": 0.0, "bad_words_ids": None, "max_length": 20}
    assert ModelConfig.from_dict(raw(), generation=applied | {"transformers_version": "5.12.0"}).notes == ()
    generation = {"min_p": 0.05, "repetition_penalty": 1.1, "max_new_tokens": 2048, "stop_strings": ["END"]}
    notes = ModelConfig.from_dict(raw(), generation=generation).notes
    assert len(notes) == 4
    assert "generation_config.json: repetition_penalty is 1.1, which is not applied" in notes


@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["temperature", "top_p", "top_k", "do_sample", "eos_token_id", "min_p", "stop_strings"]),
        st.none() | st.booleans() | st.integers(-3, 400) | st.floats() | st.text(max_size=3) | st.lists(st.integers()),
    )
)
def test_any_generation_config_is_read_or_refused(generation: dict[str, Any]):
    try:
        config = ModelConfig.from_dict(raw(), generation=generation)
    except InputError as error:
        sentence, config = str(error), None
    if config is None:
        assert len(sentence.splitlines()) == 1
        return
    assert config.temperature >= 0
    assert 0 < config.top_p <= 1
    assert config.top_k >= 0
    assert all(eos < config.vocab_size for eos in config.eos_token_ids)
    again = ModelConfig.from_dict(config.to_dict(), generation=config.generation_dict())
    assert again == config


# Everything else.


def test_extras_of_another_writer_are_accepted():
    # What NVIDIA's re-export adds and drops.
    extras: dict[str, Any] = {"bos_token_id": 0, "mlp_bias": False, "num_experts": 8, "moe_router_dtype": ABSENT}
    assert read(**extras, layer_types=["deepseek_sparse_attention"] * 7) == read()
    assert read(num_experts=8, n_routed_experts=ABSENT) == read(num_local_experts=8, n_routed_experts=ABSENT) == read()
    assert read(**extras, layer_types=["deepseek_sparse_attention"] * 7).notes == ()
    assert read(**extras, layer_types=["indexed_attention"] * 7).notes == ()
    assert read(hidden_size=64.0, torch_dtype="torch.bfloat16", dtype=ABSENT) == read()


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"head_dim": 100}, "head_dim is 100, which is not used: a head has 24 + 16 dimensions"),
        ({"moe_router_dtype": "bfloat16"}, "moe_router_dtype is 'bfloat16', but the router is always computed in"),
        ({"layer_types": ["full_attention"] * 7}, "layer_types is ['full_attention', "),
        ({"torch_dtype": "float16"}, "dtype is bfloat16 and torch_dtype is float16; dtype, the newer name, is taken"),
        ({"pad_token_id": 320}, "pad_token_id is 320, but the vocabulary has 320 tokens; it is not used"),
    ],
)
def test_what_says_otherwise_and_is_not_used_is_noted(changes: dict[str, Any], note: str):
    (found,) = read(**changes).notes
    assert found.startswith(f"config.json: {note}")


@pytest.mark.parametrize("interleave", [True, False])
def test_the_rotary_layout_of_the_indexer(interleave: bool):
    assert read(indexer_rope_interleave=interleave).indexer_rope_interleave is interleave
    assert read(indexer_rope_interleave=ABSENT).indexer_rope_interleave is True
    assert read(rope_interleave=ABSENT).rope_interleave is True


def test_an_epsilon_of_the_latent_norms():
    assert read(rms_norm_eps=1e-4).latent_norm_eps == 1e-4
    assert read(latent_norm_eps=1e-6).latent_norm_eps == 1e-6


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"model_type": "deepseek_v32"}, ["model_type is 'deepseek_v32', but this model needs 'glm_moe_dsa'"]),
        ({"scoring_func": "softmax"}, ["scoring_func is 'softmax'"]),
        ({"topk_method": "greedy"}, ["topk_method is 'greedy'"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'"]),
        ({"mlp_bias": True}, ["mlp_bias is True"]),
        ({"tie_word_embeddings": True}, ["tie_word_embeddings is True"]),
        ({"moe_layer_freq": 2}, ["moe_layer_freq is 2"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads is 1, but this model needs 4"]),
        ({"num_experts": 16}, ["num_experts is 16 but n_routed_experts is 8"]),
        ({"num_local_experts": 16}, ["num_local_experts is 16 but n_routed_experts is 8"]),
        ({"torch_dtype": "int8"}, ["dtype is 'int8', expected bfloat16, float16 or float32"]),
        ({"n_routed_experts": ABSENT}, ["n_routed_experts is missing"]),
        ({"vocab_size": ABSENT}, ["vocab_size is missing"]),
        ({"hidden_size": "64"}, ["hidden_size is '64', expected an integer of at least 1"]),
        ({"hidden_size": 64.5}, ["hidden_size is 64.5, expected an integer of at least 1"]),
        ({"hidden_size": True}, ["hidden_size is True, expected an integer"]),
        ({"hidden_size": 0}, ["hidden_size is 0, expected an integer of at least 1"]),
        ({"hidden_size": 2**31}, ["hidden_size is 2147483648, expected at most 2147483647"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers is 1000000000000, expected at most 10000"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob is 1, expected true or false"]),
        ({"rms_norm_eps": -1e-5}, ["rms_norm_eps is -1e-05, expected a positive number"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps is '1e-5', expected a positive number"]),
        ({"dtype": "int8"}, ["dtype is 'int8', expected bfloat16, float16 or float32"]),
        ({"dtype": ["float32"]}, ["dtype is ['float32'], expected"]),
        ({"pad_token_id": -1}, ["pad_token_id is -1, expected an integer of at least 0"]),
        ({"qk_rope_head_dim": 15, "qk_head_dim": ABSENT}, ["qk_rope_head_dim is 15, expected an even number"]),
        ({"index_head_dim": 8}, ["index_head_dim is 8, less than the 16 dimensions"]),
        ({"num_nextn_predict_layers": 2}, ["num_nextn_predict_layers is 2, expected 0 or 1"]),
        ({"num_nextn_predict_layers": 10**9}, ["num_nextn_predict_layers is 1000000000, expected 0 or 1"]),
        ({"n_group": 3}, ["n_group is 3, which does not divide n_routed_experts 8"]),
        ({"topk_group": 2}, ["topk_group is 2, more than the 1 groups"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok is 9, but a token may use 8 experts"]),
        ({"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3}, ["but a token may use 2 experts"]),
        ({"n_group": 8, "topk_group": 8}, ["n_group leaves one expert a group"]),
        ({"quantization_config": "fp8"}, ["quantization_config is 'fp8', expected an object"]),
        ({"hidden_size": "x" * 10_000}, ["hidden_size is 'xxx", "..., expected an integer"]),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], fragments: list[str]):
    refused(changes, *fragments)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(field=st.sampled_from(sorted(PUBLISHED)), value=ANYTHING | st.integers(10**9, 10**30))
def test_any_value_of_any_field_is_read_or_refused(field: str, value: Any):
    sentence = refusal({field: value})
    if sentence is not None:
        assert sentence.startswith("config.json: ")
        assert len(sentence.splitlines()) == 1


def test_one_reader_of_the_file():
    # A second reader of config.json would fall for what the first one knows, such as the stray head_dim.
    root = Path(__file__).parents[1]
    fields = ('"head_dim"', '"rope_parameters"', '"torch_dtype"', '"num_experts"')
    readers = {
        path.name
        for package in ("glm52_jax", "infer", "sharding", "train")
        for path in (root / package).rglob("*.py")
        if any(field in path.read_text(encoding="utf-8") for field in fields)
    }
    # The last one hands the fields on to another reader, which has names of its own for some.
    assert readers == {"config_json.py", "released.py", "layer_reference.py"}
