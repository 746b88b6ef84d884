"""XLA's flags for processes of tests, which compile much and run little; imports nothing.

Only flags that every JAX has which the project runs on: with an unknown one the process ends.
"""

QUICK_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
