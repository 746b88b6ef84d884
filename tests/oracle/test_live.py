"""A case that is made now, by the `transformers` that is installed, against the model; skipped where there is none."""

import numpy as np
import pytest

import glm52_jax as glm
from tests import needs
from tests.model.cases import FOLDER, FORMS, Case, Run, check
from tests.model.paths import Walk

needs.package("torch")
needs.package("transformers")
make_cases = needs.package("tests.oracle.make_cases")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Another seed every time; it is in the name of the case, and so in every failure."""
    recipe = make_cases.RECIPES["irregular_plan"]
    folder = tmp_path_factory.mktemp("live")
    seed = make_cases.make(recipe, folder, int(np.random.SeedSequence().generate_state(1)[0]), steady=False)
    return Case(f"live case of seed {seed}", folder)


def test_whole_texts(case: Case) -> None:
    check(
        case, Run.of(glm.trace(case.params(), case.config, case.tokens, case.real, policy=FORMS["expanded-mask-cpu"]))
    )


def test_through_the_cache(case: Case) -> None:
    form = FORMS["absorbed-indices-cpu"]
    walk = Walk(case, case.spoiled_params(), page_size=5)
    walk.run(7, form, upto=case.lengths - 1)
    tokens, _ = walk.draft(form, case.golden["mtp_draft"].shape[1], width=7)
    check(case, walk.seen)
    assert tokens.tolist() == case.golden["mtp_draft"].tolist(), case.name


@pytest.mark.parametrize("name", ["all_full", pytest.param("released_plan", marks=pytest.mark.slow)])
def test_the_stored_cases_are_still_what_the_reference_says(name: str) -> None:
    """A stored case, made again from its recipe and seed, is the same."""
    stored = Case(name, FOLDER / name).golden
    _, _, _, made = make_cases.attempt(make_cases.RECIPES[name], int(stored["seed"]), steady=False)
    for key, value in made.items():
        np.testing.assert_allclose(value, stored[key], atol=1e-4, err_msg=key)
