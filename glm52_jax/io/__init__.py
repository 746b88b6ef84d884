"""Input and output: files written whole or not at all, JSON files, standard streams, the terminal, progress."""
