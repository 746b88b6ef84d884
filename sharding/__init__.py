"""Meshes, axis rules, collectives, TPU topologies and what their compiler says, for any model.

It imports from no other floor and knows nothing of GLM: models give it shapes, logical names and functions.
"""
