"""The benchmark of the kernels: floors, the store of figures, tables, and what the grid calls a fault."""

import dataclasses
import types

import pytest

from benchmarks.kernels import catalogue, grid, layer, measure, table, tokens
from benchmarks.kernels.case import OURS, Case
from benchmarks.kernels.catalogue import SWEEP, Entry
from benchmarks.kernels.stats import BYTES, COPIES, FLOPS, CaseStats
from benchmarks.kernels.store import Store
from benchmarks.kernels.work import Job
from infer.generate import _rounded
from sharding.compiler.chips import CHIPS
from sharding.errors import InputError


def _refuses(chip):
    raise ValueError(f"no form for {chip}\nand much more")


CASE = Case("op", "decode b8 128k", OURS, _refuses, hbm_bytes=2765e3, flops=459e6, copies=1000)
MADE = CaseStats("op", "decode b8 128k", OURS, "v5p", measured=True, digest="one", compile_s=1.5, floors={BYTES: 1e-6})
MADE = dataclasses.replace(MADE, estimates={"ideal": 1.2e-6, "cal": 2e-6}, around_s=0.3e-6, bundles=2100)


def test_floors_are_of_all_cores_of_a_device():
    found = measure.floors(CASE, "v5p")
    assert found[BYTES] == pytest.approx(1e-6)
    assert found[FLOPS] == pytest.approx(1e-6)
    assert found[COPIES] == pytest.approx(1000 * 8 / 1.75e9 / 2)
    assert measure.floors(dataclasses.replace(CASE, dtype="f32x6"), "v5p")[FLOPS] == pytest.approx(6e-6)
    assert list(measure.floors(dataclasses.replace(CASE, flops=0, copies=0), "v6e")) == [BYTES]
    assert dataclasses.replace(MADE, floors=found).binds == COPIES


def test_a_case_that_does_not_compile_says_why_in_one_sentence():
    assert measure.compiled(CASE, "v6e").refusal == "no form for v6e"
    error = RuntimeError("INTERNAL: Mosaic failed to compile TPU kernel: Unsupported shape\n\nAt:\n  x.py")
    assert measure.one_sentence(error) == "RuntimeError: Mosaic failed to compile TPU kernel: Unsupported shape"


def test_an_interrupted_run_finds_its_figures_again(tmp_path):
    path = tmp_path / "figures.json"
    Store(path).put(MADE)
    refused = dataclasses.replace(MADE, chip="v6e", refusal="no", copies=("copy",))
    Store(path).put(refused)
    again = Store(path)
    assert again.get(MADE.key, "one") == MADE
    assert again.get(refused.key, "one") == refused
    assert again.get(MADE.key, "two") is None
    assert again.get(dataclasses.replace(MADE, measured=False).key, "one") is None
    keeping = Store(path, keep=True)
    assert keeping.get(MADE.key, "two") == MADE
    assert keeping.get(refused.key, "two") is None
    path.write_text("{}x")
    with pytest.raises(InputError, match="holds no figures"):
        Store(path)


def test_peers_follow_ours_with_their_ratio():
    peer = dataclasses.replace(MADE, form="xla", estimates={"ideal": 3e-6}, around_s=0.0, bundles=0, notes=("a | b",))
    refused = CaseStats("op", "decode b8 128k", "other", "v5p", measured=True, refusal="it does not fit")
    (sheet,) = table.measured([peer, refused, MADE])
    assert [row[2] for row in sheet.rows] == [OURS, "xla", "other"]
    cells = [dict(zip(sheet.columns, row, strict=True)) for row in sheet.rows]
    assert (cells[0]["ideal us"], cells[0]["ratio"], cells[0]["around us"]) == ("1.20", "1.20", "0.300")
    assert cells[1]["to ours"] == "2.00"
    assert cells[2]["notes"] == "refused: it does not fit"
    lines = table.as_markdown(sheet).splitlines()
    assert len({line.replace("\\|", "").count("|") for line in lines[2:7] if line}) == 1


def test_a_sweep_names_the_fastest_blocks():
    slow = dataclasses.replace(MADE, blocks="256", estimates={"ideal": 2e-6})
    refused = CaseStats("op", MADE.shape, OURS, "v5p", blocks="512", refusal="VMEM")
    tried, best = table.sweep([slow, dataclasses.replace(MADE, blocks="128"), refused])
    assert [row[2] for row in tried.rows] == ["128", "256", "512"]
    assert best.rows == (("op, decode b8 128k", "v5p", "128", "1.20", "1.20"),)


