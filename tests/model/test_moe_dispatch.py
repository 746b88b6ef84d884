"""Dispatched experts over eight devices; the checks are in `moe_dispatch_on_devices`, in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = (
    "gathered_experts_equal_one_device",
    "gathered_quantised_experts_equal_one_device",
    "experts_sorted_on_their_device_equal_one_device",
    "sent_experts_equal_one_device",
    "sent_quantised_experts_equal_one_device",
    "many_rounds_of_a_small_buffer_equal_one_device",
    "halves_equal_one_device",
    "by_slice_equals_one_device",
)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["quick", "all"])
def test_eight_devices(part: str) -> None:
    """With a third of the layouts of each check, or with all."""
    command = [sys.executable, "-m", "tests.model.moe_dispatch_on_devices", part]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == list(CHECKS), result.stderr
