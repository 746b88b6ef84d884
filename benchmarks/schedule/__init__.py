"""How long a kernel for TPUs takes, from the compiler's final schedule of it: no TPU is needed.

A TPU core issues one bundle of instructions a cycle and never reorders them, so the schedule says nearly all. The
scalar instructions of the schedule (loops, branches, addresses, sizes of copies) are executed; vector instructions are
counted, and wait for the units that they need; copies share the memory's bandwidth. `docs/kernels.md` says how far the
result can be trusted.
"""
