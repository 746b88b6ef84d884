"""Checkpoints to read tensors from, by their published names: published folders, converted ones, remote ones."""
