"""Several processes as several hosts: the texts of one process, and an end in one sentence whatever goes wrong.

What the processes do is in `on_several_hosts`, or it is the program itself.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from jax._src.clusters import cloud_tpu_cluster

from glm52_jax.checkpoint.load.loader import load_params
from glm52_jax.config import BUILT_IN
from infer.commands import on_hosts
from sharding.errors import InputError
from sharding.hosts import process_group
from sharding.hosts.process_group import ALONE, ProcessAddress
from sharding.layout import Layout
from tests.quick_flags import with_devices

ROOT = Path(__file__).parents[2]
START = 20.0
"""Seconds that a start may take here, where nothing is wrong; several times what it takes on an idle machine."""
SLACK = 15.0
"""Seconds beyond a stated limit, for Python and JAX to be imported on a busy machine."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.fixture(autouse=True, scope="module")
def heeding_interrupts() -> Iterator[None]:
    """What is started in the background of a shell ignores Ctrl-C, and hands that on to what it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Process:
    """A process, the time it took, and what it said."""

    port = 0

    def __init__(self, command: Sequence[str], devices: int = 1, cwd: Path = ROOT, **environment: str):
        surroundings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": with_devices(devices), "PYTHONPATH": str(ROOT)}
        self.begin, self.errors, self.output = time.monotonic(), "", ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=cwd,
            env=os.environ | surroundings | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, seconds: float) -> int:
        try:
            output, self.errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, self.errors = self.process.communicate()
            pytest.fail(f"still there after {seconds} s: {self.errors}")
        self.output += output
        self.seconds = time.monotonic() - self.begin
        return self.process.returncode

    def says(self, sentence: str, seconds: float) -> None:
        """It ends with that sentence as its only error, and no stack of anything."""
        assert self.end(seconds) == 2, self.errors
        lines = [line for line in self.errors.splitlines() if line.startswith("glm52: ")]
        assert len(lines) == 1, self.errors
        assert sentence in lines[0]
        assert "Traceback" not in self.errors
        assert "stack trace" not in self.errors
        print(f"{self.seconds:.1f} s: {lines[0]}")


def tasks(
    count: int,
    task: str,
    checkpoint: object = "",
    layout: str = "none",
    devices: int = 1,
    silence: float = 10,
    start: float = START,
    late: float = 0,
) -> list[Process]:
    """Processes of `on_several_hosts`; the last comes later."""
    port, found = free_port(), []
    for number in range(count):
        if number == count - 1:
            time.sleep(late)
        place = {
            "GLM52_COORDINATOR": f"localhost:{port}",
            "GLM52_PROCESSES": str(count),
            "GLM52_PROCESS": str(number),
        }
        command = ["tests.infer.on_several_hosts", task, str(checkpoint), layout, str(start), str(silence)]
        found.append(Process(command, devices, **place))
        found[-1].port = port
    return found


def wait_for(processes: Sequence[Process], word: str) -> None:
    for process in processes:
        assert process.process.stdout is not None
        while word not in (line := process.process.stdout.readline()):
            assert line, process.end(1) or process.errors


def glm52(*arguments: object, cwd: Path = ROOT) -> Process:
    return Process(["glm52_jax.cli", *map(str, arguments)], cwd=cwd)


def generating(checkpoint: object, port: int, processes: int, process: int, *more: str, **where: Path) -> Process:
    place = ("--coordinator", f"localhost:{port}", "--processes", processes, "--process", process)
    return glm52("generate", checkpoint, "Hello", *place, *more, **where)


# The same texts.


def same_texts(checkpoint: Path, task: str, count: int, devices: int, layout: str) -> None:
    (one,) = tasks(1, task, checkpoint)
    assert one.end(300) == 0, one.errors
    several = tasks(count, task, checkpoint, layout, devices, late=1, silence=60, start=60)
    codes = [process.end(600) for process in several]
    assert codes == [0] * count, [process.errors for process in several]
    assert several[0].output == one.output
    assert len(one.output) > 50
    for silent in several[1:]:
        assert (silent.output, silent.errors) == ("", "")


@pytest.mark.slow
def test_two_hosts_make_the_texts_of_one(checkpoint: Path) -> None:
    """Generate and chat, greedy with drafts, with a host that comes late; a Ctrl-C ends an answer on both."""
    same_texts(checkpoint, "texts", 2, 2, "data=1,expert=2,tensor=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "devices", "layout"),
    [(1, 4, "latency"), (2, 1, "none"), (4, 1, "none"), (4, 2, "data=1,expert=4,tensor=2")],
)
def test_any_hosts_make_the_texts_of_one(checkpoint: Path, count: int, devices: int, layout: str) -> None:
    """Several prompts too; without drafts, and sampled with and without."""
    same_texts(checkpoint, "more texts", count, devices, layout)


@pytest.mark.slow
def test_the_program_on_two_hosts(checkpoint: Path) -> None:
    """Flags and all, as in the documents."""
    flags = ("-n", "8", "--ignore-eos", "--layout", "latency")
    one = glm52("generate", checkpoint, "Hello", *flags[:3])
    port = free_port()
    two = [generating(checkpoint, port, 2, number, *flags) for number in range(2)]
    assert [process.end(300) for process in (one, *two)] == [0, 0, 0], [process.errors for process in two]
    assert two[0].output == one.output
    assert two[1].output == two[1].errors == ""


# Starts that fail: one sentence everywhere, within the time.


def test_a_host_that_never_comes(checkpoint: Path) -> None:
    port = free_port()
    here = [generating(checkpoint, port, 3, number, "--start-timeout", "4") for number in (0, 2)]
    for process in here:
        process.says(f"process 1 of 3 did not come to localhost:{port} within 4 s (--start-timeout)", 4 + SLACK)


@pytest.mark.slow
def test_a_wrong_address(checkpoint: Path) -> None:
    port, other = free_port(), free_port()
    first = generating(checkpoint, port, 2, 0, "--start-timeout", "4")
    second = generating(checkpoint, other, 2, 1, "--start-timeout", "4")
    first.says("process 1 of 2 did not come", 4 + SLACK)
    second.says(
        f"process 1 did not reach process 0 at localhost:{other} within 4 s (--start-timeout): connection refused",
        SLACK,
    )


@pytest.mark.slow
def test_another_service_at_the_address(checkpoint: Path) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        lost = generating(checkpoint, port, 2, 1, "--start-timeout", "10")
        first = generating(checkpoint, port, 2, 0, "--start-timeout", "10")
        connection, _ = server.accept()
        connection.sendall(b"SSH-2.0-OpenSSH\r\n")
        lost.says(f"localhost:{port} is another service", SLACK)
        first.says(f"process 0 cannot listen on port {port} of localhost:{port}: Address already in use", SLACK)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("places", "sentence"),
    [
        (((3, 0), (3, 1), (3, 1)), "two processes have the number 1, on "),
        (((3, 0), (2, 1)), "was started with 2 processes, process 0 with 3"),
        (((2, 0, "--seed", "3"), (2, 1, "--seed", "4")), "has --seed 4, process 0 has 3"),
    ],
    ids=["the same number", "another count", "another flag"],
)
def test_hosts_that_disagree(checkpoint: Path, places: Sequence[tuple], sentence: str) -> None:
    port = free_port()
    found = [generating(checkpoint, port, *place, "--start-timeout", str(START)) for place in places]
    for process in found:
        process.says(sentence, START)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("task", "sentence", "start"),
    [
        ("dies", ") ended before the end, without a word", START),
        ("stalls", "the devices of all 2 processes were not up within 6 s (--start-timeout)", 6.0),
    ],
)
def test_a_host_that_dies_or_stops_at_the_start(task: str, sentence: str, start: float) -> None:
    """After the roll call, while the others wait in JAX."""
    first, second = tasks(2, task, start=start, silence=30)
    first.says(sentence, start + SLACK)
    assert second.end(SLACK) in (2, 9)


@pytest.mark.slow
def test_hosts_with_other_files(checkpoint: Path, tmp_path: Path) -> None:
    """The same path, but another checkpoint there, or one that is damaged."""
    copies = [tmp_path / str(number) / "model" for number in range(2)]
    for copy in copies:
        copy.mkdir(parents=True)
        for file in checkpoint.iterdir():
            (copy / file.name).write_bytes(file.read_bytes())
    weights = next(copies[1].glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[:8] = b"\xff" * 8
    weights.write_bytes(content)

    def both() -> list[Process]:
        port = free_port()
        return [generating("model", port, 2, n, cwd=copy.parent) for n, copy in enumerate(copies)]

    first, second = both()
    second.says("model/model.safetensors", START + SLACK)
    first.says("process 1 (", START + SLACK)
    assert "model/model.safetensors" in first.errors
    config = copies[1] / "config.json"
    config.write_text(config.read_text() + "\n")
    for process in both():
        process.says("the checkpoint in model differs: ", START + SLACK)


# A run that began.


def test_hosts_that_trace_different_programs() -> None:
    for process in tasks(2, "programs"):
        process.says("the traced program of a step of tokens differs: ", START + SLACK)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("victim", "send", "sentence", "limit"),
    [
        (0, signal.SIGKILL, "process 0 (", 3.0),
        (1, signal.SIGKILL, "process 1 (", 3.0),
        (1, signal.SIGSTOP, ") has not been heard for 4 s", 4.0 + 3.0),
        (1, signal.SIGINT, "): was interrupted", 3.0),
    ],
)
def test_a_host_that_is_lost(victim: int, send: signal.Signals, sentence: str, limit: float) -> None:
    """The others are deep in a collective."""
    found = tasks(3, "collectives", silence=4)
    wait_for(found, "up")
    found[victim].process.send_signal(send)
    begin = time.monotonic()
    for number, process in enumerate(found):
        if number != victim:
            process.says(sentence, limit + SLACK)
            assert time.monotonic() - begin < limit + 2
    print(f"{send.name} of {victim}: {time.monotonic() - begin:.1f} s")
    found[victim].process.kill()
    found[victim].process.communicate()


@pytest.mark.slow
def test_a_host_too_many(checkpoint: Path) -> None:
    """A second process 1, when the run has begun."""
    found = tasks(2, "collectives")
    wait_for(found, "up")
    late = generating(checkpoint, found[0].port, 2, 1, "--start-timeout", str(START))
    late.says("when all 2 processes of that run had come", SLACK)
    assert [process.process.poll() for process in found] == [None, None]
    for process in found:
        process.process.kill()
        process.process.communicate()


# Where the flags come from.

find_place = partial(process_group.find_address, program="glm52")
join = partial(process_group.join, program="glm52")


def test_one_host_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert join() is ALONE
    assert join(processes=1) is ALONE
    assert find_place(None, None, None) is None
    monkeypatch.setenv("GLM52_PROCESSES", "1")
    assert find_place("somewhere:1", None, None) is None
    with ALONE as alone:
        assert (alone.first, alone.exchange(3), alone.tell("x")) == (True, [3], "x")


def test_flags_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "jax:1")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "8")
    monkeypatch.setenv("JAX_PROCESS_ID", "7")
    assert find_place(None, None, None) == ProcessAddress("jax:1", 8, 7)
    monkeypatch.setenv("GLM52_COORDINATOR", "ours:1")
    monkeypatch.setenv("GLM52_PROCESS", "6")
    assert find_place(None, None, None) == ProcessAddress("ours:1", 8, 6)
    assert find_place("flag:2", 4, 0) == ProcessAddress("flag:2", 4, 0)


def on_tpu(monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(process_group, "_platforms", lambda: "tpu,cpu")
    defaults = {"TPU_SKIP_MDS_QUERY": "1", "MEGASCALE_COORDINATOR_ADDRESS": "", "MEGASCALE_NUM_SLICES": ""}
    for name, value in (defaults | {"MEGASCALE_SLICE_ID": ""} | environment).items():
        monkeypatch.setenv(name, value)


def test_tpu_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GKE states it: one host, four hosts, two slices of two."""
    on_tpu(monkeypatch, TPU_WORKER_HOSTNAMES="localhost", TPU_WORKER_ID="0")
    assert find_place(None, None, None) is None
    on_tpu(monkeypatch, TPU_WORKER_HOSTNAMES="localhost,b,c,d", TPU_WORKER_ID="2")
    assert find_place(None, None, None) == ProcessAddress("localhost:8482", 4, 2)
    slices = {"MEGASCALE_COORDINATOR_ADDRESS": "localhost", "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1"}
    on_tpu(monkeypatch, TPU_WORKER_HOSTNAMES="x,y", TPU_WORKER_ID="1", **slices)
    assert find_place(None, None, None) == ProcessAddress("localhost:8482", 4, 3)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: find_place(None, 2, None),
            "--coordinator is not stated (GLM52_COORDINATOR or JAX_COORDINATOR_ADDRESS",
        ),
        (lambda: find_place("a:1", 2, 2), "--process is 2, expected 0 to 1, since --processes is 2"),
        (lambda: find_place("a:1", 0, 0), "--processes is 0, expected at least 1"),
        (lambda: join("nowhere", 2, 1), "--coordinator is 'nowhere', expected HOST:PORT"),
        (lambda: join("a:99999", 2, 1), "--coordinator is 'a:99999', expected HOST:PORT"),
        (lambda: join(start_seconds=0), "--start-timeout is 0, expected a number of seconds above 0"),
    ],
)
def test_wrong_flags(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert sentence in str(caught.value)


def test_the_first_of_a_preset_that_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads: `tensor` of 16 is the second candidate of `latency` for 16 devices, and divides nothing."""
    config = BUILT_IN["glm-5.2-tiny"]
    monkeypatch.setattr(on_hosts.jax, "device_count", lambda: 4)
    assert on_hosts.choose_layout("latency", config, "keep", ALONE).tensor == 4
    assert on_hosts.choose_layout("throughput", config, "keep", ALONE).expert == 4
    assert on_hosts.choose_layout(None, config, "keep", ALONE).devices == 1
    monkeypatch.setattr(on_hosts.jax, "device_count", lambda: 64)
    assert on_hosts.choose_layout("long_context", config, "keep", ALONE).tensor < 64
    with pytest.raises(InputError, match="does not divide"):
        on_hosts.choose_layout("data=1,expert=1,tensor=64", config, "keep", ALONE)


def test_layout_or_shardings(checkpoint: Path) -> None:
    with pytest.raises(InputError, match="layout and shardings are both given"):
        load_params(checkpoint, layout=Layout(tensor=2), shardings=lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs 1024 devices, found "):
        load_params(checkpoint, layout=Layout(data=1024))


def test_an_error_of_the_machine_ends_every_host_with_the_same_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on one host, and not with a traceback beside the name of a Python class."""
    told: list[str] = []

    class Line:
        def fail(self, sentence: str, **_: object) -> None:
            told.append(sentence)

    def end(sentence: str, board: object = None) -> None:
        told.append(sentence)
        raise SystemExit(2)

    monkeypatch.setattr(process_group, "_REASON_SECONDS", 0.0)
    monkeypatch.setattr(process_group, "_end", end)
    joined = process_group.ProcessGroup(1, ("a", "b"), Line())
    with pytest.raises(SystemExit), joined:
        raise OSError(28, "No space left on device", "trace")
    assert told == ["trace: No space left on device"] * 2
