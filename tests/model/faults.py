"""Putting a fault into the code, and what the parity checks say of it.

A patched function is traced by a jit of its own, since a trace that was kept would not see the patch.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm52_jax.model import transformer
from tests.model.cases import FORMS, Case, Run, complaints
from tests.model.paths import Walk, compiled, draft_step, one_step

FORM = "absorbed-indices-cpu"
WHOLE = transformer._trace.__wrapped__
Patch = pytest.MonkeyPatch


def fresh_trace(case: Case, params: dict | None = None, *, drafts: bool = False, **config: Any) -> list[str]:
    """What the checks say of whole texts, traced anew; without the draft layer unless asked for."""
    config = dataclasses.replace(case.config, **config)
    params = dict(params or case.params())
    if not drafts:
        params.pop("mtp", None)
    tokens = jnp.asarray(np.where(case.real, case.tokens, 0))
    trace = compiled(WHOLE)(params, config, tokens, jnp.asarray(case.real), policy=FORMS[FORM])
    return list(complaints(case, Run.of(trace)))


def fresh_decode(case: Case, form: str = FORM, page_size: int = 5) -> list[str]:
    """What the checks say of a prefill and a decode from there on, traced anew."""
    params = {name: tree for name, tree in case.spoiled_params().items() if name != "mtp"}
    walk = Walk(case, params, page_size=page_size, step=compiled(one_step))
    walk.run(7, FORMS[form], upto=case.lengths - 4).run(1, FORMS[form])
    return list(complaints(case, walk.seen))


def fresh_drafts(case: Case) -> bool:
    """Whether the chain of drafts is the reference's, traced anew."""
    expected = case.golden["mtp_draft"]
    walk = Walk(case, case.params(), page_size=64, step=compiled(one_step))
    walk.run(7, FORMS[FORM], upto=case.lengths - 1)
    tokens, _ = walk.draft(FORMS[FORM], expected.shape[1], width=7, draft_step=compiled(draft_step))
    return tokens.tolist() == expected.tolist()


def mentions(found: list[str], *words: str) -> None:
    """Each word opens or is in one of the complaints."""
    assert found, "the fault went unnoticed"
    for word in words:
        assert any(word in sentence for sentence in found), f"no mention of {word!r} in {found}"


def wrap(patch: Patch, owner: Any, name: str, change: Callable) -> None:
    """Replaces a function by `change(original, *arguments)`."""
    patch.setattr(owner, name, partial(change, getattr(owner, name)))


def everywhere(patch: Patch, api: Any, function: Callable) -> None:
    """Makes `function` the form of an operation on every backend."""
    for backend in api._IMPLEMENTATIONS:
        patch.setitem(api._IMPLEMENTATIONS, backend, function)


def rounded(x: jax.Array) -> jax.Array:
    """Through bfloat16 and back."""
    return x.astype(jnp.bfloat16).astype(x.dtype)
