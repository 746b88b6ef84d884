"""Conversion of a published checkpoint to Orbax, and the changes of values that all commands on checkpoints share."""
