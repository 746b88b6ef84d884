"""Loading over several devices and processes; the checks are in `on_devices`, in processes that have the devices."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKS = (
    "published_shards_equal_the_whole",
    "converted_shards_equal_the_whole",
    "dequantized_shards_equal_the_whole",
    "stages_equal_the_whole",
    "shardings_are_those_that_were_asked_for",
    "one_device_may_be_another_than_the_default",
    "every_byte_is_read_once",
    "shardings_that_do_not_fit_are_refused_before_reading",
    "what_is_written_from_shards_is_what_is_written_from_one_device",
    "orbax_takes_parameters_from_any_number_of_devices_to_any_other",
    "a_converted_folder_is_restored_on_any_number_of_devices",
)


def start(*arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.checkpoint.on_devices", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.slow
def test_eight_devices(tmp_path: Path):
    output, errors = start(tmp_path).communicate()
    assert output.split() == list(CHECKS), errors


@pytest.mark.slow
def test_processes_read_what_their_devices_hold(tmp_path: Path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start(tmp_path, address, number) for number in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    for number, (output, errors) in enumerate(results):
        assert output == f"process {number} reads what it needs\n", errors
