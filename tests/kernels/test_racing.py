"""What the interpreter must notice, it does: a race, a copy that nobody waits for, a core that meets another."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from glm52_jax.kernels import Target
from glm52_jax.kernels.lib.pallas import call
from tests.kernels.racing import MODES, check


def run(backend: str, kernel: Any, grid: tuple[int, ...] = (1,)) -> jax.Array:
    target = Target.of(backend)
    assert target is not None
    return call(
        kernel,
        name="probe",
        target=target,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        semantics=("parallel",) * len(grid),
        grid=grid,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
    )(jnp.ones((8, 128), jnp.float32))


def whole(source: Any, out: Any, buffer: Any, arrived: Any) -> None:
    for copy in (pltpu.make_async_copy(source, buffer, arrived), pltpu.make_async_copy(buffer, out, arrived)):
        copy.start()
        copy.wait()


@pytest.mark.parametrize("backend", MODES)
def test_a_kernel_that_waits_passes(backend: str, capsys: pytest.CaptureFixture[str]) -> None:
    np.testing.assert_array_equal(run(f"{backend}:v5e", whole), np.ones((8, 128)))
    check(capsys.readouterr().out)


def test_a_copy_that_nobody_waits_for_is_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    def leaking(source: Any, out: Any, buffer: Any, arrived: Any) -> None:
        whole(source, out, buffer, arrived)
        pltpu.make_async_copy(source, buffer, arrived).start()

    run("eager:v5e", leaking).block_until_ready()
    with pytest.raises(AssertionError, match="non-zero count"):
        check(capsys.readouterr().out)


def test_two_cores_that_write_one_place_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    """JAX 0.10 prints a race, which is looked for when the kernel has ended; newer ones end the kernel."""

    def run_and_check() -> None:
        run("races:v5p", whole, grid=(2,)).block_until_ready()
        check(capsys.readouterr().out)

    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match="RACE DETECTED"):
        run_and_check()
