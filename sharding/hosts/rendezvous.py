"""Who is there: one TCP connection from every process of a run to its first, from before JAX starts until the end.

JAX's own coordinator does not name a host that never comes, aborts with a stack dump where one dies, and notices that
only after its heartbeats. So the processes meet here first: process 0 keeps a `rendezvous_server.Board`, every
process a `RendezvousClient` to it. A process that is missing, comes twice, disagrees or goes away later is named to all
others within a stated time. Messages are lines of JSON. It must not know JAX: the coordinator's traffic is passed
through as bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sharding.errors import InputError

PROTOCOL = "hosts 1"
"""Said first on a connection, so that neither side takes another service for one of its own."""

HEARTBEATS = 4
"""Signs of life in the time after which a silent host counts as lost."""

_LINE_BYTES = 1 << 24
RETRY_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class RendezvousSettings:
    """What a process states when it comes.

    Attributes:
        host, port: where process 0 is.
        process, processes: its number, and how many there are.
        same: what must be equal on all processes, by name.
        deadline: `time.monotonic()` at which the start must be complete.
        limit: the seconds that this deadline stands for.
        silence: seconds without a sign of life after which a host counts as lost.
    """

    host: str
    port: int
    process: int
    processes: int
    same: Mapping[str, str]
    deadline: float
    limit: float
    silence: float

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    @property
    def within(self) -> str:
        return f"within {self.limit:g} s (--start-timeout)"


class Connection:
    """Lines of JSON over a socket."""

    def __init__(self, sock: socket.socket):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self.reader, self._lock = sock, sock.makefile("rb"), threading.Lock()

    def send(self, **message: Any) -> None:
        """Whoever is gone is noticed by the reader, not here."""
        with self._lock, contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; None at the end of the connection.

        Raises:
            TimeoutError: nothing came.
            ValueError: no message of ours.
        """
        self.socket.settimeout(seconds)
        try:
            line = self.reader.readline(_LINE_BYTES)
        except TimeoutError:
            raise
        except OSError:
            return None
        if not line:
            return None
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"{message!r} is no message")
        return message

    def close(self) -> None:
        # Shut down first: a reader in another thread keeps the descriptor open.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self.socket.close()


