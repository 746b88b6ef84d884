"""Several hosts as one run: found by flags, environment or TPU metadata, started within a stated time, ended together.

    with join(coordinator="10.0.0.2:8476", processes=4, process=1, same={"model": name}) as hosts:
        ...                       # jax.devices() are those of all hosts

On a single host this does nothing. On several, a host that is missing, disagrees, fails or is lost ends every process
with one sentence (`rendezvous`, `rendezvous_server`), however deep in a collective the others are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import Any, NoReturn

import jax

from sharding.errors import InputError, sentence
from sharding.hosts.rendezvous import RendezvousClient, RendezvousSettings, listed
from sharding.hosts.rendezvous_server import RendezvousServer

START_SECONDS = 300.0
"""Time for all hosts to come and bring their devices up, unless another is stated."""

SILENCE_SECONDS = 60.0
"""A host without a sign of life for this long is lost; one whose process ends is noticed at once."""

_JAX_LATER_SECONDS = 60
"""JAX's own heartbeats end a process with a stack dump; they come into play this much later."""

_BOARD_SECONDS = 2.0
"""Process 0 waits so long for the others to be told, since its end takes the board with it."""

_REASON_SECONDS = 3.0
"""What a lost host breaks may be seen before the sentence that says so arrives."""

_NO_PROXY = "no_grpc_proxy"

VARIABLES = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
"""JAX's environment variables that stand for a flag. Those of the program, such as NAME_PROCESS, come before them."""


@dataclasses.dataclass(frozen=True)
class ProcessAddress:
    """Where this process is among the processes of a run."""

    coordinator: str
    processes: int
    process: int


class _EveryonesError(InputError):
    """What all processes find at once."""


class ProcessGroup:
    """The processes of a run. Leaving the `with` block ends the run on all of them.

    Attributes:
        process, processes: this one's number, and how many there are.
        names: of each process's machine.
    """

    def __init__(
        self,
        process: int = 0,
        names: tuple[str, ...] = ("this host",),
        line: RendezvousClient | None = None,
        board: RendezvousServer | None = None,
    ):
        self.process, self.processes, self.names = process, len(names), names
        self._line, self._board = line, board

    @property
    def first(self) -> bool:
        """Whether this process is the one that reads and prints."""
        return self.process == 0

    def exchange(self, value: Any) -> list[Any]:
        """What every process gave, in order: plain JSON values. All call it together."""
        return self._line.exchange(value) if self._line else [value]

    def tell(self, value: Any) -> Any:
        """The value that process 0 gave, a plain JSON one. All call it together; process 0 does not wait."""
        return self._line.tell(value) if self._line else value

    def agree(self, what: str, value: str) -> None:
        """Refuses to go on where processes have not the same value.

        Args:
            what: it is, for the error.

        Raises:
            InputError: naming the process that has another value than process 0.
        """
        for process, other in enumerate(values := self.exchange(value)):
            if other != values[0]:
                raise _EveryonesError(
                    f"{what} differs: {other} on process {process} ({self.names[process]}), {values[0]} on process 0 "
                    f"({self.names[0]})"
                )

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        if self._line is None:
            return
        if error is not None:
            self._fail(self._line, error)
        self._line.exchange("through")
        # Before the connections are closed, since JAX's way to its coordinator is one of them.
        jax.distributed.shutdown()
        self._line.leave(self._line.terms.silence)
        _current = ALONE

    def _fail(self, line: RendezvousClient, error: BaseException) -> NoReturn:
        """Ends this process and, by a last word, the others; Python's own way out would wait for them."""
        if isinstance(error, InputError):
            line.fail(str(error), everyones=isinstance(error, _EveryonesError))
            _end(str(error), self._board)
        if isinstance(error, Exception):
            time.sleep(_REASON_SECONDS)
        said = None if isinstance(error, BrokenPipeError) else sentence(error)
        if said is not None:
            line.fail(said)
            _end(said, self._board)
        interrupted = isinstance(error, KeyboardInterrupt)
        line.fail("was interrupted" if interrupted else f"{type(error).__name__}: {error}".splitlines()[0])
        if not isinstance(error, KeyboardInterrupt | BrokenPipeError | SystemExit):
            traceback.print_exception(error)
        if self._board is not None:
            self._board.ended.wait(_BOARD_SECONDS)
        code = error.code if isinstance(error, SystemExit) else 130 if interrupted else 1
        _exit(code if isinstance(code, int) else 1)


