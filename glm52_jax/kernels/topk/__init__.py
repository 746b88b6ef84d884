"""Exact, stable choice of the k best scores."""
