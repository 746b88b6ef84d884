"""The values of `indexer_types` and `mlp_layer_types`, as the published `config.json` spells them."""

FULL, SHARED = "full", "shared"
"""A layer with an indexer of its own, and one that uses the selection of the last full layer (IndexShare)."""
DENSE, SPARSE = "dense", "sparse"
"""A layer with one MLP, and one with routed experts."""
