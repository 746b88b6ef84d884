"""Process 0's side of the roll call: admits the processes, passes values between them, tells all when one is lost.

It must not know JAX, nor what the values mean; what is said on a connection is in `sharding.hosts.rendezvous`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from sharding.errors import InputError
from sharding.hosts.rendezvous import (
    HEARTBEATS,
    PROTOCOL,
    RETRY_SECONDS,
    Connection,
    RendezvousSettings,
    absent,
    relay,
    silent,
)

_LAST_WORDS_SECONDS = 1.0
_OWN_SECONDS = 5.0


@dataclasses.dataclass
class _Caller:
    connection: Connection
    name: str
    heard: float
    through: bool = False
    gone: bool = False


class RendezvousServer:
    """Listens, and answers every `Line`, until all processes are through or one is lost.

    Attributes:
        ended: set when nothing more will be told.

    Args:
        terms: those of process 0.
        service: port of JAX's coordinator on this machine, to which relayed connections go.

    Raises:
        InputError: the port cannot be listened on.
    """

    def __init__(self, terms: RendezvousSettings, service: int):
        self._terms, self._service = terms, service
        self._callers: dict[int, _Caller] = {}
        self._values: dict[int, Any] = {}
        self._events: queue.Queue[tuple[Connection | None, dict[str, Any] | None]] = queue.Queue()
        self.ended, self._stopped = threading.Event(), False
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

    def behind(self) -> list[int]:
        """Processes that others wait for in an exchange."""
        return [process for process in self._callers if process not in self._values]

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
            if hello is None or hello.get("form") != PROTOCOL:
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
                time.sleep(RETRY_SECONDS)
        relay(connection, Connection(service))

    def _run(self) -> None:
        try:
            problem = self._admit()
            if problem:
                self._greet_late(problem)
            else:
                problem = self._serve()
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
            if time.monotonic() - told > min(1.0, terms.silence / HEARTBEATS):
                told = time.monotonic()
                self._send_all(self._callers.values(), missing=self._missing())
            try:
                connection, message = self._events.get(timeout=min(terms.left, RETRY_SECONDS))
            except queue.Empty:
                continue
            if message is not None and "stop" in message:
                self._stopped, problem = True, message["stop"]
            elif message is None or "hello" not in message:
                problem = self._left(connection, message, "at the start")
            else:
                problem = self._greet(connection, message["hello"])
            if problem:
                return problem
        self._send_all(self._callers.values(), welcome=[self._callers[i].name for i in range(terms.processes)])
        return None

    def _greet_late(self, problem: str) -> None:
        """A run that cannot be waits for process 0's own line, and tells who comes until then."""
        until = time.monotonic() + _OWN_SECONDS
        while 0 not in self._callers and not self._stopped and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                connection, message = self._events.get(timeout=RETRY_SECONDS)
                if connection is not None and message and "hello" in message:
                    connection.send(end=problem)
                    if message["hello"]["process"] == 0:
                        return

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
        elif (key := _different(terms.same, hello["same"])) is not None:
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
            if now - told > terms.silence / HEARTBEATS:
                told = now
                self._send_all(self._callers.values(), beat=1)
            for process, caller in self._callers.items():
                if not caller.through and now - caller.heard > terms.silence:
                    return silent(process, caller.name, terms.silence)
            try:
                connection, message = self._events.get(timeout=terms.silence / HEARTBEATS)
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
                caller.gone = message is None
                if message and "failed" in message:
                    everyones = message.get("everyones")
                    return ("" if everyones else f"process {process} ({caller.name}): ") + message["failed"]
                return f"process {process} ({caller.name}) ended {when}, without a word" if message is None else None
        return None

    def _tell_end(self, sentence: str) -> None:
        """To the others first, process 0 last: its end takes the board with it."""
        others = [caller for i, caller in self._callers.items() if i]
        self._send_all(others, end=sentence)
        waiting = {id(caller.connection) for caller in others if not caller.gone}
        until = time.monotonic() + _LAST_WORDS_SECONDS
        while waiting and time.monotonic() < until:
            with contextlib.suppress(queue.Empty):
                connection, message = self._events.get(timeout=RETRY_SECONDS)
                if message is None:
                    waiting.discard(id(connection))
        self._send_all((caller for i, caller in self._callers.items() if i == 0), end=sentence)

    def _send_all(self, callers: Iterable[_Caller], **message: Any) -> None:
        for caller in list(callers):
            caller.connection.send(**message)


def _different(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """The first name of which two processes do not say the same."""
    return next((key for key in (*here, *there) if here.get(key) != there.get(key)), None)
