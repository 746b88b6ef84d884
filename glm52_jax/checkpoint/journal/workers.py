"""Units of work over a few threads, with progress, the peak of anonymous memory, and one sentence when one fails.

It must not know what a unit does.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from glm52_jax.inputs.sizes import short_size
from glm52_jax.io import files
from sharding.errors import InputError

WorkUnit = TypeVar("WorkUnit")
_GOES_ON = "when it can, the same command goes on from here"


class StoppedError(Exception):
    """Another worker failed; this one's unit is left as it is."""


class Meter(Protocol):
    """Told of bytes as they are done, from any thread."""

    def advance(self, count: int) -> None: ...


class Pulse:
    """What a unit calls after each slice: counts the bytes, and stops when another worker failed."""

    def __init__(self, meter: Meter | None):
        self._meter, self._stop, self._lock = meter, threading.Event(), threading.Lock()
        self.bytes = 0

    def __call__(self, count: int) -> None:
        if self._stop.is_set():
            raise StoppedError
        with self._lock:
            self.bytes += count
            if self._meter:
                self._meter.advance(count)

    def stop(self) -> None:
        self._stop.set()


@dataclasses.dataclass
class WorkStats:
    """What a run took.

    Attributes:
        peak: the largest anonymous memory seen; None where the system does not say.
        notes: sentences on what it found in the values.
    """

    bytes: int = 0
    seconds: float = 0.0
    peak: int | None = None
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        rate = f"{short_size(int(self.bytes / self.seconds))}/s" if self.seconds else ""
        peak = f"; at most {self.peak / 2**20:,.0f} MiB of anonymous memory" if self.peak is not None else ""
        return f"{short_size(self.bytes)} in {self.seconds:,.1f} s, {rate}{peak}"


def run(
    units: Sequence[WorkUnit],
    work: Callable[[WorkUnit, Pulse], Any],
    *,
    jobs: int,
    destination: Path,
    meter: Meter | None,
) -> WorkStats:
    """Does every unit, `jobs` at a time, in order of the list.

    Raises:
        InputError: what a unit raised, or that the destination cannot be written; the other units in flight stop.
    """
    begin, pulse, waiting = time.perf_counter(), Pulse(meter), iter(units)
    account = WorkStats(peak=anonymous_bytes())
    with ThreadPoolExecutor(jobs) as pool:
        running: set[Future[Any]] = {pool.submit(work, unit, pulse) for unit in itertools.islice(waiting, jobs)}
        try:
            while running:
                finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
                now = anonymous_bytes()
                account.peak = None if now is None or account.peak is None else max(account.peak, now)
                for future in finished:
                    future.result()
                    running |= {pool.submit(work, unit, pulse) for unit in itertools.islice(waiting, 1)}
        except OSError as error:
            raise unwritable(destination, error) from None
        finally:
            pulse.stop()
    account.bytes, account.seconds = pulse.bytes, time.perf_counter() - begin
    return account


def unwritable(destination: Path, error: OSError) -> InputError:
    """What to say when a destination cannot be written."""
    return files.unwritable(destination, error, _GOES_ON)


def anonymous_bytes(process: int | str = "self") -> int | None:
    """Memory of a process that no file stands for, where the system says so."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii") as status:
            return next((int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:")), None)
    except OSError:
        return None
