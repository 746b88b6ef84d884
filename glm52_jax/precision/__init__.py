"""What the quantised forms of weights and cache cost in accuracy, measured on a checkpoint."""
