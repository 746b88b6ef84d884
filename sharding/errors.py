"""The error that says a user's input is at fault; every floor raises this one."""


class InputError(ValueError):
    """Wrong input: a file, field, tensor or request that cannot be used as it is.

    The message is one sentence that names the thing, what was found and what was expected.
    """
