"""Plans: whether a step of the model fits a slice of TPUs, what it moves and computes there, floors of its time.

The step is the one that generation runs; the compiler is the real one, on a machine without a TPU.
"""
