"""Resumable work on a folder: the journal of what is done, and the threads that do it."""