ALONE = ProcessGroup()
"""A run of one process."""

_current: ProcessGroup = ALONE


def current() -> ProcessGroup:
    """The hosts that this process has joined; `ALONE` when none."""
    return _current


def join(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    same: Mapping[str, str] | None = None,
    start_seconds: float = START_SECONDS,
    silence_seconds: float = SILENCE_SECONDS,
    program: str = "",
) -> ProcessGroup:
    """Joins the other hosts, before JAX's devices are used; nothing on a single host.

    What is None is read from environment variables, see `VARIABLES`, or, when nothing is stated at all, from the
    metadata of a TPU of several hosts (Cloud TPU or GKE, slices of several too).

    Args:
        coordinator: HOST:PORT of process 0, which all hosts reach; JAX's coordinator is reached there too.
        processes, process: how many there are, and this one's number, from 0.
        same: what must be equal on every host, by name; the versions of the packages are compared too.
        start_seconds: within which every host has come and its devices are up, by each process's own clock.
        silence_seconds: after which a host that gives no sign of life is lost.
        program: Name of the program, for its environment variables and at the start of the last sentence.

    Raises:
        InputError: a flag is wrong or missing, or not every host came, or one has other flags; within `start_seconds`.
            After that the process is ended, with code 2 and a sentence on standard error, when another host is.
    """
    global _current, _program
    _program = program
    deadline = time.monotonic() + start_seconds
    for name, value in (("--start-timeout", start_seconds), ("--host-timeout", silence_seconds)):
        if not value > 0:
            raise InputError(f"{name} is {value:g}, expected a number of seconds above 0")
    place = find_address(coordinator, processes, process, start_seconds, program=program)
    if place is None or place.processes == 1:
        return ALONE
    if _current is not ALONE:
        raise InputError("this process has joined other hosts already, expected once")
    host, port = _address(place.coordinator)
    terms = RendezvousSettings(
        host=host,
        port=port,
        process=place.process,
        processes=place.processes,
        same={"JAX": jax.__version__, **(same or {})},
        deadline=deadline,
        limit=start_seconds,
        silence=silence_seconds,
    )
    board, service = None, 0
    if place.process == 0:
        service = _free_port()
        board = RendezvousServer(terms, service)
    try:
        line = RendezvousClient(terms, platform.node() or "unnamed", lambda sentence: _end(sentence, board))
    except InputError as error:
        if board is not None:
            board.stop(str(error))
        raise
    hosts = ProcessGroup(place.process, line.names, line, board)
    try:
        with _time_limit(line, board):
            _start_jax(terms, service or line.relay_port(), service)
            # Nobody goes on before the slowest has its devices.
            hosts.exchange("up")
    except BaseException as error:
        hosts._fail(line, error)
    _current = hosts
    return hosts


def find_address(
    coordinator: str | None,
    processes: int | None,
    process: int | None,
    start_seconds: float = START_SECONDS,
    *,
    program: str = "",
) -> ProcessAddress | None:
    """What flags, environment or TPU metadata say, in this order; None on a single host.

    Args:
        coordinator, processes, process, program: As for `join`.
        start_seconds: Seconds within which the first host of a TPU has to be found.

    Raises:
        InputError: a part is missing, or no number.
    """
    stated: dict[str, Any] = {
        "coordinator": coordinator or _variable("coordinator", program),
        "processes": _variable_number("processes", program) if processes is None else processes,
        "process": _variable_number("process", program) if process is None else process,
    }
    if all(value is None for value in stated.values()):
        return _from_metadata(start_seconds)
    if stated["processes"] == 1:
        return None
    missing = [name for name, value in stated.items() if value is None]
    if missing:
        names = " or ".join(_variables(missing[0], program))
        raise InputError(
            f"--{missing[0]} is not stated ({names} neither), expected --coordinator, --processes and --process for "
            "several hosts"
        )
    place = ProcessAddress(**stated)
    if place.processes < 1:
        raise InputError(f"--processes is {place.processes}, expected at least 1")
    if not 0 <= place.process < place.processes:
        raise InputError(
            f"--process is {place.process}, expected 0 to {place.processes - 1}, since --processes is {place.processes}"
        )
    return place


