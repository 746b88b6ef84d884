"""Checkpoints: the published safetensors layout in, checked before any device work, and out, whole or not at all.

Names, shapes and stored forms come from the parameter table; this room knows files.
"""
