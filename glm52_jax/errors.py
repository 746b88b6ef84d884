"""The error that says a user's input is at fault; it must not know of any room that raises it."""

from sharding.errors import InputError, printable, sentence

__all__ = ["InputError", "printable", "sentence"]
