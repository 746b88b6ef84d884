"""Meshes, axis rules, collectives and TPU topologies, for any model; it imports from no other floor.

Empty so far: everything runs on one device. The logical axis names that its rules will map are already in the
parameter table (`glm52_jax.spec`).
"""
