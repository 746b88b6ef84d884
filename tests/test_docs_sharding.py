"""docs/sharding.md and docs/pods.md keep their word: the commands of the first run, the second's manifest is valid.

The page's checkpoint is a smaller one than `glm52 demo` makes, compiled without the costly passes.
"""

import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from glm52_jax.checkpoint.export.write import write_checkpoint
from glm52_jax.text import write_byte_tokenizer
from tests.checkpoint.builders import random_params
from tests.quick_flags import with_devices
from tests.test_readme import ROOT, blocks, small_config

PAGE = ROOT / "docs" / "sharding.md"
PORT = "localhost:8476"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the page's commands run: the checkpoint, the layout's file, `glm52` on the path."""
    folder, config = tmp_path_factory.mktemp("sharding"), small_config()
    params = random_params(dataclasses.replace(config, dtype="float32"))
    write_checkpoint(folder / "glm-tiny" / "bf16", config, params)
    write_byte_tokenizer(folder / "glm-tiny" / "bf16", vocab_size=config.vocab_size)
    [(_, layout)] = blocks(PAGE, "toml")
    (folder / "mine.toml").write_text(layout)
    command = folder / "bin" / "glm52"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m glm52_jax "$@"\n')
    command.chmod(0o755)
    return folder


def run(folder: Path, command: list[str], **environment: str) -> str:
    own = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    result = subprocess.run(
        command, cwd=folder, env=os.environ | own | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def scripts() -> Iterator[str]:
    for _, text in blocks(PAGE, "sh"):
        yield text.replace(PORT, f"localhost:{free_port()}")


def test_plans_of_the_page(folder: Path) -> None:
    """With libtpu there are collectives and floors, without it the account of memory."""
    [script] = [text for text in scripts() if "glm52 plan" in text]
    found = run(folder, ["bash", "-e", "-c", script])
    assert "mine (data 1 x expert 4 x tensor 2), batch 8" in found
    assert "prefill on v5p:2x2x2" in found
    assert found.count("fits") == 2


def text_of_one_device(folder: Path) -> str:
    return run(folder, ["glm52", "generate", "glm-tiny/bf16", "Hello", "--dtype", "float32", "-n", "8"])


@pytest.mark.slow
def test_eight_devices_give_the_text_of_one(folder: Path) -> None:
    [script, _] = [text for text in scripts() if "glm52 generate" in text]
    _, plain, fp8 = run(folder, ["bash", "-e", "-c", script]).split("--- prompt 1: 'Hello'")
    assert text_of_one_device(folder).strip() in plain
    assert "prompt 2: 'Good morning'" in fp8


@pytest.mark.slow
def test_two_processes_give_the_text_of_one(folder: Path) -> None:
    [_, script] = [text for text in scripts() if "glm52 generate" in text]
    assert run(folder, ["bash", "-e", "-c", script]) == text_of_one_device(folder)


@pytest.mark.slow
def test_python_of_the_page(folder: Path) -> None:
    [(_, program)] = blocks(PAGE, "python")
    found = run(folder, [sys.executable, "-c", program], XLA_FLAGS=with_devices(8)).splitlines()
    assert found[0].startswith("P(None, 'expert', None, 'tensor', None)")
    assert found[1] == "True"


def faults(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with a value by the part of JSON Schema that the stored schema uses."""
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
    if "type" in schema:
        kind = kinds[schema["type"]]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            yield f"{where} is {value!r}, expected {schema['type']}"
            return
    if value not in schema.get("enum", [value]):
        yield f"{where} is {value!r}, expected one of {schema['enum']}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        yield f"{where} is {value!r}, expected {schema['pattern']}"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{where} is {value}, expected at least {schema['minimum']}"
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from faults(item, schema.get("items", {}), f"{where}[{number}]")
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        rest = others if isinstance(others, dict) else {}
        yield from (f"{where}.{name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            if name not in properties and others is False:
                yield f"{where}.{name} is no field"
            else:
                yield from faults(item, properties.get(name, rest), f"{where}.{name}")


SCHEMA = json.loads((ROOT / "tests" / "jobset_v1alpha2.json").read_text())
MANIFEST = ROOT / "deploy" / "jobset.yaml"


def test_the_manifest_is_a_jobset() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert list(faults(manifest, SCHEMA)) == []


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        (("spec", "replicatedJobs", 0, "name"), None, "name is missing"),
        (("spec", "replicatedJobs", 0, "replica"), 1, "replica is no field"),
        (("spec", "failurePolicy", "maxRestarts"), "3", "expected integer"),
        (("apiVersion",), "jobset.x-k8s.io/v1", "expected one of"),
    ],
)
def test_the_schema_sees_faults(path: tuple, value: Any, complaint: str) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    part = manifest
    for name in path[:-1]:
        part = part[name]
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    assert complaint in " ".join(faults(manifest, SCHEMA))


def test_the_manifest_asks_for_whole_slices() -> None:
    """As many pods as the topology has hosts, with all chips of a host each, and the command is one that there is."""
    from click import Context

    from glm52_jax.cli import glm52
    from sharding.compiler.topology import Topology

    manifest = yaml.safe_load(MANIFEST.read_text())
    assert "exclusive-topology" in " ".join(manifest["metadata"]["annotations"])
    [job] = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    selector = pod["nodeSelector"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == "tpu-v6e-slice"
    topology = Topology.parse(f"v6e:{selector['cloud.google.com/gke-tpu-topology']}")
    [container] = pod["containers"]
    assert spec["parallelism"] == spec["completions"] == topology.hosts
    assert container["resources"]["limits"]["google.com/tpu"] == topology.chip.chips_per_host
    name, *rest = container["args"]
    assert container["command"] == ["glm52"]
    glm52.get_command(Context(glm52), name).make_context(name, rest)
