"""The model on meshes of eight devices; the checks are in `on_mesh`, in a process that has the devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each compiles steps of its own: what is in a process together shares the start.
QUICK = (
    "batch-and-experts",
    "all-axes",
    "ties-over-devices",
)
SLOW = (
    "random-layouts",
    "pages-and-heads",
    "pages-and-heads-expanded",
    "pages-and-heads-mask",
    "kernels-for-tpus",
    "kernels-for-tpus-whole",
    "one-token-a-step",
    "more-pages-than-devices",
    "experts-over-tensor",
    "rows-to-experts",
    "fp8-weights",
    "one-prompt-over-all",
    "one-prompt-over-all-expanded",
    "fp8-cache",
    "fp8-blocks-over-tensor",
    "generation",
)


@pytest.mark.parametrize("checks", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
def test_the_model_on_eight_devices(checks: tuple[str, ...]) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.model.on_mesh", *checks],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout.split() == list(checks), result.stdout + result.stderr


@pytest.mark.slow
def test_random_layouts_are_refused_or_right() -> None:
    """The first of a long run: `python -m tests.model.random_layouts --count 400`."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.model.random_layouts", "--count", "40"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_check_is_run() -> None:
    source = (ROOT / "tests" / "model" / "on_mesh.py").read_text()
    assert all(f'"{name}"' in source for name in (*QUICK, *SLOW))
    assert source.count("\nwalk(") + source.count("@named(") == len(QUICK) + len(SLOW)
