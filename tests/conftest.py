"""For all tests: how they compile; which of the slow ones a short run takes; what skipped is noted, or may not skip."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.needs import COMMAND
from tests.quick_flags import quick_flags

settings.register_profile("glm52", deadline=None)  # times depend on the machine
settings.load_profile("glm52")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("glm52")
    group.addoption(
        "--sample",
        metavar="N",
        type=int,
        help="of the parameters of each test that is left by -m only one set, the N-th, counted round",
    )
    group.addoption(
        "--record-skips", metavar="FILE", type=Path, help="write the arguments that run what skipped into FILE"
    )
    group.addoption("--no-skips", action="store_true", help="fail if a test skips")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    for found in _of_one_test(item for item in items if item.get_closest_marker("quick")):
        _slow_but_some(found)
    yield  # here -m and -k are heeded
    if (number := config.getoption("sample")) is not None:
        _sample(number, config, items)


def _slow_but_some(items: list[pytest.Item]) -> None:
    """With `quick(N)` all sets of parameters are slow but N, evenly spread over those that are not marked slow."""
    [count] = items[0].get_closest_marker("quick").args
    rest = [item for item in items if not item.get_closest_marker("slow")]
    kept = {i * len(rest) // count for i in range(count)}
    for i, item in enumerate(rest):
        if i not in kept:
            item.add_marker("slow")


def _sample(number: int, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves one set of parameters of each test: the next number takes another one."""
    chosen = {found[number % len(found)] for found in _of_one_test(items)}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def _of_one_test(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    same: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        same[item.nodeid.partition("[")[0]].append(item)
    return list(same.values())


def pytest_configure(config: pytest.Config) -> None:
    # Runs with slow tests, and what runs on what skipped, compile as users do.
    if "not slow" in config.option.markexpr and not config.getoption("no_skips"):
        os.environ["XLA_FLAGS"] = quick_flags()
    if not hasattr(config, "workerinput"):  # workers of xdist report to the process that started them
        config.pluginmanager.register(_Skips(config), "glm52-skips")


class _Skips:
    """Collects what skips: tests, and whole files, which skip when they are collected."""

    def __init__(self, config: pytest.Config):
        self.config, self.found = config, dict[str, str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.found[report.nodeid] = reason.removeprefix("Skipped: ")

    def _wrong(self) -> dict[str, str]:
        """What should not have skipped: anything with `--no-skips`, else what does not say which command runs it."""
        if self.config.getoption("no_skips"):
            return self.found
        return {name: reason for name, reason in self.found.items() if COMMAND not in reason}

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        file, marks = self.config.getoption("record_skips"), self.config.option.markexpr
        if file is not None:
            lines = [*(("-m", marks) if marks and self.found else ()), *sorted(self.found)]
            file.write_text("".join(f"{line}\n" for line in lines))
        if self._wrong() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if wrong := self._wrong():
            asked = self.config.getoption("no_skips")
            why = "though --no-skips is given" if asked else f"and does not name `{COMMAND}`, see tests/needs.py"
            terminalreporter.section(f"skipped, {why}", red=True)
            for name, reason in sorted(wrong.items()):
                terminalreporter.line(f"{name}: {reason}")
