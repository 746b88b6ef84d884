"""Plans: what is refused before the compiler is loaded, the account beside the compiler's figures, fits, storage."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from glm52_jax.config import ModelConfig, QuantizationConfig, load_config
from infer.planning import stored_plans
from infer.planning.command import plan
from infer.planning.fit import largest_batch, largest_context
from infer.planning.plan import plan as planned_from_python
from infer.planning.request import PlanRequest, describe, plan_request, request_memory
from infer.planning.slice_plan import SlicePlan, analytic_plan, compile_plan
from sharding.compiler import chips
from sharding.errors import InputError
from tests.kernels.quickly import quickly
from tests.model.tiny import tiny
from tests.needs import needs_libtpu

SMALL = tiny(
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=256,
    kv_lora_rank=128,
    q_lora_rank=128,
    qk_nope_head_dim=64,
    qk_rope_head_dim=64,
    v_head_dim=128,
    index_head_dim=128,
    n_routed_experts=16,
    vocab_size=1024,
    index_topk=64,
    dtype="bfloat16",
)


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(plan, list(arguments))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--topology", "v5p:4x4x5"], "the nearest is v5p:4x4x4"),
        (["--topology", "v5q:4x4x4"], "v5p"),
        (["--topology", "v5p:4x4x4", "--layout", "expert=3,tensor=4"], "expected 64: for example with expert=16"),
        (["--topology", "v5p:4x4x4", "--layout", "thruput"], "did you mean throughput?"),
        (["--topology", "v5p:4x4x4", "--layout", "expert=1,tensor=64,data=1"], "does not divide|would cut"),
        (["--topology", "v5p:4x4x4", "--context", "2m"], "expected 1 to 1048576"),
        (["--topology", "v5p:4x4x4", "--kernels", "cuda"], "'cuda' is not one of"),
    ],
)
def test_nonsense_is_refused_at_once(options: list[str], sentence: str) -> None:
    load_config("glm-5.2-fp8")
    begin = time.monotonic()
    result = invoke("glm-5.2-fp8", *options)
    assert time.monotonic() - begin < 2
    assert isinstance(result.exception, InputError), result.output
    assert any(part in str(result.exception) for part in sentence.split("|")), str(result.exception)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 0}, "batch is 0, expected an integer from 1 to 2147483647"),
        ({"batch": -3}, "batch is -3"),
        ({"batch": 2.0}, "batch is 2.0, expected an integer"),
        ({"batch": True}, "batch is True"),
        ({"batch": 10**12}, "batch is 1000000000000"),
        ({"context": 0}, "context is 0"),
        ({"context": "128k"}, "context is '128k'"),
        ({"context": 2**21}, "expected 1 to 1048576, the model's max_position_embeddings"),
        ({"step": "train"}, "step is 'train', expected decode, verify, prefill"),
        ({"step": "prefill", "chunk": 0}, "chunk is 0"),
        ({"step": "prefill", "chunk": 2048, "context": 1024}, "chunk is 2048, expected at most the context, 1024"),
        ({"step": "verify", "draft_tokens": 0}, "draft_tokens is 0, expected an integer from 1 to 7"),
        ({"step": "verify", "draft_tokens": 8}, "draft_tokens is 8"),
        ({"step": "verify", "context": 3}, "context is 3, expected more than the 3 draft tokens"),
        ({"kv": "int4"}, "kv is 'int4', expected plain or fp8 or fp8-tensor"),
        ({"kv": ["fp8"]}, "kv is ['fp8']"),
        ({"kernels": "cuda"}, "kernels: 'cuda' is not one of reference, cpu, tpu"),
        ({"kernels": "interpret"}, "kernels: 'interpret' is not one of"),
        ({"halves": 1}, "halves is 1, expected True or False"),
        ({"layout": None}, "topology and layout are"),
        *(
            ({"row_copy_ns": cost}, f"row_copy_ns is {cost!r}, expected a positive, finite number")
            for cost in (float("nan"), float("inf"), float("-inf"), -3.0, 0, "4", True)
        ),
    ],
    ids=repr,
)
@pytest.mark.parametrize("compiler", [True, False], ids=["libtpu", "bare"])
def test_every_argument_is_checked_with_and_without_libtpu(
    options: dict[str, Any], sentence: str, compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(asked: PlanRequest, *_: Any) -> SlicePlan:
        raise AssertionError("planned")

    monkeypatch.setattr(stored_plans, "_version", lambda name: "1" if compiler or name != "libtpu" else None)
    monkeypatch.setattr(stored_plans, "compile_plan", never)
    monkeypatch.setattr(stored_plans, "analytic_plan", never)
    with pytest.raises(InputError) as error:
        planned_from_python(load_config("glm-5.2-fp8"), "v5p:4x4x4", **{"context": 32 * 1024} | options)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_chunk_that_is_not_given_is_no_longer_than_the_context() -> None:
    config = load_config("glm-5.2-fp8")
    chunks = [plan_request(config, "v5p:4x4x4", step="prefill", context=context).chunk for context in (960, 131072)]
    assert chunks == [960, 4096]


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = invoke(str(tmp_path), "--topology", "v5p:4x4x4")
    assert isinstance(result.exception, InputError)


@pytest.mark.parametrize("chip", quickly(chips.CHIPS, "v5e", "v5p", "v6e"))
def test_every_listed_slice_can_be_asked_for(chip: str) -> None:
    """And is accounted for, or refused in a sentence where the model cannot be divided among so many devices."""
    for shape in chips.slice_shapes(chip):
        name = f"{chip}:{'x'.join(map(str, shape))}"
        refusal = ""
        try:
            asked = plan_request(SMALL, name, batch=2, context=192)
        except InputError as error:
            refusal = str(error)
        assert "\n" not in refusal
        if not refusal:
            assert asked.layout.devices == asked.topology.device_count
            assert request_memory(asked).total > 0


@needs_libtpu
@pytest.mark.parametrize("options", [{"batch": 2, "context": 192}, {"step": "prefill", "chunk": 64, "context": 64}])
def test_a_slice_of_one_device_is_compiled(options: dict[str, Any]) -> None:
    """Its caches are those of a TPU, in whole lanes, though JAX's own device is a CPU."""
    asked = plan_request(SMALL, "v5e:1x1", **options)
    made = compile_plan(asked)
    assert made.fits
    assert {kernel["name"] for kernel in made.kernels} >= {"cache_write", "dense_mla", "experts_few"}
    assert 0 <= made.memory["arguments"] - made.account.total < 0.01 * made.account.total


