"""TPU slices without hardware: chips, topologies, compilation for them, and what the compiled program says."""
