"""XLA's flags for tests, which compile much and run little; imports no JAX, which reads them when it is imported.

Only flags that the installed JAX has: with an unknown one the process ends.
"""

import os
from importlib.metadata import version

QUICK_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def compile_quickly() -> None:
    """In this process, and in those that it starts; before JAX is imported."""
    flags = os.environ.get("XLA_FLAGS", "")
    if QUICK_FLAGS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK_FLAGS}".strip()


def with_devices(count: int) -> str:
    """The flags of this process, and those for `count` CPU devices."""
    return f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}".strip()