def test_the_grid_fails_for_refusals_and_large_copies_of_ours():
    copied = dataclasses.replace(MADE, copied=3 << 20, copies=("copy bf16[9] 3 MiB",), copied_layer=3 << 20)
    refused = dataclasses.replace(MADE, chip="v6e", refusal="no")
    assert grid.fault(MADE) == ""
    assert grid.fault(dataclasses.replace(copied, copied_layer=0)) == ""
    assert grid.fault(copied) == "copies 3 MiB of a stack"
    assert grid.fault(refused) == "does not compile: no"
    assert grid.fault(dataclasses.replace(refused, form="xla")) == ""
    assert grid.fault(dataclasses.replace(refused, fits=False)) == ""
    made, wrong = grid.sheets([copied, refused], ["v5p", "v6e", "v5e"])
    assert made.rows == (("op", "decode b8 128k", OURS, "1.5 s, copies 3 MiB", "refused", "-"),)
    assert len(wrong.rows) == 2


def test_cases_are_found_by_what_modules_define(monkeypatch):
    module = types.ModuleType("op")
    module.cases = lambda: [CASE, dataclasses.replace(CASE, form="xla", measured=False)]
    module.sweep = lambda: [("rows 8", CASE)]
    monkeypatch.setattr(catalogue.importlib, "import_module", lambda name: module)
    assert "__main__" not in catalogue.modules()
    found = catalogue.entries("op")
    assert [entry.number for entry in found] == [0, 1]
    assert catalogue.entries("op", SWEEP) == [Entry("op", SWEEP, 0, CASE, "rows 8")]
    assert len(catalogue.selected(found)) == len(CHIPS)
    assert len(catalogue.selected(found, measured=False)) == 2 * len(CHIPS)
    assert catalogue.selected(found, shape="b64") == []
    assert catalogue.selected(found, chips=["v6e"]) == [(found[0], "v6e")]
    assert catalogue.selected(found, measured=False, short=True) == []
    some = [dataclasses.replace(found[0], case=dataclasses.replace(CASE, short=("v5p",)))]
    assert catalogue.selected(some, short=True) == [(some[0], "v5p")]
    named = Job(found[0], "v6e", measure=True).refused("late")
    assert (named.key, named.refusal) == (f"op | decode b8 128k | {OURS} | v6e", "late")


def test_the_short_grid_has_every_short_context_on_every_chip():
    """And of a longer one every class, on one chip at least; `make grid-short` compiles it."""
    found = {case.shape: case for case in layer.cases()}
    for chip in CHIPS:
        few = {case.shape for case in found.values() if chip in case.short}
        pages = {int(shape.split(" p")[1].split()[0]) for shape in few if " x1 " in shape}
        assert pages >= set(range(1, 18)), chip
    short = [case for case in found.values() if case.short]
    assert {rows for case in short for rows in layer.FORMATS if f" {rows}" in case.shape} == set(layer.FORMATS)
    assert {int(case.shape.split(" x")[1].split()[0]) for case in short} >= {*layer.FEW, 9, 16, 100, 512, 960}
    assert sum(len(case.short) for case in [*short, *tokens.cases()]) < 150
    assert all(set(case.short) <= set(case.chips) for case in short)


def test_numbers_of_pages_that_generation_rounds_to_are_of_a_class_that_is_compiled():
    """With drafts, and dealt to up to 64 devices: whatever the blocks of such a step are, a case has them."""
    for chip in CHIPS:
        like = layer.Shape(2, 1, 1)
        compiled = {layer.blocks_of(chip, shape) for shape in layer.classes(chip, like, layer.COUNTS)}
        capacities = {_rounded(size) + drafts for size in range(1, 4096, 37) for drafts in (0, 7)}
        capacities |= {_rounded(1 << bits) + drafts for bits in range(12, 20) for drafts in (0, 7)}
        for capacity in capacities:
            for parts in (1, 4, 64):
                shape = dataclasses.replace(like, pages=-(-capacity // (64 * parts)))
                assert layer.blocks_of(chip, shape) in compiled, (chip, shape)


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_every_number_of_pages_is_of_a_class_that_is_compiled(chip):
    like = layer.Shape(2, 1, 1)
    compiled = {layer.blocks_of(chip, shape) for shape in layer.classes(chip, like, layer.COUNTS)}
    every = {layer.blocks_of(chip, dataclasses.replace(like, pages=n)): n for n in range(1, layer.MOST_PAGES + 1)}
    assert not {n for key, n in every.items() if key not in compiled}


def test_every_module_is_about_one_operation_and_names_each_case_once():
    for module in catalogue.modules():
        found = [entry.case for entry in catalogue.entries(module)]
        names = [(case.op, case.shape, case.form, chip) for case in found for chip in case.chips]
        assert len(names) == len(set(names)), module
        assert len({case.op for case in found}) <= 1
        assert set().union(*(case.chips for case in found)) <= set(CHIPS)
        assert all(isinstance(case.hbm_bytes, (int, float)) and callable(case.build) for case in found)
