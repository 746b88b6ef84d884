"""Attention of a chunk of queries to a dense context under a mask."""
