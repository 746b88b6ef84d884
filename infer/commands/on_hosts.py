"""Options of commands that run on the devices of one host or of several, and the layout they are used in."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click
import jax

from glm52_jax.config import ModelConfig
from glm52_jax.io.streams import writer
from glm52_jax.params.init import abstract_params
from glm52_jax.params.sharding import param_specs
from sharding.errors import InputError
from sharding.hosts.process_group import SILENCE_SECONDS, START_SECONDS, ProcessGroup, join
from sharding.jax_settings import project_settings, start_devices
from sharding.layout import SINGLE, Layout
from sharding.presets import read_layouts

DEFAULT_ON_SEVERAL_HOSTS = "throughput"

_SHOWN = 60


def on_hosts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Joins the other hosts, then runs the command on each with `hosts`; nothing to join on a single one.

    All of the command's options must be equal on every host.
    """

    @functools.wraps(command)
    def run(
        coordinator: str | None,
        processes: int | None,
        process: int | None,
        start_timeout: float,
        host_timeout: float,
        **options: Any,
    ) -> Any:
        context = click.get_current_context()
        same = {"glm52-jax": _version(), "command": context.info_name or ""}
        for parameter in context.command.params:
            if parameter.name in options:
                same[_flag(parameter)] = _shown(options[parameter.name])
        hosts = join(
            coordinator,
            processes,
            process,
            same=same,
            start_seconds=start_timeout,
            silence_seconds=host_timeout,
            program="glm52",
        )
        with hosts, project_settings():
            start_devices()
            if hosts.processes > 1 and jax.default_backend() == "cpu":
                only_our_output()
            return command(**options, hosts=hosts)

    for option in (
        click.option(
            "--host-timeout",
            type=float,
            default=SILENCE_SECONDS,
            show_default=True,
            help="Seconds without a sign of life after which a host is lost, and the run ends.",
        ),
        click.option(
            "--start-timeout",
            type=float,
            default=START_SECONDS,
            show_default=True,
            help="Seconds within which all hosts must come.",
        ),
        click.option(
            "--process",
            type=int,
            metavar="I",
            help="Number of this one, from 0.  [or GLM52_PROCESS, or JAX_PROCESS_ID]",
        ),
        click.option(
            "--processes",
            type=int,
            metavar="N",
            help="Number of hosts' processes.  [or GLM52_PROCESSES, or JAX_NUM_PROCESSES]",
        ),
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            help="Several hosts: where process 0 is.  [or GLM52_COORDINATOR, or JAX_COORDINATOR_ADDRESS; TPUs of "
            "several hosts on Cloud TPU and GKE know it, and both numbers]",
        ),
        click.option(
            "--layout",
            metavar="LAYOUT",
            help="How all devices share the work: throughput, latency or long_context, sizes as in "
            "data=1,expert=4,tensor=2, or a .toml file.  [default: one device; throughput on several hosts]",
        ),
    ):
        run = option(run)
    return run


def only_our_output() -> None:
    """Keeps standard output to what this program writes: Gloo greets there when processes of CPUs meet."""
    ours = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = writer(ours, sys.stdout)


def choose_layout(text: str | None, config: ModelConfig, fp8: str, hosts: ProcessGroup) -> Layout:
    """The layout that was asked for over all devices; of a preset's, the first that divides the model.

    Raises:
        InputError: no such layout, none that divides it, or rules under which no step is right.
    """
    if text is None and hosts.processes == 1:
        return SINGLE
    slices = len({getattr(device, "slice_index", 0) for device in jax.devices()})
    candidates = read_layouts(
        DEFAULT_ON_SEVERAL_HOSTS if text is None else text, jax.device_count(), slices, experts=config.n_routed_experts
    )
    params = abstract_params(config if fp8 == "keep" else dataclasses.replace(config, quantization=None))
    problems = []
    for layout in candidates:
        try:
            param_specs(params, config, layout)
        except InputError as problem:
            problems.append(problem)
        else:
            return layout
    raise problems[0]


def fingerprint(folder: Path) -> str:
    """What a checkpoint's folder holds, short of reading the weights: names, sizes, and what the JSON files say."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_file():
            continue
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        if path.suffix == ".json":
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _flag(parameter: click.Parameter) -> str:
    return max(parameter.opts, key=len) if isinstance(parameter, click.Option) else parameter.human_readable_name


def _shown(value: Any) -> str:
    """An option's value for people to compare; long ones by their beginning and a digest of the whole."""
    text = repr(value)
    if len(text) <= _SHOWN:
        return text
    return f"{text[:_SHOWN]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:8]})"


def _version() -> str:
    try:
        return version("glm52-jax")
    except PackageNotFoundError:
        return "without a version"
