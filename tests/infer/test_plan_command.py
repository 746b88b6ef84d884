"""`glm52 plan` with a stand-in for the compiler: padding, sweeps, pictures, stored plans, chips of one's own."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from glm52_jax.config import load_config
from infer.planning import stored_plans
from infer.planning.command import plan
from infer.planning.lower_bounds import LowerBound
from infer.planning.request import PlanRequest, plan_request
from infer.planning.slice_plan import SlicePlan, analytic_plan
from infer.planning.sweep import layouts, names
from sharding.compiler import chips
from sharding.compiler.topology import NoCompilerError, Topology
from sharding.errors import InputError
from sharding.layout import Layout
from tests.infer.test_plan import SMALL
from tests.needs import needs_libtpu, package

MODEL = ("glm-5.2-fp8", "--topology", "v5p:4x4x4", "--context", "32k")
SIZES = ("expert=64", "expert=32,tensor=2")


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[PlanRequest]:
    """Plans are made as if compiled, with a floor of 10 ms for 64 rows; the requests of those that were."""
    asked: list[PlanRequest] = []

    def compile_plan(one: PlanRequest) -> SlicePlan:
        asked.append(one)
        seconds = 0.002 + one.batch / 8000
        rate = one.tokens / seconds / one.layout.devices
        made = analytic_plan(one, "a test")
        memory = made.memory | {"temporaries": 0, "total": made.account.total}
        found = [LowerBound("HBM", seconds, "a test")]
        parts = {
            "floors": found,
            "tokens_per_second_per_device": rate,
            "memory": memory,
            "warnings": made.warnings[:-1],
        }
        return dataclasses.replace(
            made, compiled=True, seconds={"lower": 1.0, "compile": 31.0}, made="2026-11-30T12:00:00+00:00", **parts
        )

    monkeypatch.setattr(stored_plans, "_version", lambda name: "1")
    monkeypatch.setattr(stored_plans, "compile_plan", compile_plan)
    return asked


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(plan, list(arguments))


def found(*arguments: str) -> list[dict[str, Any]]:
    result = invoke(*arguments, "--json")
    assert result.exit_code in (0, 1), result.exception
    return json.loads(result.stdout)


# Padding


def test_rates_count_sequences_and_not_what_fills_the_batch_up(compiled: list[PlanRequest]) -> None:
    (one,), (full,) = (found(*MODEL, "--layout", "expert=64", "--batch", batch) for batch in ("1", "64"))
    assert {name: one["request"][name] for name in ("batch", "sequences", "padding", "tokens")} == {
        "batch": 64,
        "sequences": 1,
        "padding": 63,
        "tokens": 1,
    }
    assert one["tokens_per_second_per_device"] == pytest.approx(1 / 0.01 / 64)
    assert full["tokens_per_second_per_device"] == pytest.approx(64 / 0.01 / 64)
    note = "1 sequence is filled up to a batch of 64, a multiple of the 64 devices that share it"
    assert any(note in warning for warning in one["warnings"])
    assert full["request"]["padding"] == 0
    assert not any("filled up" in warning for warning in full["warnings"])
    text = invoke(*MODEL, "--layout", "expert=64", "--batch", "1").stdout
    assert f"note: {note}" in text
    assert "batch 64 (1 of them sequences)" in text
    assert "at most 1.6 tokens a second and chip" in text


@pytest.mark.parametrize("step", ["decode", "verify", "prefill"])
def test_tokens_of_every_step_are_those_of_sequences(step: str) -> None:
    asked = plan_request(load_config("glm-5.2-fp8"), "v5p:4x4x4", "expert=64", step, batch=3, context=32768)
    assert (asked.batch, asked.sequences, asked.tokens) == (64, 3, 3 * (4096 if step == "prefill" else 1))


def test_sweeps_rank_by_tokens_of_sequences(compiled: list[PlanRequest]) -> None:
    """Two prompts on 64 devices that each take a row: more rows a second than on 8, and fewer sequences."""
    lists = ("--layout", "expert=64;expert=8,tensor=8;expert=16,tensor=4", "--sweep")
    made = found(*MODEL, *lists, "--batch", "2")
    assert [one["request"]["expert"] for one in made] == [8, 16, 64]
    rates = [one["tokens_per_second_per_device"] for one in made]
    assert rates[0] == pytest.approx(2 / 0.003 / 64)
    assert rates == sorted(rates, reverse=True)
    rows = [one["request"]["batch"] / one["floors"][0]["seconds"] for one in made]
    assert rows == sorted(rows)
    table = invoke(*MODEL, *lists, "--batch", "2").stdout
    assert "2 of 64" in table
    assert "one row is a sequence" in table


def test_the_largest_batch_has_no_padding(compiled: list[PlanRequest]) -> None:
    made = found(*MODEL, "--layout", "expert=64", "--batch", "1", "--fit")
    assert [one["request"]["padding"] for one in made] == [0, 63]


# Lists


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["throughput,expert=16,tensor=4,latency"], ["throughput", "expert=16,tensor=4", "latency"]),
        (["expert=32,tensor=4,expert=64,tensor=2"], ["expert=32,tensor=4", "expert=64,tensor=2"]),
        (["expert=32,tensor=4;data=2,expert=64"], ["expert=32,tensor=4", "data=2,expert=64"]),
        (["expert=32, tensor=4 ; latency"], ["expert=32,tensor=4", "latency"]),
        (["expert=64", "tensor=64"], ["expert=64", "tensor=64"]),
        (["mine.toml,expert=64,a=b.toml"], ["mine.toml", "expert=64", "a=b.toml"]),
        (["latency"], ["latency"]),
        (["expert=4,latency,tensor=4"], ["expert=4", "latency", "tensor=4"]),
        (["expert=4,expert=4"], ["expert=4", "expert=4"]),
    ],
)
def test_lists_of_layouts(texts: list[str], expected: list[str]) -> None:
    assert layouts(texts) == expected


def test_lists_of_slices() -> None:
    assert names(["v5p:4x4x4, v6e:8x8", "v5e:16x16;tpu7x:2x2x4"]) == [
        "v5p:4x4x4",
        "v6e:8x8",
        "v5e:16x16",
        "tpu7x:2x2x4",
    ]


def test_sizes_of_several_layouts_are_swept(compiled: list[PlanRequest]) -> None:
    made = found(*MODEL, "--layout", ",".join(SIZES), "--sweep")
    assert sorted(one["request"]["layout"] for one in made) == sorted(SIZES)


@pytest.mark.parametrize(
    "lists",
    [
        ["--layout", "throughput,latency"],
        ["--layout", ",".join(SIZES)],
        ["--layout", SIZES[0], "--layout", SIZES[1]],
        ["--topology", "v6e:8x8"],
    ],
    ids=" ".join,
)
def test_several_are_for_sweeps_only(lists: list[str], compiled: list[PlanRequest]) -> None:
    result = invoke(*MODEL, *lists)
    assert isinstance(result.exception, InputError)
    assert "several are for --sweep" in str(result.exception)
    assert not compiled


@pytest.mark.parametrize("compiler", [True, False], ids=["libtpu", "bare"])
def test_one_that_is_refused_does_not_end_a_sweep(compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such slice, a layout that does not divide it, one device, and what a compiler may raise."""

    def compile_plan(asked: PlanRequest) -> SlicePlan:
        if asked.topology.name == "v6e:4x8":
            raise RuntimeError("no such topology\nat libtpu.cc")
        return analytic_plan(asked, "a test")

    monkeypatch.setattr(stored_plans, "_version", lambda name: "1" if compiler or name != "libtpu" else None)
    monkeypatch.setattr(stored_plans, "compile_plan", compile_plan)
    arguments = ("glm-5.2-fp8", "--topology", "v5e:1x1,v5p:4x4x5,v6e:4x8,v6e:8x8", "--context", "32k", "--sweep")
    made = found(*arguments)
    planned = [one["request"]["topology"] for one in made if "refused" not in one]
    assert planned == [*([] if compiler else ["v6e:4x8"]), "v6e:8x8", "v5e:1x1"]
    refused = {one["request"]["topology"]: one["refused"] for one in made if "refused" in one}
    assert refused.pop("v5p:4x4x5").startswith("topology 'v5p:4x4x5': no slice of v5p")
    assert refused == ({"v6e:4x8": "RuntimeError: no such topology"} if compiler else {})
    result = invoke(*arguments)
    assert "not planned: v5p:4x4x5, layout throughput: topology 'v5p:4x4x5': no slice of v5p" in result.stderr
    assert "not planned because" in result.stdout
    if compiler:
        assert "not planned: v6e:4x8, layout throughput: RuntimeError: no such topology\n" in result.stderr


