"""What several kernels share, and what the model shares with them; it imports no operation."""
