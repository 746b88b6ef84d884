"""Attention of absorbed queries to selected rows of the latent cache."""
