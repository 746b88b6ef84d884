"""What the TPU compiler makes of the update that fills a device's buffer; needs libtpu (`jax[tpu]`), but no TPU."""

import os
import subprocess
import sys
from pathlib import Path

from tests import needs

needs.package("libtpu")

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from glm52_jax.checkpoint.load.leaf_arrays import STAGE_BYTES, _stages, _update, box_shape

for name in ("v5e:2x2", "v5p:2x2x1"):
    device = topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0]
    for shape, dtype in (
        ((75, 4, 2, 2048, 6144), jnp.float8_e4m3fn),
        ((75, 2, 6144, 2048), jnp.bfloat16),
        ((79, 576, 6144), jnp.int8),
        ((79, 8, 192, 512), jnp.bfloat16),
        ((78, 6144, 8, 256), jnp.float32),
    ):
        part = box_shape(next(_stages(shape, STAGE_BYTES // 4 // np.dtype(dtype).itemsize)))
        arguments = ((shape, dtype), (part, dtype), ((len(shape),), np.int32))
        abstract = [jax.ShapeDtypeStruct(*a, sharding=SingleDeviceSharding(device)) for a in arguments]
        memory = _update.lower(*abstract).compile().memory_analysis()
        assert memory.alias_size_in_bytes == memory.output_size_in_bytes, (name, shape)
        assert memory.temp_size_in_bytes < 2**20, (name, shape, memory)
print("in place")
"""


def test_a_stage_is_written_in_place():
    tpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5p-8"}
    environment = os.environ | tpu | {"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "in place\n", result.stderr
