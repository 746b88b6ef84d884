"""How fast the kernels for TPUs are, from what the compiler makes of them: `python -m benchmarks.kernels --help`."""
