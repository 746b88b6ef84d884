"""Rows by one layer's matrix of a stack, plain or in codes with block scales."""
