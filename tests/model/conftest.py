"""For all model tests: a quick compiler, and tests of one case side by side, since they share compiled steps."""

from collections.abc import Iterator
from typing import Any

import pytest

from glm52_jax.model import transformer
from infer.steps import StepProvider
from tests.model import paths
from tests.model.cases import Case, all_cases

OPTIONS: Any = StepProvider.compiler_options


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Brings the tests of a case together, in the places that tests with a case have in the whole."""
    places = [i for i, item in enumerate(items) if _case(item)]
    ordered = sorted((items[i] for i in places), key=lambda item: _case(item).name)
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


def _case(item: pytest.Item) -> Case | None:
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    return case if isinstance(case, Case) else None


@pytest.fixture(autouse=True, scope="module")
def quick_compiler() -> Iterator[None]:
    """`trace`, `forward` and steps of generation compile quickly; slow tests repeat them as users run them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProvider, "compiler_options", property(_quick_on_cpus))
        patch.setattr(transformer, "_trace", paths.TRACE)
        patch.setattr(transformer, "_forward", paths.FORWARD)
        yield


def _quick_on_cpus(provider: StepProvider) -> dict[str, Any] | None:
    return paths.QUICK_OPTIONS if provider.platform == "cpu" else OPTIONS.fget(provider)


@pytest.fixture
def released() -> Case:
    """The case with the released layer plan."""
    return all_cases()["released_plan"]


@pytest.fixture
def padded() -> Case:
    """The case whose rows are padded on the left."""
    return all_cases()["left_padded"]


@pytest.fixture
def grouped() -> Case:
    """The case with groups of experts and biased projections."""
    return all_cases()["grouped_bias"]
