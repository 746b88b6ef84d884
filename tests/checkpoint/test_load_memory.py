"""The memory of a load: never more than the parameters and the margin that `load_params` states."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from glm52_jax.checkpoint.formats.safetensors_file import DTYPES, file_layout, tensor_bytes
from glm52_jax.checkpoint.sources.published import SINGLE_FILE
from glm52_jax.config import BUILT_IN, ModelConfig, QuantizationConfig
from glm52_jax.params.spec import published_tensors

ROOT = Path(__file__).parents[2]

# Prints the bytes of all parameters and of the largest array, and by how much anonymous memory rose at most.
MEASURE = """
import json, sys, threading
from glm52_jax.checkpoint.load import leaf_arrays
from glm52_jax.checkpoint.journal.workers import anonymous_bytes
import jax, jax.numpy as jnp
from glm52_jax.checkpoint.load.loader import MARGIN_BYTES, load_params

folder, way, keywords = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
if way == "device":
    leaf_arrays._in_host_memory = leaf_arrays._in_device_memory
jax.block_until_ready(jnp.zeros(()) + 1)
before = peak = anonymous_bytes()
done = threading.Event()

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous_bytes())

watcher = threading.Thread(target=watch)
watcher.start()
params = load_params(folder, **keywords)
done.set()
watcher.join()
sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print(json.dumps([sum(sizes), max(sizes), peak - before, MARGIN_BYTES]))
"""


def wide_config(experts: int, fp8: bool) -> ModelConfig:
    """One layer of GLM-5.2's widths with few heads."""
    return dataclasses.replace(
        BUILT_IN["glm-5.2"],
        num_hidden_layers=1,
        num_nextn_predict_layers=0,
        indexer_types=("full",),
        mlp_layer_types=("sparse",),
        num_attention_heads=8,
        n_routed_experts=experts,
        num_experts_per_tok=2,
        vocab_size=4096,
        eos_token_ids=(),
        pad_token_id=None,
        quantization=QuantizationConfig((128, 128)) if fp8 else None,
    )


def make_zeros(folder: Path, config: ModelConfig) -> None:
    """A checkpoint of zeros, which has a size but takes no room on the disk: here only memory matters."""
    kinds = {}
    for _, tensor in published_tensors(config):
        coded = tensor.quantized and config.quantization
        kinds[tensor.name] = (DTYPES["F8_E4M3" if coded else "F32" if tensor.float32 else "BF16"], tensor.shape)
        if coded:
            kinds[tensor.scale_name] = (DTYPES["F32"], tensor.scale_shape(config.quantization.block))
    header, starts = file_layout(kinds)
    size = max(start + tensor_bytes(*kinds[name]) for name, start in starts.items())
    with (folder / SINGLE_FILE).open("wb") as file:
        file.write(header)
        file.truncate(size)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "experts", "fp8", "keywords"),
    [
        ("host", 10, False, {"dtype": "float32"}),
        ("host", 32, True, {"fp8": "keep"}),
        ("device", 10, True, {"fp8": "dequantize", "dtype": "float32"}),
    ],
    ids=["cast", "float8", "dequantized in stages"],
)
def test_no_more_than_the_parameters_and_the_margin_is_held(
    tmp_path: Path, way: str, experts: int, fp8: bool, keywords: dict[str, str]
):
    make_zeros(tmp_path, wide_config(experts, fp8))
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", MEASURE, str(tmp_path), way, json.dumps(keywords)]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    target, largest, rise, margin = json.loads(result.stdout)
    # A second copy of the largest leaf would be seen: what is loaded after it, half its size and some, is less by more.
    assert largest * 0.4 > margin
    assert target <= rise <= target + margin, [round(size / 2**20) for size in (target, largest, rise, margin)]
