"""The files of a config: quantisation lists, damaged JSON, the built-in models, and writing it all back."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm52_jax.config import BUILT_IN, ModelConfig, QuantizationConfig, load_config
from glm52_jax.io.json_fields import read_json
from sharding.errors import InputError
from tests.published_config import ABSENT, PLAN, PUBLISHED, F, S, no_plan, raw, read, refused

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


# Quantisation.


def quantization(**changes: Any) -> dict[str, Any]:
    fields = FP8 | {"modules_to_not_convert": ["lm_head"]} | changes
    return {"quantization_config": {name: value for name, value in fields.items() if value is not ABSENT}}


def test_quantization():
    assert read(**quantization()).quantization == QuantizationConfig((32, 32), ("lm_head",))
    assert read(**quantization(modules_to_not_convert=None)).quantization == QuantizationConfig((32, 32))
    assert read(**quantization(fmt="float8_e4m3fn", activation_scheme=ABSENT)).quantization is not None
    assert read(quantization_config=None).quantization is None


O, KV = "model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.kv_b_proj"
EXPERT, INDEXER = "model.layers.3.mlp.experts.1.up_proj", "model.layers.1.self_attn.indexer.wq_b"


def test_lists_of_exceptions_by_other_names():
    for field in ("ignored_layers", "ignore", "exclude_modules", "exclude"):
        found = read(**quantization(modules_to_not_convert=ABSENT, **{field: ["o_proj"]}))
        assert found.quantization == QuantizationConfig((32, 32), ("o_proj",))
        assert found.notes == ()
    both = read(**quantization(modules_to_not_convert=["o_proj", "lm_head"], ignored_layers=["lm_head", "o_proj"]))
    assert both.notes == ()
    differing = read(**quantization(modules_to_not_convert=["o_proj"], ignored_layers=["lm_head"]))
    assert differing.notes == (
        "config.json: quantization_config: modules_to_not_convert and ignored_layers differ, and what either excepts "
        "from quantisation is taken as excepted",
    )
    refused(quantization(ignore=["re:["]), "quantization_config: ignore holds 're:[', which is no regular expression")


def test_quantization_aliases_and_repetitions():
    indexer = "model.layers.0.self_attn.indexers_proj"
    listed = quantization(modules_to_not_convert=[indexer, "lm_head"], ignored_layers=["lm_head", "model.norm"])
    found = read(**listed).quantization
    assert found is not None
    assert found.high_precision == ("model.layers.0.self_attn.indexer.weights_proj", "lm_head", "model.norm")
    assert found.keeps_high_precision("model.layers.0.self_attn.indexer.weights_proj")
    assert not found.keeps_high_precision("model.layers.1.self_attn.indexer.weights_proj")


@pytest.mark.parametrize(
    ("entry", "kept", "converted"),
    [
        ("lm_head", ["lm_head", "model.lm_head"], ["lm_head2", "lm_head_norm"]),
        ("model.layers.1", ["model.layers.1", "model.layers.1.mlp.gate_proj"], ["model.layers.10.mlp.gate_proj"]),
        ("model.layers.1.mlp.gate", ["model.layers.1.mlp.gate"], ["model.layers.1.mlp.gate_proj"]),
        ("*.mlp.gate", ["model.layers.1.mlp.gate"], ["model.layers.1.mlp.gate_proj"]),
        ("*indexer*", ["a.self_attn.indexer.wk"], ["a.self_attn.wk"]),
        # From the start of the name, not to its end: what `re.match` does in compressed-tensors.
        ("re:.*\\.q_[ab]_proj", ["a.q_a_proj", "a.q_b_proj", "a.q_a_proj.more"], ["a.q_c_proj", "q_a_proj"]),
        ("a.b*c", ["a.bxc"], ["aXbxc"]),
        # By the end of the name, or from any dot on.
        ("o_proj", [O], [KV, EXPERT, INDEXER]),
        ("self_attn.o_proj", [O], [KV, EXPERT, INDEXER]),
        ("layers.1.self_attn.o_proj", [O], [O.replace("1", "11"), KV]),
        ("model.layers.1.self_attn.o_proj.weight", [O], [KV]),
        ("b_proj", [KV], [O, INDEXER]),  # transformers: `name.endswith`
        ("self_attn", [O, KV, INDEXER], [EXPERT]),
        ("layers.1", [O, KV], [O.replace("1", "11")]),
        ("mlp.experts", [EXPERT], ["model.layers.3.mlp.shared_experts.up_proj", O]),
        ("gate", ["model.layers.3.mlp.gate"], ["model.layers.3.mlp.gate_proj"]),
        # Regular expressions, with their mark and without.
        ("o_proj$", [O], [KV, EXPERT]),
        ("self_attn.o_proj$", [O], [KV]),
        (".*o_proj$", [O], [KV]),
        (r".*\.o_proj$", [O], [KV]),
        (r"model\.layers\.1\.self_attn\.o_proj$", [O], [O.replace("1", "11"), KV]),
        ("^model.layers.1.self_attn.o_proj$", [O], [KV]),
        ("model.layers.[0-9]+.self_attn.(o|kv_b)_proj", [O, KV], [EXPERT]),
        (r".*mlp\.gate$", ["model.layers.3.mlp.gate"], ["model.layers.3.mlp.gate_proj"]),
        ("layers.*.o_proj", [O], [KV]),
        (r"re:.*o_proj$", [O], [KV]),
        (r"re:.*self_attn", [O, KV, INDEXER], [EXPERT]),
        (r"re:model\.layers\.1\.", [O, KV], [EXPERT]),
        (r"re:layers\.1\.self_attn\.o_proj", [O], [KV]),
        (r"re:o_proj$", [], [O, KV]),
        # Globs.
        ("*o_proj", [O], [KV]),
        ("mlp.experts.*", [EXPERT], [O]),
        (".*o_proj", [O], [KV]),
        ("*.self_attn.*", [O, KV, INDEXER], [EXPERT]),
        ("model.layers.1.*", [O, KV], [O.replace("1", "11"), EXPERT]),
        ("layers.*.self_attn.o_proj", [O], [KV]),
        ("*", [O, KV, EXPERT], []),
        # What means nothing excepts nothing.
        ("", [], [O, KV, EXPERT]),
        (".", [], [O, KV, EXPERT]),
        ("(o_proj", [], [O, KV, EXPERT]),
        ("Linear", [], [O, KV, EXPERT]),
    ],
)
def test_quantization_patterns(entry: str, kept: list[str], converted: list[str]):
    found = QuantizationConfig((128, 128), (entry,))
    assert all(found.keeps_high_precision(module) for module in kept)
    assert not any(found.keeps_high_precision(module) for module in converted)


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"quant_method": ABSENT}, ["quantization_config: quant_method is missing"]),
        ({"quant_method": "modelopt"}, ["quant_method is 'modelopt', but this model needs 'fp8'"]),
        ({"fmt": "e5m2"}, ["fmt is 'e5m2', but this model needs 'e4m3'"]),
        ({"activation_scheme": "static"}, ["activation_scheme is 'static'"]),
        ({"weight_block_size": ABSENT}, ["weight_block_size is None, expected two block sizes such as [128, 128]"]),
        ({"weight_block_size": 128}, ["weight_block_size is 128, expected two"]),
        ({"weight_block_size": [128]}, ["weight_block_size is [128], expected two"]),
        ({"weight_block_size": [0, 128]}, ["expected two block sizes"]),
        ({"weight_block_size": [True, 128]}, ["expected two block sizes"]),
        ({"modules_to_not_convert": "lm_head"}, ["modules_to_not_convert is 'lm_head', expected a list of names"]),
        ({"modules_to_not_convert": [3]}, ["modules_to_not_convert is [3], expected a list of names"]),
        ({"ignored_layers": {}}, ["ignored_layers is {}, expected a list of names"]),
        ({"modules_to_not_convert": ["re:("]}, ["modules_to_not_convert holds 're:(', which is no regular expression"]),
    ],
)
def test_quantization_that_cannot_be(changes: dict[str, Any], fragments: list[str]):
    refused(quantization(**changes), "quantization_config: ", *fragments)


# Files.


def test_a_folder_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "config.json").write_text(json.dumps(raw()))
    assert load_config(tmp_path) == load_config(tmp_path / "config.json") == read()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3, "temperature": 0.5, "top_p": 0.95}')
    config = load_config(str(tmp_path))
    assert (config.eos_token_ids, config.temperature, config.top_p) == ((314, 315, 319, 3), 0.5, 0.95)
    # A folder of the name of a built-in config wins.
    (tmp_path / "glm-5.2").mkdir()
    (tmp_path / "glm-5.2/config.json").write_text(json.dumps(raw()))
    monkeypatch.chdir(tmp_path)
    assert load_config("glm-5.2") == read()
    assert load_config("glm-5.1") == BUILT_IN["glm-5.1"]


def test_neither_a_folder_nor_a_name(tmp_path: Path):
    with pytest.raises(InputError, match=r"nothing: neither a checkpoint folder nor one of the built-in names glm-5.2"):
        load_config(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"config.json: no such file; a checkpoint folder needs it"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"null", "holds a JSON NoneType, expected an object"),
        (b'{"a": "\xff"}', "cannot be read"),
        (b'{"vocab_size": 3, "vocab_size": 4}', "'vocab_size' is in one object twice"),
        (b'{"rope_parameters": {"rope_theta": 3, "rope_theta": 4}}', "'rope_theta' is in one object twice"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"vocab_size": ' + b"1" * 5000 + b"}", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_config(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "config.json").write_bytes(content)
    for reader in (load_config, lambda folder: read_json(folder / "config.json")):
        with pytest.raises(InputError) as error:
            reader(tmp_path)
        assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_the_file_is_named_in_what_it_contradicts(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(raw(n_group=3)))
    with pytest.raises(InputError, match=rf"^{tmp_path}/config.json: n_group is 3"):
        load_config(tmp_path)


# Built-in configs.


def test_the_released_models():
    full = (0, 1, 2, *range(6, 78, 4))
    assert len(full) == 21
    for name in ("glm-5.2", "glm-5.2-fp8"):
        config = BUILT_IN[name]
        assert config.full_layers == full
        assert (config.max_position_embeddings, config.rope_theta) == (1048576, 8e6)
        assert config.index_share_for_mtp_iteration
    for name in ("glm-5.1", "glm-5"):
        config = BUILT_IN[name]
        assert config.full_layers == tuple(range(78))
        assert (config.max_position_embeddings, config.rope_theta) == (202752, 1e6)
        assert not config.index_share_for_mtp_iteration
    for name in ("glm-5.2", "glm-5.2-fp8", "glm-5.1", "glm-5"):
        config = BUILT_IN[name]
        assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (154880, 6144, 78)
        assert (config.num_attention_heads, config.qk_head_dim, config.v_head_dim) == (64, 256, 256)
        assert (config.q_lora_rank, config.kv_lora_rank, config.latent_width) == (2048, 512, 576)
        assert (config.n_routed_experts, config.num_experts_per_tok, config.n_shared_experts) == (256, 8, 1)
        assert (config.intermediate_size, config.moe_intermediate_size) == (12288, 2048)
        assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (32, 128, 2048)
        assert config.mlp_layer_types == ("dense",) * 3 + ("sparse",) * 75
        assert (config.routed_scaling_factor, config.norm_topk_prob, config.rms_norm_eps) == (2.5, True, 1e-5)
        assert (config.eos_token_ids, config.pad_token_id) == ((154820, 154827, 154829), 154820)
        assert (config.temperature, config.top_p, config.has_mtp) == (1.0, 0.95, True)
        assert config.rope_interleave
        assert config.indexer_rope_interleave
    assert BUILT_IN["glm-5.2-fp8"].quantization == QuantizationConfig((128, 128))


def test_the_tiny_model_has_every_kind_of_layer():
    config = BUILT_IN["glm-5.2-tiny"]
    assert set(config.indexer_types) == {F, S}
    assert set(config.mlp_layer_types) == {"dense", "sparse"}
    assert config.has_mtp


# Writing.


def there_and_back(config: ModelConfig) -> ModelConfig:
    texts = json.dumps(config.to_dict()), json.dumps(config.generation_dict())
    return ModelConfig.from_dict(json.loads(texts[0]), generation=json.loads(texts[1]))


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_configs_there_and_back(name: str):
    assert there_and_back(BUILT_IN[name]) == BUILT_IN[name]


def test_the_published_names_are_written():
    written = read(**quantization()).to_dict()
    theirs = PUBLISHED.keys() - {"head_dim", "ep_size", "pretraining_tp", "transformers_version", "index_topk_pattern"}
    assert written.keys() == theirs | {"quantization_config"}
    for name in theirs:
        assert written[name] == PUBLISHED[name], name
    assert written["quantization_config"] == quantization()["quantization_config"]


@pytest.mark.parametrize(
    ("types", "written"),
    [
        (PLAN, {"index_topk_freq": 4, "index_skip_topk_offset": 3}),
        ([F] * 7, {}),
        ([F, S, S, S, S, S, S], {"index_topk_freq": 7, "index_skip_topk_offset": 1}),
        ([F, F, S, F, F, S, F], {"index_topk_pattern": "FFSFFSF"}),
    ],
)
def test_the_plan_is_written_for_readers_of_a_schedule_too(types: list[str], written: dict[str, Any]):
    fields = read(**no_plan(indexer_types=types)).to_dict()
    assert fields["indexer_types"] == types
    assert {name: value for name, value in fields.items() if name.startswith("index_") and name in written} == written
    assert not (fields.keys() & {"index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"}) - written.keys()
    assert read(**no_plan(**written)).indexer_types == tuple(types)


def test_only_what_differs_is_written():
    assert "latent_norm_eps" not in read().to_dict()
    assert read(latent_norm_eps=1e-6).to_dict()["latent_norm_eps"] == 1e-6
    irregular = read(first_k_dense_replace=ABSENT, mlp_layer_types=["sparse", "dense"] * 3 + ["sparse"]).to_dict()
    assert not irregular.keys() & {"first_k_dense_replace", "moe_layer_freq"}
    assert "pad_token_id" not in read(pad_token_id=None).to_dict()
    assert "quantization_config" not in read().to_dict()


SIZES = st.integers(1, 300)
EPSILONS = st.floats(1e-8, 1e-2)


@st.composite
def configs(draw: Callable[..., Any]) -> ModelConfig:
    """Any layer plan with any of the other choices that a config has."""
    layers = draw(st.integers(1, 12))
    rope = 2 * draw(st.integers(1, 20))
    groups = draw(st.sampled_from([1, 2, 4]))
    name = st.text(st.characters(exclude_characters="*", codec="utf-8"), max_size=8).filter(lambda t: t[:3] != "re:")
    quantized = st.builds(
        QuantizationConfig, st.tuples(SIZES, SIZES), st.lists(name, unique=True, max_size=4).map(tuple)
    )
    return dataclasses.replace(
        read(),
        hidden_size=draw(SIZES),
        num_hidden_layers=layers,
        qk_rope_head_dim=rope,
        index_head_dim=rope + draw(st.integers(0, 5)),
        n_group=groups,
        topk_group=draw(st.integers(1, groups)),
        indexer_types=(F, *draw(st.lists(st.sampled_from([F, S]), min_size=layers - 1, max_size=layers - 1))),
        mlp_layer_types=tuple(draw(st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers))),
        rope_theta=draw(st.floats(1, 1e9)),
        norm_topk_prob=draw(st.booleans()),
        rope_interleave=draw(st.booleans()),
        indexer_rope_interleave=draw(st.booleans()),
        rms_norm_eps=draw(EPSILONS),
        latent_norm_eps=draw(EPSILONS),
        attention_bias=draw(st.booleans()),
        num_nextn_predict_layers=draw(st.integers(0, 1)),
        index_share_for_mtp_iteration=draw(st.booleans()),
        eos_token_ids=tuple(draw(st.lists(SIZES, unique=True, max_size=3))),
        pad_token_id=draw(st.none() | SIZES),
        dtype=draw(st.sampled_from(["bfloat16", "float16", "float32"])),
        quantization=draw(st.none() | quantized),
        temperature=draw(st.floats(0, 2)),
        top_k=draw(st.sampled_from([0, 2, 50])),
        top_p=draw(st.floats(0.1, 1)),
    )


@settings(max_examples=200, deadline=None)
@given(config=configs())
def test_any_config_there_and_back(config: ModelConfig):
    assert there_and_back(config) == config
