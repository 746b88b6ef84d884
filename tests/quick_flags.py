"""XLA's flags for tests, which compile much and run little; imports no JAX, which reads them when it is imported.

Only flags that the installed JAX has: with an unknown one the process ends.
"""

import os
from importlib.metadata import version

QUICK_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
    QUICK_FLAGS += " --xla_cpu_use_fusion_emitters=false"


def quick_flags() -> str:
    """The flags of this process, and those that compile quickly."""
    flags = os.environ.get("XLA_FLAGS", "")
    return flags if QUICK_FLAGS in flags else f"{flags} {QUICK_FLAGS}".strip()


def with_devices(count: int, *, quickly: bool = False) -> str:
    """The flags of this process, and those for `count` CPU devices."""
    flags = quick_flags() if quickly else os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}".strip()
