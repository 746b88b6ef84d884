"""Loading a checkpoint into the parameter tree, leaf by leaf, each where it stays."""
