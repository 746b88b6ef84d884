"""`glm52 selftest` as a user runs it, and whether it notices what is broken."""

import dataclasses
import functools
import getpass
import inspect
import json
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from glm52_jax.kernels.topk.api import topk_mask
from infer.selftest import command, report
from infer.selftest.checks import FAIL, PASS, SKIP, Check, CheckFailed, Passed, RunOnce, run_check, run_sections
from infer.selftest.collectives import OPERATIONS, _stated, collectives
from infer.selftest.environment import environment
from infer.selftest.kernel_cases import CASES
from infer.selftest.kernels import check_kernel, largest_difference, operations
from infer.selftest.machine import Machine
from infer.selftest.real_width import choose_size
from infer.selftest.report import SelftestReport
from infer.selftest.tiny_model import same
from infer.selftest.together import agree_between_hosts
from sharding import collectives as ours
from sharding.compiler.chips import CHIPS
from sharding.devices import memory_limit, shape_of
from sharding.hosts.process_group import ProcessGroup
from sharding.layout import Layout

SECTIONS = ["environment", "kernels", "collectives", "tiny model", "real width"]


@pytest.fixture(scope="module")
def machine() -> Machine:
    """One device, as the tests have."""
    return Machine(Layout(), Layout().mesh(jax.devices()[:1]), quick=True)


