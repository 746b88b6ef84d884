"""Checks on several hosts: what became of each is what became of it on all of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Generator, Iterable, Iterator

from infer.selftest.checks import FAIL, Outcome
from sharding.hosts.process_group import ProcessGroup

WAIT_SECONDS = 180.0
"""After a failure on one host, the others may be waiting for its devices without end."""


def agree_between_hosts(outcomes: Iterable[Outcome], hosts: ProcessGroup) -> Iterator[Outcome]:
    """The outcomes, each a failure where it is one on any host, with what that host says.

    All hosts run the same checks in the same order. Where one failed, and the others do not come to the end of that
    check within `WAIT_SECONDS`, this process ends, and with it the run.
    """
    for outcome in outcomes:
        with _time_limit(outcome) if hosts.processes > 1 and outcome.status == FAIL else contextlib.nullcontext():
            everyones = hosts.exchange(dataclasses.asdict(dataclasses.replace(outcome, values={})))
        names = {f"{one['section']}: {one['name']}" for one in everyones}
        if len(names) > 1:
            raise RuntimeError(f"hosts are out of step after a failure: {' and '.join(sorted(names))}")
        failed = next((number for number, one in enumerate(everyones) if one["status"] == FAIL), None)
        if failed is not None and outcome.status != FAIL:
            other = everyones[failed]
            figure = f"on process {failed}: {other['figure']}"
            outcome = dataclasses.replace(outcome, status=FAIL, figure=figure, traceback=other["traceback"])
        yield outcome


@contextlib.contextmanager
def _time_limit(outcome: Outcome) -> Generator[None]:
    def end() -> None:
        sentence = f"{outcome.section}: {outcome.name} failed here, and other hosts wait in it: {outcome.figure}"
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"glm52: {sentence}\n")
            sys.stderr.flush()
        # Python's own way out would wait for the others; they see the end of this process.
        os._exit(1)

    timer = threading.Timer(WAIT_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