def _variables(field: str, program: str) -> tuple[str, ...]:
    own = (f"{program.upper()}_{field.upper()}",) if program else ()
    return (*own, VARIABLES[field])


def _variable(field: str, program: str) -> str | None:
    return next((os.environ[name] for name in _variables(field, program) if os.environ.get(name)), None)


def _variable_number(field: str, program: str) -> int | None:
    text = _variable(field, program)
    if text is not None and not text.isdecimal():
        name = next(name for name in _variables(field, program) if os.environ.get(name))
        raise InputError(f"the environment variable {name} is {text!r}, expected a number")
    return None if text is None else int(text)


def _platforms() -> str | None:
    return jax.config.jax_platforms  # type: ignore[missing-attribute]


def _from_metadata(start_seconds: float) -> ProcessAddress | None:
    """JAX knows how to ask a TPU's surroundings, and that there are none; it does not say so in public."""
    platforms = _platforms()
    if platforms and "tpu" not in platforms:
        return None
    from jax._src.clusters import GceTpuCluster, GkeTpuCluster

    for cluster in (GceTpuCluster, GkeTpuCluster):
        if not cluster.is_env_present():
            continue
        if cluster.get_process_count() == 1:
            return None
        try:
            address = cluster.get_coordinator_address(int(start_seconds), os.environ.get("JAX_COORDINATOR_PORT"))
        except RuntimeError as error:
            raise InputError(f"the first host of this TPU was not found {start_seconds:g} s long: {error}") from None
        return ProcessAddress(address, cluster.get_process_count(), cluster.get_process_id())
    return None


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"--coordinator is {text!r}, expected HOST:PORT of the host of process 0")
    return host, int(port)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def _start_jax(terms: RendezvousSettings, port: int, service: int) -> None:
    """JAX's coordinator listens on process 0's own machine only; others reach it by the roll call's port."""
    if any(name.lower().endswith("_proxy") for name in os.environ):
        # A proxy in the environment is not for a machine's own addresses, which JAX would only warn of.
        os.environ[_NO_PROXY] = "127.0.0.1"
        jax.config.update("jax_check_proxy_envs", False)
    later = int(terms.silence) + _JAX_LATER_SECONDS
    try:
        jax.distributed.initialize(
            f"127.0.0.1:{port}",
            terms.processes,
            terms.process,
            cluster_detection_method="deactivate",
            coordinator_bind_address=f"127.0.0.1:{service}" if service else None,
            # The time limit around this comes first, and with a better sentence.
            initialization_timeout=int(terms.limit) + _JAX_LATER_SECONDS,
            heartbeat_timeout_seconds=later,
            shutdown_timeout_seconds=later,
        )
        jax.local_devices()
    except RuntimeError as error:
        raise InputError(f"JAX did not start on process {terms.process}: {str(error).splitlines()[0]}") from error


@contextlib.contextmanager
def _time_limit(line: RendezvousClient, board: RendezvousServer | None) -> Generator[None]:
    """Ends the process when the block has not ended by the deadline, since nothing in it can be interrupted."""

    def end() -> None:
        terms = line.terms
        behind = board.behind() if board is not None else []
        who = f"{listed(behind)} of" if 0 < len(behind) < terms.processes else "all"
        sentence = f"the devices of {who} {terms.processes} processes were not up {terms.within}"
        line.fail(sentence, everyones=True)
        _end(sentence, board)

    # Process 0 may know who is behind, so it speaks first where all began together.
    timer = threading.Timer(max(line.terms.left, 1.0) + (1.0 if board is None else 0.0), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(sentence: str, board: RendezvousServer | None = None) -> NoReturn:
    """One sentence on standard error and the end of the process, from whichever thread."""
    if not _ending.acquire(blocking=False):
        threading.Event().wait()  # another thread says it already
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{_program}: {sentence}\n" if _program else f"{sentence}\n")
    if board is not None:
        board.ended.wait(_BOARD_SECONDS)
    _exit(2)


_program = ""
_ending = threading.Lock()


def _exit(code: int) -> NoReturn:
    # Python's own end would run JAX's shutdown, which waits for hosts that are gone and then aborts.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
