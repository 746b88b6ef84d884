"""Processes that compile. libtpu can end the process that it runs in, and may take very long: neither ends the run."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.kernels.catalogue import Entry, entries
from benchmarks.kernels.stats import CaseStats
from benchmarks.schedule.dump import use_compiler_alone, write_schedules


@dataclasses.dataclass(frozen=True)
class Job:
    """A case for one chip.

    Attributes:
        measure: whether it is measured, and not only compiled.
    """

    entry: Entry
    chip: str
    measure: bool

    def refused(self, why: str) -> CaseStats:
        return self.named(CaseStats("", "", "", "", refusal=why))

    def named(self, stats: CaseStats) -> CaseStats:
        """CaseStats under the name of this job."""
        case = self.entry.case
        return dataclasses.replace(
            stats,
            op=case.op,
            shape=case.shape,
            form=case.form,
            chip=self.chip,
            blocks=self.entry.blocks,
            measured=self.measure,
        )


def done(jobs: Sequence[Job], processes: int, limit_s: float) -> Iterator[tuple[Job, CaseStats]]:
    """Jobs and their figures, in the order in which they end.

    Args:
        limit_s: after which a job is given up.
    """
    waiting = list(reversed(jobs))
    workers = [_Worker() for _ in range(min(processes, len(jobs)))]
    try:
        while True:
            for worker in workers:
                if worker.job is None and waiting:
                    worker.start(waiting.pop())
            busy = [worker for worker in workers if worker.job is not None]
            if not busy:
                return
            multiprocessing.connection.wait([worker.connection for worker in busy], timeout=1.0)
            for worker in busy:
                job = worker.job
                if job is not None and (stats := worker.result(limit_s)) is not None:
                    yield job, stats
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """One process and what it works at."""

    def __init__(self):
        self.job: Job | None = None
        self._since = 0.0
        self._begin()

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()

    def start(self, job: Job) -> None:
        self.job, self._since = job, time.monotonic()
        self.connection.send((job.entry.module, job.entry.kind, job.entry.number, job.chip, job.measure))

    def result(self, limit_s: float) -> CaseStats | None:
        """CaseStats if the job has ended, however it did."""
        job = self.job
        assert job is not None
        try:
            if self.connection.poll():
                self.job = None
                found = self.connection.recv()
                return job.named(found) if isinstance(found, CaseStats) else job.refused(found)
        except (EOFError, ConnectionResetError):
            self._process.join()
            return self._again(job.refused(f"the compiler ended its process, exit code {self._process.exitcode}"))
        if time.monotonic() - self._since > limit_s:
            return self._again(job.refused(f"not done after {limit_s:.0f} s"))
        return None

    def _again(self, stats: CaseStats) -> CaseStats:
        self.stop()
        self.job = None
        self._begin()
        return stats

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection) -> None:
    """The process: it takes jobs until the other end is closed."""
    use_compiler_alone()
    with tempfile.TemporaryDirectory(prefix="schedules_") as folder:
        write_schedules(folder)
        from benchmarks.kernels import measure  # JAX, which must find the environment as it is now

        while True:
            try:
                module, kind, number, chip, all_figures = connection.recv()
            except EOFError:
                return
            try:
                entry = entries(module, kind)[number]
            except Exception as error:  # the module changed since this run began
                connection.send(measure.one_sentence(error))
                continue
            case = entry.case
            connection.send(measure.measured(case, chip, Path(folder)) if all_figures else measure.compiled(case, chip))
