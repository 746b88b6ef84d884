"""The model as pure functions: the transformer, its layers, the draft layer (MTP), and routed experts on a mesh."""
