"""A model that was made with flat variables, for eager code and ``tf.function``."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

import tensorflow as tf

from tw_core._checks import check_function
from tw_core._modes import builds_session_graph, traces_function
from tw_core.flat_variables._flat_variables import FlatVariables, view_of
from tw_core.flat_variables._layout import DEFAULT_BELOW_BYTES, Group

_Model = TypeVar("_Model")


class FlatModel(Generic[_Model]):
    """A model whose small variables are packed into flat ones.

    Towers call this in place of the model, and take gradients with respect to its
    ``trainable_variables``; a gradient that does not reach all of their parts raises a
    ``ValueError``. For everything else use the model itself: its variables keep their
    names and shapes, and have the current values.

    Attributes:
      model: the model itself.
    """

    def __init__(self, model: _Model, flat: FlatVariables) -> None:
        """Holds a model and the flat variables that were made with it."""
        self.model = model
        self._flat = flat

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Calls the model, reading all of its views together."""
        with self.reading():
            return self.model(*arguments, **named)  # type: ignore[operator]

    def reading(self) -> AbstractContextManager[None]:
        """As ``FlatVariables.reading``, for steps that do more than call the model."""
        return self._flat.reading()

    @property
    def flat_variables(self) -> FlatVariables:
        """The flat variables, with their layouts."""
        return self._flat

    @property
    def trainable_variables(self) -> list[Any]:
        """The flat variables, then the model's other trainable ones.

        Raises:
          ValueError: part of a flat variable is no longer trainable.
        """
        trained = self.plain_variables
        views = {id(view) for v in trained if (view := view_of(v)) is not None}
        frozen = [view.name for view in self._flat.views if id(view) not in views]
        if frozen:
            raise ValueError(
                f"FlatModel.trainable_variables: {', '.join(frozen)} trained when the "
                "model was made, and an optimizer updates a flat variable as a whole; "
                "freeze them in the function that makes the model."
            )
        return [*self._flat.variables, *(v for v in trained if view_of(v) is None)]

    @property
    def plain_variables(self) -> list[Any]:
        """The model's own trainable variables, including views."""
        return _variables_of(self.model, "trainable_variables")

    @property
    def variables(self) -> list[Any]:
        """The flat variables, then the model's other ones."""
        others = _variables_of(self.model, "variables")
        return [
            *self._flat.variables,
            *(v for v in others if (view := view_of(v)) is None or not view.is_part),
        ]


def flatten(
    make_model: Callable[[], _Model],
    *,
    below_bytes: int = DEFAULT_BELOW_BYTES,
    group: Group | None = None,
) -> FlatModel[_Model]:
    """Makes a model whose small trainable variables are packed into flat ones.

    Args:
      make_model: returns a new ``tf.Module`` or Keras 3 model with its variables.
      below_bytes: as for ``FlatVariables``.
      group: as for ``FlatVariables``.

    Returns:
      The model; variables that ``make_model`` froze are not packed.

    Raises:
      RuntimeError: in a session graph or a ``tf.function``.
      ValueError: the model has no variables yet, or was made elsewhere; a small
        variable has a constraint, which would apply to a whole flat variable.
      TypeError: the model has no ``trainable_variables``.
    """
    check_function(make_model=make_model)
    if traces_function() or builds_session_graph():
        raise RuntimeError(
            "flatten: makes variables, and so must be called outside of tf.function; "
            "in a session graph use the builders' flat_below_bytes, or "
            "FlatVariables().scope() and pack_gradients."
        )
    flat = FlatVariables(below_bytes, group=group)
    with flat.scope():
        model = make_model()
        trained = _variables_of(model, "trainable_variables")
        _check_model(model, trained, flat)
        flat.keep_alone(trained)
    return FlatModel(model, flat)


def _check_model(model: Any, trained: list[Any], flat: FlatVariables) -> None:
    if getattr(model, "built", True) is False:
        raise ValueError(
            f"flatten: make_model returned {type(model).__name__} without its "
            "variables; build the Keras model first: model.build(input_shape), or "
            "give it a keras.Input."
        )
    elsewhere = [v.name for v in trained if flat.is_missing(v)]
    if elsewhere:
        raise ValueError(
            f"flatten: {', '.join(elsewhere)} existed before; make_model must make a "
            "new model with new variables."
        )
    constrained = [
        v.name
        for v in trained
        if view_of(v) is not None and getattr(v, "constraint", None) is not None
    ]
    if constrained:
        raise ValueError(
            f"flatten: {', '.join(constrained)} have a constraint, which would apply "
            "to a whole flat variable; keep them separate with group=..., or lower "
            "below_bytes."
        )


def _variables_of(model: Any, which: str) -> list[Any]:
    variables = getattr(model, which, None)
    if callable(variables):
        variables = variables()
    if not isinstance(variables, list | tuple) or isinstance(model, tf.Variable):
        raise TypeError(
            f"flatten: make_model must return a tf.Module or Keras model, or another "
            f"object with {which}; got {type(model).__name__}."
        )
    return list(variables)
