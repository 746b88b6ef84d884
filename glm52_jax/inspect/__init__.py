"""What a model costs, computed from its config and its parameter table: parameters, bytes, cache rows, FLOPs.

Nothing here imports JAX, reads a weight or knows a device; a folder's headers are all it opens.
"""
