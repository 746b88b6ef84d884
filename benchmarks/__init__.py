"""Measurements: each script prints ratios against a peer or a floor from one run, and says how to run it."""
