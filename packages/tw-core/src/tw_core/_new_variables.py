"""The variables made inside a tower, seen as they are made.

A session graph lists its variables in collections; a ``tf.function`` has none.
A variable creator sees the variables of both.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tw_core._variable_kinds import refuse_reference_variables


class NewVariables:
    """A variable creator for ``tf.variable_creator_scope`` that keeps a list."""

    def __init__(self, *, caller: str) -> None:
        """Starts with an empty list.

        Args:
          caller: which tower; opens the message about a reference variable.
        """
        self._caller = caller
        self._trainable: list[str] = []

    @property
    def trainable(self) -> list[str]:
        """Names of the trainable variables made so far, in order."""
        return list(self._trainable)

    def __call__(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        """Makes a variable and notes it.

        Raises:
          ValueError: it became a reference variable.
        """
        variable = next_creator(**kwargs)
        refuse_reference_variables([variable], caller=self._caller)
        if variable.trainable:
            self._trainable.append(variable.name)
        return variable
