"""Losses, optimisers, the train step, indexer distillation and search. Empty so far."""
