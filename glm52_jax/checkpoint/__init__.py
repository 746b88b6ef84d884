"""Checkpoints: the published safetensors layout in, checked before any device work.

Names, shapes and stored forms come from the parameter table; this room knows files.
"""
