"""`glm52 verify --layers` finds a difference in the layer and the stage where it arises, and no other."""

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner, Result

from glm52_jax.checkpoint.sources.open_source import open_checkpoint
from glm52_jax.model.decoder_layer import LayerIndex
from glm52_jax.verification import command, layer_stages, layerwise
from glm52_jax.verification.layerwise import StageDifference, differences
from sharding.errors import InputError
from tests import needs
from tests.checkpoint.builders import EXPERTS, MTP_LAYER, Folder, small_config
from tests.checkpoint.conversions import run_convert, run_export

torch = needs.package("torch")
needs.package("transformers")

CASES = Path(__file__).parents[1] / "cases"
TOKENS = 20  # more than the 8 that a query attends to; one number, so that what is compiled is shared


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Products of this size take longer when threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def findings(target: Path, source: Path, layers: tuple[int, ...], tokens: int = TOKENS) -> list[StageDifference]:
    planned = layerwise.plan(open_checkpoint(target), open_checkpoint(source), layers, tokens=tokens)
    # The plain kernels take a third of the time to compile.
    return [finding for found in layerwise.compare(planned, backend="reference") for finding in found]


def first(found: list[StageDifference]) -> tuple[str, str] | None:
    """Layer and stage of the first difference beyond rounding."""
    return next(((f.where, f.stage) for f in found if f.beyond), None)


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(command.verify, [str(a) for a in arguments])


@pytest.mark.parametrize(("case", "layers"), [("irregular_plan", (0, 1, 2, 7)), ("fp8", (2, 3, 4))])
def test_the_cases_are_as_transformers_has_them(case: str, layers: tuple[int, ...]):
    """bfloat16 in shards and float8, a dense layer, full and shared ones, and the MTP layer."""
    found = findings(CASES / case, CASES / case, layers)
    assert first(found) is None, [f.sentence for f in found if f.beyond]
    places = [(f.where, f.stage) for f in found]
    assert places[:3] == [("before", "embedding"), ("before", "rotary cosines"), ("before", "rotary sines")]
    assert [stage for where, stage in places if where == "layer 2"][:1] == ["input norm"]
    assert (f"layer {layers[-1]}", "MTP output") == places[-1]
    assert {f.stage for f in found} >= {*layerwise.STAGES}
    assert max(f.share for f in found) > 0  # the two are not one and the same


def added(value: float, *index: int) -> Callable[[np.ndarray], None]:
    def change(values: np.ndarray) -> None:
        values[index] += value

    return change


def scaled(values: np.ndarray) -> None:
    values *= 2


FAULTS: dict[str, tuple[Callable[[np.ndarray], None], str]] = {
    "3.self_attn.o_proj.weight": (added(1, 5, 7), "attention output"),
    "3.self_attn.kv_b_proj.weight": (added(1, 3, 4), "attention output"),
    "3.input_layernorm.weight": (added(0.1, 2), "input norm"),
    "3.post_attention_layernorm.weight": (added(0.1, 2), "post-attention norm"),
    "3.mlp.gate.weight": (added(0.1, 6, 3), "router scores"),
    "3.mlp.gate.e_score_correction_bias": (added(1, 4), "chosen experts"),
    "3.mlp.experts.6.down_proj.weight": (added(1, 9, 2), "MLP output"),
    "3.mlp.experts.1.gate_proj.weight": (added(1, 9, 2), "MLP output"),
    "3.mlp.shared_experts.up_proj.weight": (added(1, 9, 2), "MLP output"),
    "4.self_attn.indexer.wk.weight": (added(1, 9, 2), "index scores"),
    "4.self_attn.indexer.k_norm.bias": (added(0.1, 3), "index scores"),
    "4.self_attn.q_a_layernorm.weight": (scaled, "index scores"),
    f"{MTP_LAYER}.enorm.weight": (added(0.1, 2), "MTP projection"),
    f"{MTP_LAYER}.eh_proj.weight": (added(1, 2, 70), "MTP projection"),
    f"{MTP_LAYER}.self_attn.indexer.weights_proj.weight": (added(1, 2, 3), "index scores"),
    f"{MTP_LAYER}.shared_head.norm.weight": (added(0.1, 2), "MTP output"),
}


RUN = {"3": (1, 3, 4), "4": (4, MTP_LAYER), str(MTP_LAYER): (MTP_LAYER,)}
"""Layer 1 is full, so that the shared layer 3 has a selection; layer 4 and the MTP layer make their own."""


@pytest.mark.parametrize("name", FAULTS)
def test_one_wrong_value_is_found_where_it_is(plain_folder: Folder, plain: Folder, name: str):
    change, stage = FAULTS[name]
    values = plain.tensors()[f"model.layers.{name}"]
    change(values)
    plain.put({f"model.layers.{name}": values})
    layer = name.partition(".")[0]
    found = findings(plain.path, plain_folder.path, RUN[layer])
    assert first(found) == (f"layer {layer}", stage)
    assert {f.where for f in found if f.beyond} == {f"layer {layer}"}  # the others ran on what the reference gave


