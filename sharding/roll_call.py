"""Who is there: one TCP connection from every process of a run to its first, from before JAX starts until the end.

JAX's own coordinator does not name a host that never comes, aborts with a stack dump where one dies, and notices that
only after its heartbeats. So the processes meet here first: process 0 keeps a `Board`, every process a `Line` to
it. Whoever is missing, comes twice, disagrees or goes away later is named to everyone, within a stated time. Messages
are lines of JSON. It must not know JAX: the coordinator's traffic is passed through as bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sharding.errors import InputError

FORM = "glm52 hosts 1"
"""Said first on a connection, so that neither side takes another service for one of its own."""

BEATS = 4
"""Signs of life in the time after which a silent host counts as lost."""

_LINE_BYTES = 1 << 24
_LAST_WORDS_SECONDS = 1.0
_RETRY_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class Terms:
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


@dataclasses.dataclass
class _Caller:
    connection: Connection
    name: str
    heard: float
    through: bool = False


class Board:
    """Process 0's side: admits the processes, passes values between them, tells all when one is lost.

    Args:
        terms: those of process 0.
        service: port of JAX's coordinator on this machine, to which relayed connections go.

    Raises:
        InputError: the port cannot be listened on.
    """

    def __init__(self, terms: Terms, service: int):
        self._terms, self._service = terms, service
        self._callers: dict[int, _Caller] = {}
        self._values: dict[int, Any] = {}
        self._events: queue.Queue[tuple[Connection | None, dict[str, Any] | None]] = queue.Queue()
        self.ended = threading.Event()
        try:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._listener = socket.create_server(("", terms.port), family=family, backlog=1024, dualstack_ipv6=dual)
        except (OSError, OverflowError) as error:
            reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
            raise InputError(
                f"process 0 cannot listen on port {terms.port} of {terms.address}: {reason}; expected a free port, and "
                "one process 0"
            ) from None
        for work in (self._accept, self._run):
            threading.Thread(target=work, daemon=True).start()

    def stop(self, sentence: str) -> None:
        """Ends the roll call, for what only process 0 knows; waits until those who came have been told."""
        self._events.put((None, {"stop": sentence}))
        self.ended.wait(2 * _LAST_WORDS_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._read, args=(Connection(sock),), daemon=True).start()

    def _read(self, connection: Connection) -> None:
        """Passes one connection's messages on; a stranger's is closed without a word."""
        try:
            hello = connection.receive(self._terms.silence)
            if hello is None or hello.get("form") != FORM:
                connection.close()
                return
            if hello.get("relay"):
                self._relay(connection)
                return
            self._events.put((connection, hello))
            while (message := connection.receive()) is not None:
                self._events.put((connection, message))
        except (ValueError, TimeoutError):
            pass
        self._events.put((connection, None))

    def _relay(self, connection: Connection) -> None:
        """To JAX's coordinator, which may begin a moment later."""
        while True:
            try:
                service = socket.create_connection(("127.0.0.1", self._service), timeout=1)
                break
            except OSError:
                if self._terms.left < 0:
                    connection.close()
                    return
                time.sleep(_RETRY_SECONDS)
        relay(connection, Connection(service))

    def _run(self) -> None:
        try:
            problem = self._admit() or self._serve()
        except Exception as error:  # told to all, since nobody else would know why they wait
            problem = f"process 0 had a fault in its roll call: {error!r}"
        if problem:
            self._tell_end(problem)
        self._listener.close()
        self.ended.set()

    def _admit(self) -> str | None:
        """Waits for every process; a sentence when that fails."""
        terms, told = self._terms, 0.0
        while len(self._callers) < terms.processes:
            if terms.left <= 0:
                return absent(terms, self._missing())
            if time.monotonic() - told > min(1.0, terms.silence / BEATS):
                told = time.monotonic()
                self._send_all(self._callers.values(), missing=self._missing())
            try:
                connection, message = self._events.get(timeout=min(terms.left, _RETRY_SECONDS))
            except queue.Empty:
                continue
            if message is not None and "stop" in message:
                problem = message["stop"]
            elif message is None or "hello" not in message:
                problem = self._left(connection, message, "at the start")
            else:
                problem = self._greet(connection, message["hello"])
            if problem:
                return problem
        self._send_all(self._callers.values(), welcome=[self._callers[i].name for i in range(terms.processes)])
        return None

    def _missing(self) -> list[int]:
        return [i for i in range(self._terms.processes) if i not in self._callers]

    def _greet(self, connection: Connection | None, hello: dict[str, Any]) -> str | None:
        """Admits a process, or says why the run cannot be."""
        assert connection is not None
        terms, process, name = self._terms, int(hello["process"]), str(hello["name"])
        caller = _Caller(connection, name, time.monotonic())
        problem = None
        if hello["processes"] != terms.processes:
            problem = (
                f"process {process} ({name}) was started with {hello['processes']} processes, process 0 with "
                f"{terms.processes}, expected the same number on every host"
            )
        elif process in self._callers:
            problem = (
                f"two processes have the number {process}, on {self._callers[process].name} and on {name}, expected "
                f"0 to {terms.processes - 1} once each"
            )
        elif (key := different(terms.same, hello["same"])) is not None:
            there, here = (same.get(key, "nothing") for same in (hello["same"], terms.same))
            problem = (
                f"process {process} ({name}) has {key} {there}, process 0 has {here}, expected the same command and "
                "packages on every host"
            )
        if problem:
            connection.send(end=problem)
            return problem
        self._callers[process] = caller
        connection.send(missing=self._missing())
        return None

    def _serve(self) -> str | None:
        """Passes values until every process is through; a sentence when one is lost."""
        terms, told = self._terms, 0.0
        for caller in self._callers.values():  # they give signs of life from now on
            caller.heard = time.monotonic()
        while not all(caller.through for caller in self._callers.values()):
            now = time.monotonic()
            if now - told > terms.silence / BEATS:
                told = now
                self._send_all(self._callers.values(), beat=1)
            for process, caller in self._callers.items():
                if not caller.through and now - caller.heard > terms.silence:
                    return silent(process, caller.name, terms.silence)
            try:
                connection, message = self._events.get(timeout=terms.silence / BEATS)
            except queue.Empty:
                continue
            problem = self._serve_one(connection, message)
            if problem:
                return problem
        self._send_all(self._callers.values(), through=1)
        return None

    def _serve_one(self, connection: Connection | None, message: dict[str, Any] | None) -> str | None:
        process = next((i for i, caller in self._callers.items() if caller.connection is connection), None)
        if process is None:
            if connection is not None and message and "hello" in message:
                hello = message["hello"]
                connection.send(
                    end=f"process {hello['process']} ({hello['name']}) came to {self._terms.address} when all "
                    f"{self._terms.processes} processes of that run had come; is its number or address another's?"
                )
            return None
        caller = self._callers[process]
        caller.heard = time.monotonic()
        if message is None or "failed" in message:
            return None if caller.through else self._left(connection, message, "before the end")
        if "through" in message:
            caller.through = True
        elif "tell" in message:
            self._send_all((c for i, c in self._callers.items() if i != process), told=message["tell"])
        elif "value" in message:
            self._values[process] = message["value"]
            if len(self._values) == self._terms.processes:
                values = [self._values[i] for i in range(self._terms.processes)]
                self._values = {}
                self._send_all(self._callers.values(), values=values)
        return None

    def _left(self, connection: Connection | None, message: dict[str, Any] | None, when: str) -> str | None:
        for process, caller in self._callers.items():
            if caller.connection is connection:
                if message and "failed" in message:
                    return f"process {process} ({caller.name}): {message['failed']}"
                return f"process {process} ({caller.name}) ended {when}, without a word" if message is None else None
        return None

    def _tell_end(self, sentence: str) -> None:
        """To the others first, process 0 last: its end takes the board with it."""
        others = [caller for i, caller in self._callers.items() if i]
        self._send_all(others, end=sentence)
        waiting, until = {id(caller.connection) for caller in others}, time.monotonic() + _LAST_WORDS_SECONDS
        while waiting and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                connection, message = self._events.get(timeout=_RETRY_SECONDS)
                if message is None:
                    waiting.discard(id(connection))
        self._send_all((caller for i, caller in self._callers.items() if i == 0), end=sentence)

    def _send_all(self, callers: Iterable[_Caller], **message: Any) -> None:
        for caller in list(callers):
            caller.connection.send(**message)


