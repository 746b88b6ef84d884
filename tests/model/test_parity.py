"""Every path gives the reference's selection, experts and logits: whole texts, chunks, decode, drafts, bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import glm52_jax as glm
from glm52_jax.config import FULL
from tests.model.cases import FORMS, Case, Run, check, complaints, cosine_of_logits, figures
from tests.model.paths import Walk

QUICK = "absorbed-indices-cpu"
# How a prompt goes through the cache: form, tokens a step, page size. Page sizes of 5 divide nothing.
CHUNKED = {
    "decode": ("absorbed-indices-cpu", 1, 5),
    "decode-mask": ("absorbed-mask-reference", 1, 64),
    "chunk7-indices": ("absorbed-indices-cpu", 7, 5),
    "chunk7-mask": ("absorbed-mask-cpu", 7, 64),
    "chunk7-expanded": ("expanded-mask-cpu", 7, 5),
    "chunk16-indices": ("absorbed-indices-reference", 16, 64),
    "chunk16-mask": ("absorbed-mask-cpu", 16, 5),
    "chunk16-expanded": ("expanded-mask-cpu", 16, 64),
}


def traced(case: Case, form: str, dtype: jnp.dtype = jnp.float32) -> Run:
    """Whole texts at once; embeddings of padding are NaN."""
    tokens = np.where(case.real, case.tokens, case.unused_token)
    return Run.of(glm.trace(case.spoiled_params(dtype), case.config, tokens, case.real, forms=FORMS[form]))


@pytest.mark.parametrize("form", FORMS)
def test_whole_texts(case: Case, form: str) -> None:
    check(case, traced(case, form))


def test_forward_gives_the_logits_of_trace(released: Case) -> None:
    params = released.params()
    for form in ("absorbed-indices-cpu", "expanded-mask-cpu"):
        logits = glm.forward(params, released.config, released.tokens, forms=FORMS[form])
        assert np.abs(np.asarray(logits) - released.golden["logits"]).max() < 2e-4


@pytest.mark.parametrize("path", CHUNKED)
def test_through_the_cache(case: Case, path: str) -> None:
    form, size, page_size = CHUNKED[path]
    walk = Walk(case, case.spoiled_params(), page_size=page_size).run(size, FORMS[form])
    check(case, walk.seen)
    # Every real token wrote its rows, and nothing else was touched.
    layers = case.config.num_hidden_layers + case.config.has_mtp
    indexers = case.config.indexer_types.count(FULL) + case.config.has_mtp
    total = int(case.lengths.sum())
    assert walk.written() == (layers * total, indexers * total)
    assert not walk.partly_written()


def test_decode_after_an_expanded_prefill(case: Case) -> None:
    """The two forms read one cache; the switch comes at another length in each row."""
    walk = Walk(case, case.spoiled_params(), page_size=64)
    walk.run(16, FORMS["expanded-mask-cpu"], upto=case.lengths // 2)
    walk.run(1, FORMS["absorbed-indices-cpu"])
    check(case, walk.seen)


def test_greedy_decode(case: Case) -> None:
    """Token by token after a prefill, the reference's continuation, which it computes from the start each time."""
    walk = Walk(case, case.spoiled_params(), page_size=5, room=case.golden["greedy"].shape[1] + 1)
    walk.run(7, FORMS["absorbed-indices-cpu"])
    rows = np.arange(len(case.tokens))
    token = walk.logits[rows, case.first + case.lengths - 1].argmax(-1)
    for number, expected in enumerate(case.golden["greedy"].T):
        assert token.tolist() == expected.tolist(), f"{case.name}: token number {number}"
        positions = (case.lengths + number)[:, None].astype(np.int32)
        tokens = token[:, None].astype(np.int32)
        seen, walk.cache = walk.step(
            walk.params, walk.config, tokens, tokens, positions, walk.cache, forms=FORMS[QUICK]
        )
        token = np.asarray(seen.logits)[:, 0].argmax(-1)


