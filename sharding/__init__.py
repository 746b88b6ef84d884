"""Meshes, axis rules, collectives, TPU topologies and what their compiler says, for any model.

It imports no other package layer and does not depend on a model: models give it shapes, logical names and functions.
"""
