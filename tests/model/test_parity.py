"""Every path gives the reference's selection, experts and logits: whole texts, chunks, decode, drafts, bfloat16."""

import jax.numpy as jnp
import numpy as np
import pytest

import glm52_jax as glm
from glm52_jax.config import FULL
from glm52_jax.model import transformer
from glm52_jax.model.decoder_layer import ExecutionPolicy
from tests.model.cases import (
    FORMS,
    ON_TPUS,
    Case,
    Run,
    all_cases,
    check,
    complaints,
    cosine_of_logits,
    each_case,
    each_case_and,
    figures,
)
from tests.model.paths import Walk

DECODE = "absorbed-indices-cpu"
# How a prompt goes through the cache: form, tokens a step, page size. A page size of 5 divides nothing.
PATHS = {
    "decode": (DECODE, 1, 5),
    "decode-mask": ("absorbed-mask-reference", 1, 64),
    "decode-expanded": ("expanded-mask-cpu", 1, 64),
    "chunk7-indices": (DECODE, 7, 5),
    "chunk7-mask": ("absorbed-mask-cpu", 7, 64),
    "chunk7-expanded": ("expanded-mask-reference", 7, 64),
    "chunk16-indices": ("absorbed-indices-reference", 16, 64),
    "chunk16-mask": ("absorbed-mask-cpu", 16, 5),
    "chunk16-expanded": ("expanded-mask-cpu", 16, 5),
}
# Which cases are quick on which path, so chosen that tests share compiled steps.
QUICK_PATHS = {
    "decode": ("released_plan", "left_padded", "grouped_bias"),
    "decode-mask": (),
    "decode-expanded": ("all_full", "grouped_bias", "fp8"),
    "chunk7-indices": ("released_plan", "left_padded", "fp8", "irregular_plan"),
    "chunk7-mask": (),
    "chunk7-expanded": ("all_full", "grouped_bias", "irregular_plan"),
    "chunk16-indices": ("all_full", "grouped_bias", "left_padded"),
    "chunk16-mask": ("all_full", "fp8", "irregular_plan"),
    "chunk16-expanded": ("released_plan", "left_padded", "irregular_plan"),
}
_HALVES = ("released_plan", "all_full", "fp8"), ("left_padded", "grouped_bias", "irregular_plan")
QUICK_FORMS = {form: _HALVES[i % 2] for i, form in enumerate(FORMS)}
QUICK_ON_TPUS = {
    "absorbed-indices": ("irregular_plan",),
    "absorbed-mask": ("grouped_bias",),
    "expanded-mask": ("all_full",),
}
QUICK_DRAFTS = {
    "absorbed-indices-cpu": ("released_plan", "left_padded", "fp8", "irregular_plan"),
    "absorbed-mask-cpu": ("left_padded", "fp8", "irregular_plan"),
    "expanded-mask-cpu": ("released_plan", "left_padded", "irregular_plan"),
}
QUICK_BFLOAT16 = {
    "absorbed-indices-cpu": ("released_plan", "left_padded", "grouped_bias"),
    "absorbed-mask-reference": (),
    "expanded-mask-cpu": ("all_full", "fp8", "irregular_plan"),
}
AS_USERS_RUN_IT = transformer._trace  # before the fixture `quick_compiler` replaces it


def traced(case: Case, policy: ExecutionPolicy, dtype: jnp.dtype = jnp.float32) -> Run:
    """Whole texts at once; embeddings of padding are NaN."""
    tokens = np.where(case.real, case.tokens, case.unused_token)
    return Run.of(glm.trace(case.spoiled_params(dtype), case.config, tokens, case.real, policy=policy))


@pytest.mark.quick(4)
@each_case_and("form", QUICK_FORMS)
def test_whole_texts(case: Case, form: str) -> None:
    check(case, traced(case, FORMS[form]))


@pytest.mark.slow
@each_case_and("form", QUICK_ON_TPUS)
def test_whole_texts_by_the_kernels_for_tpus(case: Case, form: str) -> None:
    check(case, traced(case, ON_TPUS[form]))


@each_case("fp8")
@pytest.mark.slow
def test_steps_by_the_kernels_for_tpus(case: Case) -> None:
    """A prompt in chunks, then a few tokens one by one; pages of 8 rows."""
    walk = Walk(case, case.spoiled_params(), page_size=8)
    walk.run(16, ON_TPUS["absorbed-indices"], upto=case.lengths - 3).run(1, ON_TPUS["absorbed-indices"])
    check(case, walk.seen)


def test_forward_gives_the_logits_of_trace(released: Case) -> None:
    params = released.params()
    for form in ("absorbed-indices-cpu", "expanded-mask-cpu"):
        logits = glm.forward(params, released.config, released.tokens, policy=FORMS[form])
        assert np.abs(np.asarray(logits) - released.golden["logits"]).max() < 2e-4


@pytest.mark.quick(4)
@each_case_and("path", QUICK_PATHS)
def test_through_the_cache(case: Case, path: str) -> None:
    form, size, page_size = PATHS[path]
    walk = Walk(case, case.spoiled_params(), page_size=page_size).run(size, FORMS[form])
    check(case, walk.seen)
    # Every real token wrote its rows, and nothing else was touched.
    layers = case.config.num_hidden_layers + case.config.has_mtp
    indexers = case.config.indexer_types.count(FULL) + case.config.has_mtp
    total = int(case.lengths.sum())
    assert walk.written() == (layers * total, indexers * total)
    assert not walk.partly_written()