def test_what_stands_outside_of_the_layers_is_compared_too(plain_folder: Folder, plain: Folder):
    embedding = plain.tensors()["model.embed_tokens.weight"]
    plain.put({"model.embed_tokens.weight": embedding + np.float32(0.01)})
    assert first(findings(plain.path, plain_folder.path, (4, MTP_LAYER))) == ("before", "embedding")
    plain.put({"model.embed_tokens.weight": embedding, "model.norm.weight": plain.tensors()["model.norm.weight"] * 2})
    assert first(findings(plain.path, plain_folder.path, (4, MTP_LAYER))) == (f"layer {MTP_LAYER}", "final norm")


# What a conversion changed on purpose.


@pytest.mark.parametrize(
    ("source", "layers", "settings"),
    [
        ("plain_folder", (1, 3), {"layers": (1, 3)}),
        ("fp8_folder", (4,), {"dtype": "bfloat16"}),
        ("plain_folder", (4,), {"quantize": "fp8"}),
        ("fp8_folder", (4,), {"quantize": "int8"}),
    ],
    ids=["some layers", "dequantised and rounded", "to float8", "from float8 to int8"],
)
def test_what_was_converted_is_as_transformers_has_it(
    source: str, layers: tuple[int, ...], settings: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path
):
    """Weights that the conversion rounds are rounded for the reference too."""
    folder = request.getfixturevalue(source).path
    run_convert(folder, tmp_path / "c", **settings)
    found = findings(tmp_path / "c", folder, layers)
    assert first(found) is None, [f.sentence for f in found if f.beyond]
    if "layers" in settings:
        with pytest.raises(InputError, match=r"--layers names 2, which was not converted to .*c$"):
            findings(tmp_path / "c", folder, (1, 2))


def test_fused_experts_are_read_too(plain_folder: Folder, tmp_path: Path):
    run_export(plain_folder.path, tmp_path / "fused", fused=True)
    assert first(findings(plain_folder.path, tmp_path / "fused", (1, 3, 4, MTP_LAYER))) is None


def test_only_the_experts_in_use_are_read_and_one_at_a_time(plain_folder: Folder):
    """All of a layer of the released model would take 38 GB in float32."""
    source = open_checkpoint(plain_folder.path)
    planned = layerwise.plan(source, source, (1,), tokens=2)
    theirs, read = layerwise.reference(planned), []
    whole = source.pread
    source.pread = lambda name, *rest: (read.append(name), whole(name, *rest))
    stages = theirs.layer(1, theirs.embed(planned.tokens), None)
    experts = {int(name.split(".")[5]) for name in read if ".experts." in name}
    assert experts == set(np.flatnonzero(stages["chosen experts"].any(0)))
    assert len(experts) < EXPERTS


def test_experts_are_not_made_float32_all_at_once():
    """XLA would do so before the loop over them, which takes twice the bytes of the layer."""
    config = small_config(n_routed_experts=64, moe_intermediate_size=512)
    tree: dict[str, Any] = {}
    for param in layer_stages.layer_params(config, 3):
        group, name = param.path.split(".")
        dtype = jnp.float32 if param.float32 else jnp.bfloat16
        tree.setdefault(group, {})[name] = jax.ShapeDtypeStruct((1, *param.shape), dtype)
    stream, mask = jnp.zeros((1, TOKENS, config.hidden_size)), jnp.ones((1, TOKENS, TOKENS), bool)
    run = layer_stages.compiled(layer_stages._layer, "config", "place", "backend")
    made = run.lower(tree, config, LayerIndex(0, False, 0, False, 0), stream, mask, "reference").compile()
    experts = tree["moe"]["gate_up"].size * 2
    assert made.memory_analysis().temp_size_in_bytes < experts / 4


# Choices.


def choices(ours: list[list[int]], theirs: list[list[int]], scores: list[list[float]]) -> list[StageDifference]:
    """Findings of a layer of two tokens whose selection is as given; one of them has another attention output."""
    size = len(scores[0])
    masks = [np.array([[i in row for i in range(size)] for row in rows]) for rows in (ours, theirs)]
    other = np.array([[1.0], [1.0]], np.float32)
    stages = {"index scores": np.array(scores, np.float32), "layer output": other}
    theirs_all = stages | {"selected set": masks[1], "attention output": other}
    ours_all = stages | {"selected set": masks[0], "attention output": other + np.array([[0], [0.5]], np.float32)}
    return list(differences(9, ours_all, theirs_all))


def test_a_near_tie_is_rounding_and_what_follows_from_it_is_left_out():
    found = choices([[0, 1], [0, 2]], [[0, 1], [0, 1]], [[2, 1, 0.5], [2, 1, 0.9999]])
    assert first(found) is None
    (tie,) = [f for f in found if f.stage == "selected set"]
    assert tie.note == "1 of 2 rows differ by near ties and are left out from here on"


