"""Scores of the indexer: every cached position of a sequence for every query."""
