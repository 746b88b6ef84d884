"""Fixtures of the model tests: the cases, and a quick compiler."""

from collections.abc import Iterator

import jax
import pytest

from tests.model.cases import Case, all_cases


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes `case` runs for every case, one that takes `draft_case` for every case with a draft layer."""
    cases = list(all_cases().values())
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases, ids=[c.name for c in cases])
    if "draft_case" in metafunc.fixturenames:
        cases = [c for c in cases if "mtp_draft" in c.golden]
        metafunc.parametrize("draft_case", cases, ids=[c.name for c in cases])


@pytest.fixture(autouse=True, scope="module")
def quick_compiler() -> Iterator[None]:
    """Compiles without the costly passes, which takes half the time; the slow tests repeat some paths with them."""
    before = jax.config.jax_disable_most_optimizations
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def released() -> Case:
    """The case with the released layer plan."""
    return all_cases()["released_plan"]