def test_another_choice_is_no_rounding():
    found = choices([[0, 1], [0, 2]], [[0, 1], [0, 1]], [[2, 1, 0.5], [2, 1, 0.99]])
    assert first(found) == ("layer 9", "selected set")
    assert found[1].sentence == "layer 9, selected set: 1 of 2 rows differ, 1 of them beyond near ties"
    fewer = choices([[0, 1], [0]], [[0, 1], [0, 1]], [[2, 1, 0.5], [1, 1, 0.5]])
    assert first(fewer) == ("layer 9", "selected set")


def test_what_is_no_number_is_found():
    ones, damaged = np.ones((2, 3), np.float32), np.array([[1, 1, np.nan], [1, 1, 1]], np.float32)
    for ours, theirs in ((damaged, ones), (ones, damaged), (damaged, damaged)):
        (found,) = differences(0, {"layer output": ours}, {"layer output": theirs})
        assert found.beyond


# The command.


def test_the_command(plain_folder: Folder, plain: Folder, tmp_path: Path):
    result = invoke(plain_folder.path, "--against", plain_folder.path, "--layers", "1", "--tokens", TOKENS)
    assert result.exit_code == 0, result.output
    assert "1 layer, 20 tokens, one layer in memory at a time; at most " in result.output
    assert result.output.endswith("layer 1: no difference beyond rounding\n")
    values = plain.tensors()["model.layers.1.self_attn.o_proj.weight"]
    values[1, 2] += 1
    plain.put({"model.layers.1.self_attn.o_proj.weight": values})
    result = invoke(plain.path, "--against", plain_folder.path, "--layers", "1", "--tokens", TOKENS)
    assert result.exit_code == 1
    assert re.search(
        r"^first difference beyond rounding: layer 1, attention output: \|d\| \S+, expected at most ",
        result.stdout,
        re.MULTILINE,
    )


def test_other_shapes_are_found_before_anything_is_run(plain_folder: Folder, fp8_folder: Folder, tmp_path: Path):
    run_convert(fp8_folder.path, tmp_path / "c")
    result = invoke(tmp_path / "c", "--against", plain_folder.path, "--layers", "1")
    assert result.exit_code == 1
    assert "was F8_E4M3 in the source of the conversion, and is F32" in result.output


REFUSED: dict[str, tuple[list[Any], str]] = {
    "a_shared_layer_alone": (
        ["--layers", "2,4"],
        "--layers names 2, which is shared, and no full layer before it to take a selection from, expected 1 or an "
        "earlier one too",
    ),
    "no_such_layer": (["--layers", f"1,{MTP_LAYER + 1}"], f"--layers names 6, but .* has layers 0 to {MTP_LAYER}"),
    "no_numbers": (["--layers", "all"], "--layers is 'all', expected layer numbers and ranges such as 0,3,6-9"),
    "too_many_tokens": (["--layers", "1", "--tokens", "99999999"], "--tokens is 99999999, expected 2 to max_position"),
    "one_token": (["--layers", "1", "--tokens", "1"], "--tokens is 1, expected 2 to"),
    "tokens_alone": (["--tokens", "9"], "--tokens is for --layers, which is not given"),
    "quick_too": (["--layers", "1", "--quick"], "--quick and --layers are given, expected one of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compared_is_refused(plain_folder: Folder, case: str):
    options, sentence = REFUSED[case]
    result = invoke(plain_folder.path, "--against", plain_folder.path, *options)
    assert isinstance(result.exception, InputError)
    with pytest.raises(InputError, match=sentence):
        raise result.exception


def test_a_converted_source_is_refused(fp8_folder: Folder, tmp_path: Path):
    run_convert(fp8_folder.path, tmp_path / "c")
    with pytest.raises(InputError, match="is a converted checkpoint, expected the published one"):
        layerwise.plan(open_checkpoint(fp8_folder.path), open_checkpoint(tmp_path / "c"), (0,))


def test_a_missing_package_is_named(plain_folder: Folder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "glm52_jax.verification.layer_reference", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    result = invoke(plain_folder.path, "--against", plain_folder.path, "--layers", "1")
    assert isinstance(result.exception, InputError)
    assert str(result.exception) == (
        "--layers compares with transformers, but torch cannot be imported: pip install 'glm52-jax[oracle]'"
    )


def test_few_tokens_are_noted(plain_folder: Folder):
    source = open_checkpoint(plain_folder.path)
    planned = layerwise.plan(source, source, (1,), tokens=8)
    assert planned.notes == ("8 tokens are no more than index_topk 8: every position is selected",)
    assert len(layerwise.plan(source, source, (1,)).tokens) == 8 + layerwise.BEYOND
