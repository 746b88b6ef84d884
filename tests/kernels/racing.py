"""Kernels with copies, semaphores and cores as a TPU has them: no race, and nothing left over when they end."""

from collections.abc import Iterator

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter

from tests.kernels.quickly import quickly

MODES = ("races", "eager")
"""Backends. A copy that is made as late as it may be finds those who do not wait for it; one that is made at once
signals its semaphore even where nobody waits, so that a count that is left over shows."""


@pytest.fixture(params=quickly(MODES, "races"))
def racing(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[str]:
    """The name of a backend; whatever ran on it is checked when the test ends."""
    yield request.param
    jax.effects_barrier()
    check(capsys.readouterr().out)


def check(printed: str) -> None:
    """Fails on what the interpreter printed of races, of all kernels that ran, and of semaphores at their ends."""
    for said in ("RACE DETECTED", "non-zero count"):
        assert said not in printed, printed
    assert interpreter.races is None or not interpreter.races.races_found