@pytest.mark.parametrize("form", ["absorbed-indices-cpu", "absorbed-mask-reference", "expanded-mask-cpu"])
def test_chain_of_drafts(draft_case: Case, form: str) -> None:
    """Rows end in a step of unequal counts; the first step selects, later ones reuse its row or select anew."""
    case, expected = draft_case, draft_case.golden["mtp_draft"]
    walk = Walk(case, case.spoiled_params(), page_size=5, room=expected.shape[1])
    walk.run(7, FORMS[form], upto=case.lengths - 1 - np.arange(len(case.tokens)) % 3)
    tokens, sets = walk.draft(FORMS[form], expected.shape[1])
    assert tokens.tolist() == expected.tolist()
    check(case, walk.seen)
    if case.config.index_share_for_mtp_iteration:
        assert all((later == sets[0]).all() for later in sets[1:])
    else:
        assert any((later != sets[0]).any() for later in sets[1:])
    trunk = walk.topk[-1, np.arange(len(tokens)), case.first + case.lengths - 1]
    assert (np.where(trunk < 0, -1, trunk - case.first[:, None]) != sets[0]).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["absorbed-indices-cpu", "expanded-mask-cpu"])
def test_fp8_kept_equals_fp8_dequantised(form: str, dtype: str) -> None:
    case = _cases_in_fp8()[0]
    kept, plain = (
        glm.trace(case.params(dtype, fp8), case.config, case.tokens, case.real, forms=FORMS[form])
        for fp8 in ("keep", "dequantize")
    )
    assert np.array_equal(kept.topk, plain.topk)
    assert np.array_equal(kept.experts, plain.experts)
    assert np.array_equal(kept.logits, plain.logits)
    assert np.array_equal(kept.mtp_logits, plain.mtp_logits)


def test_fp8_dequantised_is_the_reference() -> None:
    for case in _cases_in_fp8():
        trace = glm.trace(case.params(fp8="dequantize"), case.config, case.tokens, case.real, forms=FORMS[QUICK])
        check(case, Run.of(trace))


def _cases_in_fp8() -> list[Case]:
    from tests.model.cases import all_cases

    return [c for c in all_cases().values() if c.config.quantization]


@pytest.mark.parametrize("form", ["absorbed-indices-cpu", "absorbed-mask-reference", "expanded-mask-cpu"])
def test_bfloat16(case: Case, form: str) -> None:
    """Nearly all choices and logits are those of float32, and no layer is less exact than the reference's own."""
    if "bfloat16_error" not in case.golden:
        pytest.skip("the case says nothing about bfloat16")
    run = traced(case, form, jnp.bfloat16)
    found = figures(case, run)
    assert found["topk"] <= 0.05, found
    assert found["experts"] <= 0.05, found
    assert cosine_of_logits(case, run) > 0.999
    exact = case.golden["hidden"][:, case.real]
    errors = np.linalg.norm(run.hidden[:, case.real] - exact, axis=-1) / np.linalg.norm(exact, axis=-1)
    assert (np.median(errors, -1) <= 1.25 * case.golden["bfloat16_error"] + 1e-6).all()


def test_a_departure_is_named(released: Case) -> None:
    """B15: the report says which layer departs first."""
    run = traced(released, QUICK)
    assert not list(complaints(released, run))
    run.hidden[4:] += 1e-3
    assert next(complaints(released, run)).startswith("layer 3 departs first, by 1.0e-03")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_whole_texts_optimised(case: Case, form: str) -> None:
    """As users run it, with the compiler's costly passes."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        tokens = np.where(case.real, case.tokens, case.unused_token)
        # Another length, so that nothing that was compiled quickly is used.
        tokens, real = (np.pad(a, ((0, 0), (0, 1))) for a in (tokens, case.real))
        run = Run.of(glm.trace(case.spoiled_params(), case.config, tokens, real, forms=FORMS[form]))
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
    length = case.tokens.shape[1]
    experts = run.experts.reshape(len(run.experts), *tokens.shape, -1)[:, :, :length]
    run = Run(
        run.logits[:, :length],
        run.hidden[:, :, :length],
        run.topk[:, :, :length],
        experts.reshape(len(experts), -1, experts.shape[-1]),
        None if run.mtp_logits is None else run.mtp_logits[:, : length - 1],
    )
    check(case, run)