@pytest.mark.parametrize(
    ("model", "topology", "layout"),
    [
        ("glm-5.2-fp8", "v6e:8x8", "throughput"),
        ("glm-5.2-fp8", "v5p:4x4x4", "throughput"),
        ("glm-5.2-fp8", "tpu7x:2x2x4", "throughput"),
        ("glm-5.2-fp8", "v5e:16x16", "throughput"),
        ("glm-5.2-fp8", "v5p:4x4x4", "latency"),
        ("glm-5.2", "v5p:4x4x8", "long_context"),
        ("glm-5.2-fp8", "2xv6e:16x16", "throughput"),
    ],
)
def test_presets_fit_the_released_model(model: str, topology: str, layout: str) -> None:
    """By the account: it needs no compiler."""
    asked = plan_request(load_config(model), topology, layout, batch=64, context=32 * 1024)
    assert request_memory(asked).total < 0.9 * asked.topology.chip.hbm_bytes
    assert asked.batch % asked.layout.parts("batch") == 0
    made = analytic_plan(asked, "no compiler")
    assert made.fits
    assert not made.compiled


def test_the_account_counts_each_byte_once() -> None:
    """Over all devices, what is divided is there once and what is not is there on each."""
    config = load_config("glm-5.2")
    one = request_memory(plan_request(config, "v5p:4x4x8", "expert=128", batch=128, context=4096))
    assert one.parameters["routed experts"] * 128 == 76 * 256 * 3 * 2048 * 6144 * 2
    assert one.latent == 78 * 4096 * 640 * 2  # padded to whole lanes
    assert one.index_keys == 21 * 4096 * 128 * 2  # full layers only
    assert "attention.o" in one.replicated
    assert "moe.down" not in one.replicated
    eight = request_memory(plan_request(config, "v5p:4x4x8", "expert=16,tensor=8", batch=16, context=4096))
    assert "attention.o" not in eight.replicated
    assert eight.latent * 8 == one.latent


