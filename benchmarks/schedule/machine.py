"""Copies, semaphores and scalar memory of one core, in cycles.

A copy reaches HBM some latency after it was issued, and all copies under way share the bandwidth equally. That is kept
in virtual time (bytes that each of them has moved so far), so that thousands of small copies stay cheap. A core that
waits issues nothing, so all is known at a wait, and time may run ahead until its semaphore is satisfied.
"""

from __future__ import annotations

import collections
import functools
import heapq
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.schedule.chips import ON_CHIP_BYTES_PER_CYCLE, Core

VECTOR_TO_SCALAR = -1
"""Instead of an operand's number: what values yield that vectors compute and the scalar core reads."""

_ON_CHIP = {"vmem", "smem", "sflag"}
_NEVER = float("inf")


def tiled_words(array: Any) -> np.ndarray:
    """An int32 array in the order in which it lies in scalar memory: in tiles of 8 x 128, lower where it is short."""
    words = np.asarray(array).astype(np.int64)
    if words.ndim <= 1:
        return words.reshape(-1)
    rows, columns = words.shape[-2:]
    height = next((size for size in (1, 2, 4) if rows <= size), 8)
    padded = -(-rows // height) * height, -(-columns // 128) * 128
    words = np.pad(words.reshape(-1, rows, columns), ((0, 0), (0, padded[0] - rows), (0, padded[1] - columns)))
    words = words.reshape(-1, padded[0] // height, height, padded[1] // 128, 128)
    return words.transpose(0, 1, 3, 2, 4).reshape(-1)


class Machine:
    """State of one core while it executes a kernel.

    Attributes:
        memory: words of scalar memory by address.
        moved, copies: bytes and number of copies, by route: "hbm->vmem".
        stall: cycles in which the core waited for copies.
        unmatched: waits that nothing ever satisfies, which a right model never sees.
    """

    def __init__(self, core: Core, scalars: Mapping[int, np.ndarray]):
        self.bytes_per_cycle, self.latency = core.bytes_per_cycle, core.latency
        self.granule, self.hbm_shift = core.timing.granule, core.timing.hbm_shift
        self.scalars = scalars
        self.memory: dict[int, int] = {}
        self.moved: collections.Counter[str] = collections.Counter()
        self.copies: collections.Counter[str] = collections.Counter()
        self.stall, self.unmatched = 0.0, 0
        self.quotients: collections.deque[int] = collections.deque()
        self._from_vectors = [int(value) for value in scalars.get(VECTOR_TO_SCALAR, ())] or [0]
        self._read = 0
        self._now = self._virtual = 0.0
        self._order = 0
        # (time, bytes, semaphore, granules), then (virtual time or time of its end, order, semaphore, granules).
        self._issued: collections.deque[tuple[float, float, int, int]] = collections.deque()
        self._moving: list[tuple[float, int, int, int]] = []
        self._on_chip: list[tuple[float, int, int, int]] = []
        self._semaphores: collections.defaultdict[int, int] = collections.defaultdict(int)
        self._bases: dict[int, int] = {}

    @property
    def hbm_bytes(self) -> int:
        """Read from HBM and written to it; a copy within HBM does both."""
        return sum(moved * _times(*route.split("->")) for route, moved in self.moved.items())

    def operand(self, number: int, space: str) -> int:
        """Address of an operand of the kernel, or its value where it is passed in a register."""
        if space == "value":
            return int(self.scalars[number][0]) if number in self.scalars else 0
        base = (number + 1) << (40 if space == "hbm" else 22)
        # As copies will name it, in granules.
        self._bases[number] = base << (self.hbm_shift if space == "hbm" else 4)
        if space == "smem" and number in self.scalars:
            self.memory.update((base + offset, int(word)) for offset, word in enumerate(self.scalars[number]))
        return base

    def from_vector(self) -> int:
        """The next of the values that stand for what vectors compute, from the first again after the last."""
        value = self._from_vectors[self._read % len(self._from_vectors)]
        self._read += 1
        return value

    def copy(self, source: str, to: str, granules: int, semaphore: int, source_at: int, to_at: int, at: float) -> None:
        """Issues a copy."""
        route, size = f"{source}->{to}", granules * self.granule
        self.moved[route] += size
        self.copies[route] += 1
        if times := _times(source, to):
            self._issued.append((max(at, self._now) + self.latency, size * times, semaphore, granules))
        else:
            end = max(at, self._now) + size / ON_CHIP_BYTES_PER_CYCLE
            self._order += 1
            heapq.heappush(self._on_chip, (end, self._order, semaphore, granules))
        if to == "smem":
            self._fill(source_at, to_at, granules)

    def wait(self, semaphore: int, count: int, at: float) -> float:
        """When the semaphore has that count."""
        self._advance(at)
        self._move(at)
        self._advance(_NEVER, semaphore, count)
        if self._semaphores[semaphore] < count:
            self.unmatched += 1
            return at
        if self._now > at:
            self.stall += self._now - at
        return max(at, self._now)

    def signal(self, semaphore: int, count: int) -> None:
        self._semaphores[semaphore] += count

    def finish(self, at: float) -> float:
        """When all copies have ended."""
        self._advance(_NEVER)
        return max(at, self._now)

    def _fill(self, source_at: int, to_at: int, granules: int) -> None:
        words = self.granule // 4
        for number, base in self._bases.items():
            start = (source_at - base) * words
            known = self.scalars.get(number, ())
            if 0 <= start < len(known):
                self.memory.update(
                    (to_at + offset, int(word)) for offset, word in enumerate(known[start : start + granules * words])
                )

    def _advance(self, until: float, semaphore: int | None = None, count: int = 0) -> None:
        """Goes through all events up to a time, or only until the semaphore has that count.

        Events are looked at when somebody waits and not before: what is issued later cannot change earlier ones.
        """
        issued, moving, on_chip, semaphores = self._issued, self._moving, self._on_chip, self._semaphores
        now, virtual, rate = self._now, self._virtual, self.bytes_per_cycle
        while semaphore is None or semaphores[semaphore] < count:
            first, ended = issued[0][0] if issued else _NEVER, None
            if moving and (end := now + (moving[0][0] - virtual) * len(moving) / rate) < first:
                first, ended = end, moving
            if on_chip and on_chip[0][0] < first:
                first, ended = on_chip[0][0], on_chip
            if first > until or first == _NEVER:
                break
            if first > now:
                if moving:
                    virtual += (first - now) * rate / len(moving)
                now = first
            if ended is None:
                _, size, signalled, granules = issued.popleft()
                self._order += 1
                heapq.heappush(moving, (virtual + size, self._order, signalled, granules))
            else:
                _, _, signalled, granules = heapq.heappop(ended)
                semaphores[signalled] += granules
        self._now, self._virtual = now, virtual

    def _move(self, to: float) -> None:
        if to > self._now:
            if self._moving:
                self._virtual += (to - self._now) * self.bytes_per_cycle / len(self._moving)
            self._now = to


@functools.cache
def _times(source: str, to: str) -> int:
    """How often a copied byte passes HBM; "general" copies name no end and are taken to pass it once."""
    if source in _ON_CHIP and to in _ON_CHIP:
        return 0
    return 2 if source == to == "hbm" else 1