class RendezvousClient:
    """A process's connection to the board.

    Attributes:
        names: of every process's machine.

    Args:
        terms: of this process.
        name: of this machine.
        lost: called with a sentence, in another thread, when the run cannot go on.

    Raises:
        InputError: the board is not there, or not everybody came to it, within the time; or it refuses.
    """

    def __init__(self, terms: RendezvousSettings, name: str, lost: Callable[[str], None]):
        self.terms, self._lost = terms, lost
        self._inbox: queue.Queue[tuple[str, Any]] = queue.Queue()
        self._through = threading.Event()
        self._leaving = False
        self._connection, self.names = self._come(name)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def _come(self, name: str) -> tuple[Connection, tuple[str, ...]]:
        terms, reason = self.terms, "no answer"
        hello = {"process": terms.process, "processes": terms.processes, "same": dict(terms.same), "name": name}
        while terms.left > 0:
            try:
                sock = socket.create_connection((terms.host, terms.port), timeout=min(terms.left, 5))
            except OSError as error:
                # A name that is unknown may be known later: the hosts of a cluster get theirs while they start.
                reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
                time.sleep(RETRY_SECONDS)
                continue
            connection = Connection(sock)
            connection.send(form=PROTOCOL, hello=hello)
            names = self._wait_for_all(connection)
            if names is not None:
                return connection, names
            connection.close()
            reason = "the connection was closed"
            time.sleep(RETRY_SECONDS)
        itself = " itself" if terms.process == 0 else ""
        raise InputError(
            f"process {terms.process} did not reach process 0{itself} at {terms.address} {terms.within}: "
            f"{reason[:1].lower()}{reason[1:]}; expected the address of the host of process 0"
        )

    def _wait_for_all(self, connection: Connection) -> tuple[str, ...] | None:
        """Everyone's machine, when all have come; None where there is no board yet."""
        terms, missing = self.terms, None
        while True:
            try:
                # Process 0's own sentence comes first, if it began at the same time.
                message = connection.receive(max(terms.left + (0.5 if missing is not None else 0), 0.01))
            except TimeoutError:
                if missing is None:
                    raise InputError(
                        f"{terms.address} did not answer {terms.within}, though it takes connections; expected the "
                        "address of the host of process 0"
                    ) from None
                sentence = absent(terms, missing)
                connection.send(failed=sentence, everyones=True)
                raise InputError(sentence) from None
            except ValueError:
                raise InputError(
                    f"{terms.address} is another service, expected the address of the host of process 0 and a port "
                    "that nothing else uses"
                ) from None
            if message is None:
                if missing is None:
                    return None
                raise InputError(f"process 0 ({terms.address}) ended at the start, without a word")
            if "end" in message:
                raise InputError(message["end"])
            if "welcome" in message:
                return tuple(message["welcome"])
            missing = message.get("missing", missing)
            if missing is not None and terms.left < -0.4:
                sentence = absent(terms, missing)
                connection.send(failed=sentence, everyones=True)
                raise InputError(sentence)

    def _listen(self) -> None:
        first = f"process 0 ({self.names[0]})"
        while True:
            try:
                message = self._connection.receive(self.terms.silence)
            except (TimeoutError, ValueError):
                self._lose(silent(0, self.names[0], self.terms.silence))
                return
            if message is None:
                self._lose(f"{first} ended before the end, without a word")
                return
            if "end" in message:
                self._lose(message["end"])
            elif "through" in message:
                self._through.set()
                return
            for kind in ("values", "told"):
                if kind in message:
                    self._inbox.put((kind, message[kind]))

    def _beat(self) -> None:
        while not self._through.wait(self.terms.silence / HEARTBEATS):
            self._connection.send(beat=1)

    def _lose(self, sentence: str) -> None:
        if not self._leaving:
            self._lost(sentence)

    def exchange(self, value: Any) -> list[Any]:
        """What every process gave, in order; all call it together."""
        self._connection.send(value=value)
        return self._take("values")

    def tell(self, value: Any) -> Any:
        """The value of process 0; all call it together, and process 0 does not wait."""
        if self.terms.process == 0:
            self._connection.send(tell=value)
            return value
        return self._take("told")

    def _take(self, expected: str) -> Any:
        kind, value = self._inbox.get()
        if kind != expected:
            raise InputError(f"process 0 did something else at this point ({kind}, expected {expected})")
        return value

    def leave(self, seconds: float) -> None:
        """Says that this process is through, and waits for the others."""
        self._connection.send(through=1)
        self._through.wait(seconds)
        self._leaving = True
        self._connection.close()

    def fail(self, sentence: str, *, everyones: bool = False) -> None:
        """Says why this process ends before the end; `everyones` where it is not its own fault alone."""
        self._leaving = True
        self._connection.send(failed=sentence, everyones=everyones)

    def relay_port(self) -> int:
        """A port of this machine that leads to JAX's coordinator.

        When process 0 is gone, connections to it stay open: JAX would abort the process where one is closed.
        """
        listener = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=self._accept_relays, args=(listener,), daemon=True).start()
        return listener.getsockname()[1]

    def _accept_relays(self, listener: socket.socket) -> None:
        while True:
            near = Connection(listener.accept()[0])
            try:
                sock = socket.create_connection((self.terms.host, self.terms.port), timeout=5)
            except OSError:
                near.close()
                continue
            far = Connection(sock)
            far.send(form=PROTOCOL, relay=True)
            threading.Thread(target=relay, args=(near, far), kwargs={"hold": True}, daemon=True).start()


def relay(near: Connection, far: Connection, *, hold: bool = False) -> None:
    """Passes bytes both ways until either side ends; `hold` keeps the near one open where the far one ends."""

    def pump(source: Connection, target: Connection, close: bool) -> None:
        source.socket.settimeout(None)
        with contextlib.suppress(OSError):
            while data := source.reader.read1(1 << 16):
                target.socket.sendall(data)
        if close:
            target.close()

    back = threading.Thread(target=pump, args=(far, near, not hold), daemon=True)
    back.start()
    pump(near, far, True)
    back.join()


def absent(terms: RendezvousSettings, missing: list[int]) -> str:
    """Who did not come."""
    return f"{listed(missing)} of {terms.processes} did not come to {terms.address} {terms.within}"


def listed(processes: list[int]) -> str:
    """For instance "processes 1, 2 and 5"."""
    *others, last = (str(number) for number in processes)
    return f"processes {', '.join(others)} and {last}" if others else f"process {last}"


def silent(process: int, name: str, seconds: float) -> str:
    """A host that stopped, or that the network does not reach."""
    return f"process {process} ({name}) has not been heard for {seconds:g} s"