def test_a_sweep_of_nothing_but_refusals_is_the_first_of_them() -> None:
    result = invoke("glm-5.2-fp8", "--topology", "v5p:4x4x5,v6e:3x3", "--sweep")
    assert isinstance(result.exception, InputError)
    assert "v5p:4x4x5" in str(result.exception)


# Pictures


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no/such/plans.png", "No such file or directory"),
        ("folder", "expected one of"),
        ("folder.png", "is a folder, expected the name of a file"),
        ("file.txt/plans.png", "Not a directory"),
        ("plans.docx", "the name ends in '.docx', expected one of .png, .pdf, .svg"),
        ("plans", "the name ends in '', expected one of"),
        (f"{'x' * 300}.png", "File name too long"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_compiling(
    name: str, sentence: str, tmp_path: Path, compiled: list[PlanRequest]
) -> None:
    package("matplotlib")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file.txt").write_text("")
    result = invoke(*MODEL, "--plot", str(tmp_path / name))
    assert isinstance(result.exception, InputError), result.exception
    assert sentence in str(result.exception)
    assert not compiled


def test_a_picture_is_there_whole(tmp_path: Path, compiled: list[PlanRequest]) -> None:
    package("matplotlib")
    path = tmp_path / "plans.PNG"
    assert invoke(*MODEL, "--layout", ";".join(SIZES), "--sweep", "--plot", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [other.name for other in tmp_path.iterdir() if ".part" in other.name] == []


# Stored plans


def small(**changes: Any) -> PlanRequest:
    options: dict[str, Any] = {"batch": 64, "context": 32768, "layout": "expert=64"} | changes
    return plan_request(load_config("glm-5.2-fp8"), "v5p:4x4x4", **options)


def test_plans_are_stored_by_what_they_are_made_of(
    compiled: list[PlanRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = stored_plans.stored_plan(small()), stored_plans.stored_plan(small())
    assert first == second
    assert (first.stored, second.stored) == (False, True)
    assert len(compiled) == 1
    stored_plans.stored_plan(small(batch=128))
    stored_plans.stored_plan(small(), fresh=True)
    monkeypatch.setattr(stored_plans, "_code", lambda: "other")
    stored_plans.stored_plan(small())
    assert len(compiled) == 4


def test_another_name_of_the_same_layout_is_the_same_plan(compiled: list[PlanRequest]) -> None:
    same = [
        "expert=64",
        "data=1,expert=64,tensor=1",
        Layout(expert=64, name="mine"),
        # A rule for an axis of one device divides nothing, and the order of rules is none of the program's.
        dataclasses.replace(Layout(expert=64).with_rules(embed=("tensor",)), rules=Layout().rules[::-1]),
    ]
    made = [stored_plans.stored_plan(small(layout=layout)) for layout in same]
    assert len(compiled) == 1
    assert [one.request["layout"] for one in made] == ["expert=64", "data=1,expert=64,tensor=1", "mine", "custom"]
    for other in (small(layout="expert=32,tensor=2"), small(halves=True), small(batch=63), small(kv="fp8")):
        stored_plans.stored_plan(other)
    assert len(compiled) == 5


def test_a_stored_plan_says_that_it_is_and_when_it_was_made(compiled: list[PlanRequest]) -> None:
    arguments = (*MODEL, "--layout", "expert=64")
    new, old = invoke(*arguments), invoke(*arguments)
    assert "lowered in 1.0 s, compiled in 31.0 s" in new.stdout
    assert "stored, made on 2026-11-30T12:00:00+00:00: then lowered in 1.0 s and compiled in 31.0 s" in old.stdout
    assert "compiling decode" in new.stderr
    assert "compiling" not in old.stderr
    assert found(*arguments)[0]["stored"] is True


def test_halves_rules_and_kernels_are_in_text_and_json(tmp_path: Path, compiled: list[PlanRequest]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("expert = 32\ntensor = 2\n[rules]\nvocab = []\n")
    arguments = (*MODEL, "--layout", str(file), "--halves", "--kernels", "reference", "--row-copy-ns", "4")
    text, (made,) = invoke(*arguments).stdout, found(*arguments)
    assert "rows exchanged in two halves" in text
    assert "reference kernels" in text
    assert "heads over tensor" in text
    assert "vocab" not in text
    assert made["request"]["halves"] is True
    assert made["request"]["kernels"] == "reference"
    assert made["request"]["row_copy_ns"] == 4
    assert made["request"]["rules"]["vocab"] == []
    assert made["request"]["rules"]["heads"] == ["tensor"]


def test_a_fit_says_what_it_compiles(compiled: list[PlanRequest]) -> None:
    lines = invoke(*MODEL, "--layout", "expert=64", "--fit").stderr.splitlines()
    told = [line for line in lines if line.startswith("compiling decode for v5p:4x4x4, expert=64, batch ")]
    assert len(told) == len(compiled) >= 2
    assert sum(line.startswith(("fits, ", "does not fit, ")) for line in lines) == len(compiled)


# What does not fit, and chips of one's own


@pytest.mark.parametrize("batch", [10**4, 10**8, 10**9, 2**31 - 1])
@pytest.mark.parametrize("layout", ["throughput", "latency", "long_context"])
def test_what_the_account_says_does_not_fit_is_not_compiled(
    layout: str, batch: int, compiled: list[PlanRequest]
) -> None:
    result = invoke("glm-5.2-fp8", "--topology", "v5p:4x4x4", "--layout", layout, "--batch", str(batch))
    assert result.exit_code == 1
    assert "does not fit by the account alone" in result.stdout
    assert "note: not compiled: parameters and caches alone take more than a device has" in result.stdout
    assert not compiled


def a_topology(**changes: Any) -> Topology:
    return Topology(dataclasses.replace(chips.V5P, **changes), (2, 2, 1))


def test_a_chip_that_the_compiler_lacks_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_plan(asked: PlanRequest) -> SlicePlan:
        raise NoCompilerError("libtpu has no slice v9x:2x2x1")

    monkeypatch.setattr(stored_plans, "_version", lambda name: "1")
    monkeypatch.setattr(stored_plans, "compile_plan", compile_plan)
    asked = plan_request(SMALL, a_topology(name="v9x"), "expert=4", batch=4, context=1024)
    made = stored_plans.stored_plan(asked)
    assert (made.compiled, made.fits) == (False, True)
    assert "libtpu has no slice v9x:2x2x1; this is the account alone" in made.warnings[-1]


@needs_libtpu
def test_the_compiler_is_asked_for_chips_that_it_has() -> None:
    with pytest.raises(NoCompilerError, match=r"has no slice v9x:2x2x1, so nothing can be compiled for it \(.*v9x\)"):
        a_topology(name="v9x").mesh(Layout(expert=4))
