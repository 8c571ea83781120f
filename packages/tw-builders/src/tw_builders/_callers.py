"""Naming the function that a user called in errors of those that it calls."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming(caller: str) -> Iterator[None]:
    """Puts ``caller`` before the message of a TypeError or ValueError inside."""
    try:
        yield
    except (TypeError, ValueError) as error:
        # A subclass may take other arguments than a message.
        if type(error) not in (TypeError, ValueError) or str(error).startswith(caller):
            raise
        raise type(error)(f"{caller}: {error}") from error