class Line:
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

    def __init__(self, terms: Terms, name: str, lost: Callable[[str], None]):
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
                time.sleep(_RETRY_SECONDS)
                continue
            connection = Connection(sock)
            connection.send(form=FORM, hello=hello)
            names = self._wait_for_all(connection)
            if names is not None:
                return connection, names
            connection.close()
            reason = "the connection was closed"
            time.sleep(_RETRY_SECONDS)
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
                connection.send(failed=sentence)
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
                connection.send(failed=sentence)
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
        while not self._through.wait(self.terms.silence / BEATS):
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

    def fail(self, sentence: str) -> None:
        """Says why this process ends before the end."""
        self._leaving = True
        self._connection.send(failed=sentence)

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
            far.send(form=FORM, relay=True)
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


def different(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """The first name of which two processes do not say the same."""
    return next((key for key in (*here, *there) if here.get(key) != there.get(key)), None)


def absent(terms: Terms, missing: list[int]) -> str:
    """Who did not come."""
    numbers = [str(number) for number in missing]
    who = f"process {numbers[0]}" if len(numbers) == 1 else f"processes {', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"{who} of {terms.processes} did not come to {terms.address} {terms.within}"


def silent(process: int, name: str, seconds: float) -> str:
    """A host that stopped, or that the network does not reach."""
    return f"process {process} ({name}) has not been heard for {seconds:g} s"