def started(*arguments: str) -> subprocess.CompletedProcess:
    words = [sys.executable, "-m", "glm52_jax.cli", "selftest", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.slow
def test_eight_devices_pass_and_the_report_tells_nothing_of_whose_they_are(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = started("--quick", "--cpu-devices", "8", "--layout", "expert=4,tensor=2", "--report", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads(path.read_text())
    assert made["passed"]
    assert made["running"] is None
    assert list(dict.fromkeys(check["section"] for check in made["checks"])) == SECTIONS
    assert {check["status"] for check in made["checks"]} == {PASS, SKIP}
    values = {(check["section"], check["name"]): check["values"] for check in made["checks"]}
    assert values["environment", "devices"]["devices"] == 8
    assert values["environment", "versions"]["jax"] == jax.__version__
    assert values["collectives", "psum over expert of 4"]["bytes per second"] > 0
    assert sum(line.startswith(("pass", "skip")) for line in done.stdout.splitlines()) == len(made["checks"])
    for name in (str(tmp_path), str(Path.home()), socket.gethostname()):
        assert name not in path.read_text()


def test_wrong_options_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for arguments, sentence in (
        (["--cpu-devices", "2", "--layout", "expert=3"], "has 1 x 3 x 1 = 3 devices, expected 2"),
        (["--report", "report.txt"], "--report report.txt: expected a name that ends in .json or .md"),
    ):
        done = started(*arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1


def broken(scores: jax.Array, k: int, *, backend: str) -> jax.Array:
    """Chooses one more than it should."""
    return topk_mask(scores, k + 1, backend=backend)


def crashing(scores: jax.Array, k: int, *, backend: str) -> jax.Array:
    raise NotImplementedError("slice is not aligned to the tile\nand much more about it")


def test_a_broken_kernel_fails_and_the_others_run(machine: Machine, tmp_path: Path) -> None:
    operation = next(operation for operation in operations() if operation.name == "topk_mask")
    case = functools.partial(CASES["topk_mask"]["tied"], "tied")
    check = functools.partial(check_kernel, operation, case, machine)
    listed = [
        Check("wrong", functools.partial(check, function=broken)),
        Check("crashing", functools.partial(check, function=crashing)),
        Check("right", check),
    ]
    path = tmp_path / "report.md"
    made = command.run({"kernels": lambda: listed}, SelftestReport({}), path, Console(quiet=True))
    assert [outcome.status for outcome in made.outcomes] == [FAIL, FAIL, PASS]
    assert made.failed
    assert "largest difference 1.0e+00, bound 0.0e+00" in made.outcomes[0].figure
    assert made.outcomes[1].figure == "NotImplementedError: slice is not aligned to the tile"
    text = path.read_text()
    assert "| kernels | crashing | FAIL |" in text
    assert "in crashing" in text  # the traceback
    assert str(Path(__file__).parent) not in text


@pytest.mark.parametrize("failing", [True, False])
def test_the_exit_code_says_whether_any_failed(monkeypatch: pytest.MonkeyPatch, failing: bool) -> None:
    def checks() -> list[Check]:
        return [Check("it", lambda: 1 / 0 if failing else Passed("well"))]

    monkeypatch.setattr(command, "sections", lambda machine: {"only": checks})
    with pytest.raises(SystemExit) as ended:
        command.selftest.main(["--json"], standalone_mode=False)
    assert ended.value.code == int(failing)


def test_a_section_that_cannot_list_its_checks_does_not_stop_the_rest() -> None:
    def absent() -> list[Check]:
        raise ModuleNotFoundError("No module named 'new_kernel'")

    outcomes = list(run_sections({"a": absent, "b": lambda: [Check("it", lambda: Passed("well"))]}))
    assert [outcome.status for outcome in outcomes] == [FAIL, PASS]
    assert "new_kernel" in outcomes[0].figure


class TwoHosts(ProcessGroup):
    """This host and one more, which failed what it is told to."""

    def __init__(self, failed: str, section: str = "it") -> None:
        super().__init__(0, ("a", "b"))
        self.failed, self.section = failed, section

    def exchange(self, value: dict) -> list[dict]:
        status = FAIL if value["name"] == self.failed else PASS
        other = value | {"section": self.section, "status": status, "figure": "ValueError: no", "traceback": "where"}
        return [value, other]


def test_what_fails_on_another_host_fails() -> None:
    listed = [Check(name, lambda: Passed("well")) for name in "ab"]
    outcomes = list(agree_between_hosts(run_sections({"it": lambda: listed}), TwoHosts("b")))
    assert [outcome.status for outcome in outcomes] == [PASS, FAIL]
    assert outcomes[1].figure == "on process 1: ValueError: no"
    assert outcomes[1].traceback == "where"
    with pytest.raises(RuntimeError, match="out of step after a failure: it: a and other: a"):
        list(agree_between_hosts(run_sections({"it": lambda: listed}), TwoHosts("b", "other")))


def test_what_needs_a_failure_is_skipped() -> None:
    made = RunOnce("the step", lambda: 1 / 0)
    outcomes = [run_check("section", Check(name, lambda: Passed(str(made())))) for name in "ab"]
    assert [outcome.status for outcome in outcomes] == [FAIL, SKIP]
    assert outcomes[1].figure == "needs the step, which failed"


def test_every_operation_and_collective_has_its_check() -> None:
    assert {operation.name for operation in operations()} == set(CASES)
    forms = {operation.name: operation.forms for operation in operations()}
    assert forms["topk_mask"] == ("reference", "cpu", "tpu")
    assert forms["topk_indices"] == ("reference", "tpu")
    functions = {name for name, f in inspect.getmembers(ours, inspect.isfunction) if f.__module__ == ours.__name__}
    assert functions - {"nontrivial_axes", "order_after"} == set(OPERATIONS)  # these two send nothing


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", ["index_topk", "compact", "kth_best", "choose_experts", "block_matmul"])
def test_kernels_for_tpus_pass_the_checks_that_they_will_meet(machine: Machine, name: str) -> None:
    """On a TPU these checks are the first to run a kernel beside its reference; here it is interpreted."""

    class Interpreted:
        backend, first = "interpret:v5p", machine.first

    operation = next(one for one in operations() if one.name == name)
    case, make = list(CASES[name].items())[-1]
    assert "interpret" in check_kernel(operation, lambda: make(case), Interpreted).figure


def test_one_device_has_nobody_to_talk_to(machine: Machine) -> None:
    for section in (environment, collectives):
        for outcome in run_sections({"it": functools.partial(section, machine)}):
            assert outcome.status in (PASS, SKIP), outcome


_WRONG_COLLECTIVES = """
import dataclasses, jax
import jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 2)
from infer.selftest.checks import Check, run_check
from infer.selftest import collectives
from infer.selftest.collectives import OPERATIONS, check_operation, check_ragged
from infer.selftest.machine import Machine
from sharding import collectives as ours
machine = Machine.of("data=2", quick=True)
late = dataclasses.replace(OPERATIONS["psum"], function=lambda layout, x, axis: ours.psum(layout, x, axis) - x % 2)
for operation in (late, OPERATIONS["psum"]):
    print(run_check("it", Check("it", lambda: check_operation(machine, "data", operation))).status)
print(run_check("it", Check("it", lambda: check_ragged(machine, "data"))).status)
right = collectives.exchange
collectives.exchange = lambda *arguments: jnp.roll(right(*arguments), 1, axis=0)
print(run_check("it", Check("it", lambda: check_ragged(machine, "data"))).status)
"""


def test_collectives_that_are_off_by_one_are_found() -> None:
    done = subprocess.run([sys.executable, "-c", _WRONG_COLLECTIVES], capture_output=True, text=True, check=False)
    assert done.stdout.split() == [FAIL, PASS, PASS, FAIL], done.stderr


def test_a_nan_or_an_infinity_is_no_small_difference() -> None:
    plain, holes = np.array([1.0, 2.0]), np.array([1.0, -np.inf])
    assert largest_difference([plain + 0.1, plain], [plain, plain], 0.1) == (pytest.approx(0.1), 0.2)
    assert largest_difference(holes, holes, 0.1)[0] == 0
    for got, expected in ((holes, plain), (plain, holes), (np.array([1.0, np.nan]), plain)):
        assert largest_difference(got, expected, 0.1)[0] == np.inf


def test_tokens_that_part_are_named() -> None:
    assert same([[1, 2]], [[1, 2]]).figure == "2 tokens equal to one device's"
    with pytest.raises(CheckFailed, match="3 of 4 tokens equal to one device's, prompt 2 is the first that differs"):
        same([[1, 2], [3, 5]], [[1, 2], [3, 4]])


def test_names_and_paths_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "pod-7.example.org")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    text = (
        'File "/home/ada/.venv/lib/python3.11/site-packages/jax/_src/api.py", line 3; '
        '"/srv/work/infer/steps.py"; /data/ada/x.json of ada on pod-7 (10.130.0.7:8476), libtpu 0.0.42.1; '
        "jit(decode)/attention/cond; https://docs.jax.dev/en/latest/x.html"
    )
    assert report.anonymous({"text": [text]})["text"][0] == (
        'File "jax/_src/api.py", line 3; "infer/steps.py"; .../x.json of NAME on NAME (ADDRESS:8476), libtpu 0.0.42.1; '
        "jit(decode)/attention/cond; https://docs.jax.dev/en/latest/x.html"
    )


@dataclasses.dataclass(frozen=True)
class Device:
    """A device as a TPU's runtime shows it, as far as the machine looks."""

    device_kind: str
    coords: tuple[int, ...]
    slice_index: int = 0
    process_index: int = 0
    platform: str = "tpu"

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": CHIPS["v5e"].hbm_bytes}


class Mesh:
    """As much of a mesh as a machine asks."""

    def __init__(self, devices: list[Device], layout: Layout) -> None:
        self.devices = np.array(devices, object)
        self.shape = {"data": layout.data, "expert": layout.expert, "tensor": layout.tensor}


@pytest.mark.parametrize(
    ("kind", "extent", "cores", "name"),
    [
        ("TPU v5 lite", (4, 4, 1), 1, "v5e:4x4"),
        ("TPU v5p", (2, 2, 2), 1, "v5p:2x2x2"),
        ("TPU v5", (2, 2, 3), 1, None),
        ("TPU7x", (2, 2, 1), 2, "tpu7x:2x2x1"),
        ("TPU v9", (2, 2, 1), 1, None),
    ],
)
def test_slices_are_recognised(kind: str, extent: tuple[int, ...], cores: int, name: str | None) -> None:
    places = [place for place in np.ndindex(*extent) for _ in range(cores)]
    assert shape_of(places) == extent
    layout = Layout(expert=len(places))
    made = Machine(layout, Mesh([Device(kind, place) for place in places], layout))
    assert (made.topology.name if made.topology else None) == name


@pytest.mark.parametrize(
    ("kind", "extent", "cores", "layout", "axis", "stated"),
    [
        ("TPU v5p", (4, 4, 4), 1, Layout(expert=16, tensor=4), "tensor", 200e9),
        ("TPU v5p", (4, 4, 4), 1, Layout(expert=16, tensor=4), "expert", 400e9),
        ("TPU v5p", (2, 2, 2), 1, Layout(expert=4, tensor=2), "tensor", 100e9),
        ("TPU v5 lite", (4, 4, 1), 1, Layout(expert=4, tensor=4), "expert", 50e9),
        ("TPU7x", (2, 2, 1), 2, Layout(expert=4, tensor=2), "tensor", 0.0),
        ("TPU7x", (2, 2, 1), 2, Layout(expert=4, tensor=2), "expert", 100e9),
        ("TPU v5", (2, 2, 3), 1, Layout(expert=12), "expert", 600e9),
    ],
)
def test_rates_are_held_against_the_links_that_an_axis_has(
    kind: str, extent: tuple[int, ...], cores: int, layout: Layout, axis: str, stated: float
) -> None:
    places = [place for place in np.ndindex(*extent) for _ in range(cores)]
    made = Machine(layout, Mesh([Device(kind, place) for place in places], layout))
    assert made.chip is not None
    assert _stated(made, made.chip, axis)[0] == stated


def test_memory_of_a_device_of_another_process_is_that_of_an_own_one() -> None:
    """The first device of a mesh over several hosts is on one of them only, and JAX raises when another asks it."""
    assert memory_limit(Device("TPU v5 lite", (0, 0, 0))) == CHIPS["v5e"].hbm_bytes
    assert memory_limit(Device("TPU v5 lite", (0, 0, 0), process_index=1)) is None  # a CPU does not say


def test_real_widths_are_as_large_as_the_memory_allows() -> None:
    layout = Layout(expert=16)
    made = Machine(layout, Mesh([Device("TPU v5 lite", place) for place in np.ndindex(4, 4, 1)], layout))
    size = choose_size(made)
    assert size.config.n_routed_experts == 256
    assert size.layout is layout
    assert size.memory_breakdown.total < 0.6 * CHIPS["v5e"].hbm_bytes
    alone = Layout()
    one = choose_size(Machine(alone, Mesh([Device("TPU v5 lite", (0, 0, 0))], alone)))
    assert 8 <= one.config.n_routed_experts < 40