def test_index_share_saves_index_keys_only() -> None:
    config = load_config("glm-5.2")
    everywhere = dataclasses.replace(config, indexer_types=("full",) * 78)
    shared, full = (
        request_memory(plan_request(one, "v5p:4x4x8", "expert=128", batch=128, context=32768))
        for one in (config, everywhere)
    )
    assert full.index_keys * 21 == shared.index_keys * 78
    assert full.latent == shared.latent


def small(**changes: Any) -> PlanRequest:
    options = {"batch": 8, "context": 1024} | changes
    config: ModelConfig = options.pop("config", SMALL)
    return plan_request(
        config, "v5e:2x2", options.pop("layout", "expert=2,tensor=2"), options.pop("step", "decode"), **options
    )


@needs_libtpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv": "fp8"},
        {"step": "prefill", "chunk": 128},
        {"step": "verify", "draft_tokens": 2},
        {"config": dataclasses.replace(SMALL, quantization=QuantizationConfig((128, 128)))},
    ],
    ids=["decode", "fp8-cache", "prefill", "verify", "fp8-weights"],
)
def test_the_account_is_the_compilers(changes: dict[str, Any]) -> None:
    asked = small(**changes)
    made = compile_plan(asked)
    assert made.fits
    own, memory = made.account.total, made.memory
    assert own + memory["temporaries"] == pytest.approx(memory["total"], rel=0.02), (own, memory)
    assert {row["kind"] for row in made.collectives}
    assert all(set(row["axes"]) <= {"data", "expert", "tensor"} for row in made.collectives)
    assert made.floors[0].seconds == max(floor.seconds for floor in made.floors) > 0
    assert made.tokens_per_second_per_device == pytest.approx(asked.tokens / made.floors[0].seconds / 4)
    cache = made.account.latent
    copies = [w for w in made.warnings if w.startswith(("copy", "transpose"))]
    assert not copies, copies
    assert memory["temporaries"] < 0.5 * cache or changes
    assert SlicePlan.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_without_libtpu_the_account_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_plans, "_version", lambda name: None if name == "libtpu" else "1")
    made = stored_plans.stored_plan(small())
    assert not made.compiled
    assert "libtpu is not installed (pip install 'glm52-jax[plan]')" in made.warnings[0]
    result = invoke("glm-5.2-fp8", "--topology", "v5p:4x4x4", "--context", "32k")
    assert result.exit_code == 0, result.exception
    assert "by the account alone" in result.stdout


class Compiler:
    """Stands for the compiler: the account, temporaries of its own, and a limit."""

    def __init__(self, limit: float, temporaries: float):
        self.limit, self.temporaries, self.asked = limit, temporaries, []

    def __call__(self, asked: PlanRequest) -> SlicePlan:
        self.asked.append(asked)
        total = int(request_memory(asked).total + self.temporaries * asked.batch)
        made = analytic_plan(asked, "a test")
        memory = {"total": total, "limit": int(self.limit), "free": int(self.limit - total)}
        return dataclasses.replace(made, compiled=True, fits=total <= self.limit, memory=memory)


@pytest.mark.parametrize("temporaries", [0.0, 1e5, 1e7])
def test_the_largest_batch_is_found_in_three_compilations(temporaries: float) -> None:
    asked = small(context=16 * 1024)
    compiler = Compiler(asked.topology.chip.hbm_bytes, temporaries)
    found = largest_batch(asked, compiler)
    assert found.compilations == len(compiler.asked) <= 3
    assert found.plan.fits
    more = dataclasses.replace(asked, batch=int(found.batch * 1.03) // 2 * 2 + 2)
    total = request_memory(more).total + temporaries * more.batch
    assert total > compiler.limit  # within three in a hundred of the largest


def test_the_largest_context_may_be_the_models() -> None:
    asked = small(batch=2)
    found = largest_context(asked, Compiler(asked.topology.chip.hbm_bytes, 0))
    assert found.context == SMALL.max_position_embeddings or not found.plan.fits


def test_nothing_fits() -> None:
    asked = small(context=4096)
    found = largest_batch(asked, Compiler(1.0, 0))
    assert (found.batch, found.plan.fits) == (0, False)


def test_a_request_in_words_names_everything() -> None:
    words = describe(small())
    assert words["expert"] == 2
    assert words["tensor"] == 2
    assert words["chips"] == 4
    assert words["step"] == "decode"
    assert words["full_layers"] == 3
