"""Checks that run one after another: whatever one raises is its own result, and the next one runs.

Nothing here knows what is checked.
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

PASS, FAIL, SKIP = "pass", "fail", "skip"

Value = TypeVar("Value")


class CheckSkipped(Exception):  # noqa: N818 (it is no error)
    """Raised by a check that has nothing to do here; its text says why."""


class CheckFailed(Exception):  # noqa: N818 (it reads as what it says: the result is wrong)
    """Raised by a check whose result is not what it should be.

    Attributes:
        values: for the report.
    """

    def __init__(self, sentence: str, **values: Any):
        super().__init__(sentence)
        self.values = values


@dataclasses.dataclass(frozen=True)
class Passed:
    """What a check found: a figure in words for its line, and numbers for the report."""

    figure: str
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing to try.

    Attributes:
        name: of it in its section.
        run: what finds it, or raises.
    """

    name: str
    run: Callable[[], Passed]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Attributes:
        status: "pass", "fail" or "skip".
        seconds: that it took, compilation included.
        figure: a line of text: what was found, or why it failed.
        values: numbers.
        traceback: of a failure.
    """

    section: str
    name: str
    status: str
    seconds: float
    figure: str
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    traceback: str | None = None


Section = Callable[[], Iterable[Check]]


def run_sections(
    sections: Mapping[str, Section], before: Callable[[str, str], None] = lambda section, name: None
) -> Iterator[Outcome]:
    """Runs every check of every section and yields what became of each.

    Args:
        sections: by name; one that cannot even list its checks is a failure, and the others run.
        before: called with section and name before each check.
    """
    for section, checks in sections.items():
        before(section, "")
        start = time.perf_counter()
        try:
            listed = list(checks())
        except Exception as error:
            yield _failed(section, "its checks", time.perf_counter() - start, error)
            continue
        for check in listed:
            before(section, check.name)
            yield run_check(section, check)


def run_check(section: str, check: Check) -> Outcome:
    """Runs one check; an exception is a failure, an interrupt is not caught."""
    start = time.perf_counter()
    try:
        found = check.run()
    except CheckSkipped as reason:
        return Outcome(section, check.name, SKIP, time.perf_counter() - start, one_line(str(reason)))
    except Exception as error:
        return _failed(section, check.name, time.perf_counter() - start, error)
    return Outcome(section, check.name, PASS, time.perf_counter() - start, found.figure, found.values)


def _failed(section: str, name: str, seconds: float, error: Exception) -> Outcome:
    kind = "" if isinstance(error, CheckFailed) else f"{type(error).__name__}: "
    text = "".join(traceback.format_exception(error))
    values = error.values if isinstance(error, CheckFailed) else {}
    return Outcome(section, name, FAIL, seconds, one_line(f"{kind}{error}"), values, text)


def one_line(text: str, most: int = 300) -> str:
    """The first line of a text that says something, cut where it is long."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= most else f"{line[: most - 3]}..."


class RunOnce(Generic[Value]):
    """Something that several checks need, made by the first of them.

    If making it fails, that check fails, and the others are skipped: they would all say the same.
    """

    def __init__(self, what: str, make: Callable[[], Value]):
        self._what, self._make = what, make
        self._made: list[Value] = []
        self._failed = False

    def __call__(self) -> Value:
        if self._failed:
            raise CheckSkipped(f"needs {self._what}, which failed")
        if not self._made:
            try:
                self._made.append(self._make())
            except BaseException:
                self._failed = True
                raise
        return self._made[0]
