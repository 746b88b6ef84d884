"""On disk: safetensors files, and the Orbax layout with its manifest."""
