"""Writing the rows of new tokens into a stack of cache pages."""
