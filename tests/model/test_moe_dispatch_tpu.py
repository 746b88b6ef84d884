"""What the TPU compiler makes of dispatched experts; needs libtpu (`jax[tpu]`), but no TPU.

The widths are the released model's. The stacks are so large that a copy of one, or of one layer, could not hide in the
temporaries that are allowed.
"""

import os
import subprocess
import sys
from pathlib import Path

from tests import needs

needs.package("libtpu")

SCRIPT = """
import re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding
from glm52_jax.config import load_config
from glm52_jax.model.expert_dispatch import dispatch_experts
from glm52_jax.model.dispatch_policy import GATHER, DispatchPolicy, all_to_all_cost, gather_cost
from glm52_jax.params.quantization import FLOAT8, BlockQuantized
from sharding.layout import Layout
from sharding.exchange import OVERLAP_OPTIONS
from sharding.partition import partition

CONFIG = load_config("glm-5.2")
LAYERS, EMBED, WIDTH, K = 3, 6144, 2048, 8
MIB = 2**20

def compiled(topology, layout, form, tokens, options=None):
    few = {"num_slices": layout.slices} if layout.slices > 1 else {}
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology, **few).devices
    mesh = layout.mesh(sorted(devices, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.id)))

    def array(shape, dtype, axes):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, partition(layout, axes, shape)))

    def stack(shape, axes):
        scales = (*shape[:-2], shape[-2] // 128, shape[-1] // 128)
        codes = array(shape, FLOAT8, axes)
        return BlockQuantized(codes, array(scales, jnp.float32, axes), logical_shape=shape[-2:])

    count, rows = CONFIG.n_routed_experts, layout.parts("batch") * tokens
    arguments = (
        array((rows, EMBED), jnp.bfloat16, ("batch", None)),
        array((rows, K), jnp.int32, ("batch", None)),
        array((rows, K), jnp.float32, ("batch", None)),
        stack((LAYERS, count, 2, WIDTH, EMBED), (None, "experts", None, "expert_mlp", None)),
        stack((LAYERS, count, EMBED, WIDTH), (None, "experts", None, "expert_mlp")),
    )

    def run(x, experts, gates, gate_up, down):
        def one(x, layer):
            chosen = jnp.where(experts < 0, -1, (experts + layer) % count)
            out = dispatch_experts(layout, x, chosen, gates, gate_up, down, layer, backend="reference", form=form)
            return x + out.astype(x.dtype), None
        return jax.lax.scan(one, x, jnp.arange(LAYERS))[0]

    specs = jax.tree.map(lambda a: a.sharding.spec, arguments)
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False))
    with jax.set_mesh(mesh):
        program = step.lower(*arguments).compile(compiler_options=options)
    weights = jax.tree.leaves(arguments[3:])
    held = sum(np.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in weights)
    used = program.memory_analysis().temp_size_in_bytes
    # Beside the stated buffers: hidden rows of an expert, and its weights in float32 on the way to bfloat16.
    parts = layout.parts("expert_mlp")
    if form.name == "gather":
        stated = gather_cost(layout, tokens, CONFIG, 2).buffers
    else:
        stated = all_to_all_cost(layout, tokens, CONFIG, 2, form).buffers
    allowed = stated + tokens * K * WIDTH // parts * 4 * 3 + 3 * EMBED * WIDTH // parts * 4
    print(topology, form.name, f"{used / MIB:.0f} MiB of temporaries, {stated / MIB:.0f} stated,",
          f"{allowed / MIB:.0f} allowed, {held / LAYERS / MIB:.0f} a layer", file=sys.stderr)
    assert used < allowed < held / LAYERS, (topology, used, allowed, held)
    return program.as_text()

def count(text, name):
    return len(re.findall(rf"\\s{name}\\(", text))

text = compiled("v5e:2x2", Layout(expert=4), GATHER, 256)
sums = re.findall(r"(\\w+)\\[[^\\n]* reduce-scatter\\(", text)
assert sums == ["f32"], sums  # the cast to bfloat16 that follows has not moved before the sum
print("gathered")

sent = DispatchPolicy("all_to_all", "ragged")
text = compiled("v5e:2x2", Layout(expert=4), sent, 256)
assert count(text, "ragged-all-to-all") == 3, count(text, "ragged-all-to-all")
text = compiled("v5p:2x2x2", Layout(data=2, expert=2, tensor=2), sent, 256)
assert count(text, "ragged-all-to-all") == 3
print("flat")

over_all = {"experts": ("data", "expert")}
text = compiled("v5e:2x2", Layout(data=2, expert=4, slices=2).with_rules(**over_all), sent, 64)
assert count(text, "ragged-all-to-all") == 6
print("by slice")

halves = DispatchPolicy("all_to_all", "ragged", overlap=True)
text = compiled("v5p:2x2x1", Layout(expert=4), halves, 256, OVERLAP_OPTIONS)
lines = text.splitlines()
begun = {m[1]: n for n, line in enumerate(lines) if (m := re.match(r" *%(\\S+) = .* ragged-all-to-all-start\\(", line))}
under = 0
for end, line in enumerate(lines):
    if m := re.search(r" ragged-all-to-all-done\\(%([^)]*)\\)", line):
        under += any(" while(" in between for between in lines[begun[m[1]]:end])
assert under >= 2, "no half travels while the experts of the other are computed"
print("overlapped")
"""


def test_dispatch_compiles_for_tpu():
    """The ragged exchange is used, no copy of the experts is made, and memory is what is stated."""
    tpu = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5p-8"}
    environment = os.environ | tpu | {"JAX_PLATFORMS": "cpu", "TPU_WORKER_HOSTNAMES": "localhost"}
    root = Path(__file__).parents[2]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), environment.get("PYTHONPATH"))))
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["gathered", "flat", "by slice", "overlapped"], result.stderr
    print(result.stderr)