@pytest.mark.slow
@each_case("released_plan", "left_padded", "irregular_plan")
def test_decode_after_an_expanded_prefill(case: Case) -> None:
    """The two forms read one cache; the switch comes at another length in each row."""
    walk = Walk(case, case.spoiled_params(), page_size=5)
    walk.run(16, FORMS["expanded-mask-cpu"], upto=case.lengths // 2)
    walk.run(1, FORMS[DECODE])
    check(case, walk.seen)


@pytest.mark.quick(2)
@each_case("released_plan", "left_padded", "irregular_plan")
def test_greedy_decode(case: Case) -> None:
    """Token by token after a prefill, the continuation that the reference computes from the start each time."""
    walk = Walk(case, case.spoiled_params(), page_size=5)
    walk.run(7, FORMS[DECODE])
    rows = np.arange(len(case.tokens))
    token = walk.logits[rows, case.first + case.lengths - 1].argmax(-1)
    for number, expected in enumerate(case.golden["greedy"].T):
        assert token.tolist() == expected.tolist(), f"{case.name}: token number {number}"
        positions = (case.lengths + number)[:, None].astype(np.int32)
        tokens = token[:, None].astype(np.int32)
        seen, walk.cache = walk.step(
            walk.params, walk.config, tokens, tokens, positions, walk.cache, policy=FORMS[DECODE]
        )
        token = np.asarray(seen.logits)[:, 0].argmax(-1)


@pytest.mark.quick(2)
@each_case_and("form", QUICK_DRAFTS, having="mtp_draft")
def test_chain_of_drafts(case: Case, form: str) -> None:
    """Rows end in a step of unequal counts; its last row's selection is reused, or each draft selects anew."""
    expected, size = case.golden["mtp_draft"], 7 if form == DECODE else 16
    walk = Walk(case, case.spoiled_params(), page_size=5)
    walk.run(size, FORMS[form], upto=case.lengths - 1 - np.arange(len(case.tokens)) % 3)
    tokens, sets = walk.draft(FORMS[form], expected.shape[1], width=size)
    assert tokens.tolist() == expected.tolist()
    check(case, walk.seen)
    if case.config.index_share_for_mtp_iteration:
        assert all((later == sets[0]).all() for later in sets[1:])
    else:
        assert any((later != sets[0]).any() for later in sets[1:])
    trunk = walk.topk[-1, np.arange(len(tokens)), case.first + case.lengths - 1]
    assert (np.where(trunk < 0, -1, trunk - case.first[:, None]) != sets[0][:, 0]).any()


@pytest.mark.parametrize(
    ("form", "dtype"),
    [(DECODE, "float32"), pytest.param("expanded-mask-cpu", "bfloat16", marks=pytest.mark.slow)],
)
def test_fp8_kept_equals_fp8_dequantised(form: str, dtype: str) -> None:
    case = _cases_in_fp8()[0]
    kept, plain = (
        glm.trace(case.params(dtype, fp8), case.config, case.tokens, case.real, policy=FORMS[form])
        for fp8 in ("keep", "dequantize")
    )
    assert np.array_equal(kept.topk, plain.topk)
    assert np.array_equal(kept.experts, plain.experts)
    assert np.array_equal(kept.logits, plain.logits)
    assert np.array_equal(kept.mtp_logits, plain.mtp_logits)


def test_fp8_dequantised_is_the_reference() -> None:
    for case in _cases_in_fp8():
        trace = glm.trace(case.params(fp8="dequantize"), case.config, case.tokens, case.real, policy=FORMS[DECODE])
        check(case, Run.of(trace))


def _cases_in_fp8() -> list[Case]:
    return [c for c in all_cases().values() if c.config.quantization]


@pytest.mark.quick(1)
@each_case_and("form", QUICK_BFLOAT16, having="bfloat16_error")
def test_bfloat16(case: Case, form: str) -> None:
    """Nearly all choices and logits are those of float32, and no layer is less exact than the reference's own."""
    run = traced(case, FORMS[form], jnp.bfloat16)
    found = figures(case, run)
    assert found["topk"] <= 0.05, found
    assert found["experts"] <= 0.05, found
    assert cosine_of_logits(case, run) > 0.999
    exact = case.golden["hidden"][:, case.real]
    errors = np.linalg.norm(run.hidden[:, case.real] - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert (np.median(errors, -1) <= 1.25 * case.golden["bfloat16_error"] + 1e-6).all()


@pytest.mark.slow
def test_a_departure_is_named(released: Case) -> None:
    """The report says which layer departs first."""
    run = traced(released, FORMS[DECODE])
    assert not list(complaints(released, run))
    run.hidden = run.hidden + 1e-3 * (np.arange(len(run.hidden)) >= 4)[:, None, None, None]
    assert next(complaints(released, run)).startswith("layer 3 departs first, by 1.0e-03")


@each_case_and("form", dict.fromkeys(FORMS, ()))
def test_whole_texts_optimised(case: Case, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the compiler's costly passes."""
    monkeypatch.setattr(transformer, "_trace", AS_USERS_RUN_IT)
    check(case, traced(case, FORMS[form]))
