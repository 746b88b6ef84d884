"""Comparisons: a checkpoint with its source, a layer with `transformers`, quantised values with exact ones."""
