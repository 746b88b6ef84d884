"""Measurements: each script prints ratios against a peer or a lower bound from one run, and says how to run it."""
