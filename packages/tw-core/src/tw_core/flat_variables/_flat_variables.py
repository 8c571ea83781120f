"""Packs the small variables that a model makes into flat ones."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from tw_core._checks import check_function, check_whole_number
from tw_core._modes import builds_session_graph
from tw_core._records.origins import open_tower_scope
from tw_core._variable_kinds import (
    is_reference_variable,
    plain_name,
    tf_variable,
    tf_variables,
)
from tw_core.flat_variables._flat_variable import FlatVariable
from tw_core.flat_variables._layout import DEFAULT_BELOW_BYTES, Group, Layout
from tw_core.flat_variables._opening import FLAT_KEY, Opened
from tw_core.flat_variables._session.collections import is_local
from tw_core.flat_variables._session.opening import OpenedInGraph
from tw_core.flat_variables._view import VariableView


class FlatVariables:
    """The flat variables of one model.

    In its scope each small trainable variable becomes a part of one flat variable per
    dtype and device; the model gets a view of its part. A session graph reads each view
    once per step, and ``pack_gradients`` packs the gradients of views; elsewhere a
    model that is called in ``reading()`` has gradients with respect to the flat
    variables themselves.
    """

    def __init__(
        self,
        below_bytes: int = DEFAULT_BELOW_BYTES,
        *,
        group: Group | None = None,
    ) -> None:
        """Sets which variables are small.

        Args:
          below_bytes: variables of fewer bytes are packed into flat ones; 0 packs none.
          group: maps a variable's name without its tower, such as ``"dense/bias"``, to
            a key; variables with equal keys share a flat variable, for optimizers that
            treat variables differently. A key of None leaves the variable alone.

        Raises:
          TypeError, ValueError: ``below_bytes`` is not a whole number, or is negative;
            ``group`` is not a function.
        """
        self._below_bytes = check_whole_number(below_bytes=below_bytes, at_least=0)
        if group is not None:
            check_function(group=group)
        self._group = group
        self._open: dict[Hashable, Opened] | None = None
        self._flat: list[FlatVariable] = []
        self._views: list[VariableView] = []

    @property
    def variables(self) -> list[tf.Variable]:
        """The flat variables made so far."""
        return [flat.variable for flat in self._flat]

    @property
    def views(self) -> list[VariableView]:
        """The views that the model uses in place of its own small variables."""
        return [view for view in self._views if view.is_part]

    @property
    def layouts(self) -> list[Layout]:
        """The layout of each of ``variables``."""
        return [flat.layout for flat in self._flat]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Packs the small variables that are made inside into flat ones.

        The flat variables are made when the scope is left.

        Raises:
          RuntimeError: the scope is open already.
        """
        if self._open is not None:
            raise RuntimeError(
                "FlatVariables.scope: the scope is open already; make one "
                "FlatVariables per model."
            )
        self._open = {}
        try:
            with tf.variable_creator_scope(self._create):
                yield
            made = [one.close() for one in self._open.values()]
            self._flat.extend(flat for flat in made if flat is not None)
        finally:
            self._open = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads each flat variable once for all views that are read inside.

        Their gradient is then one tensor per variable in ``variables``. Does nothing in
        a session graph, where each view is read once anyway.

        Raises:
          ValueError: from a gradient, if some views have none, or a sparse one.
          RuntimeError: inside, if eager code calls a ``tf.function`` that reads views.
        """
        with ExitStack() as scopes:
            if not builds_session_graph():
                for flat in self._flat:
                    scopes.enter_context(flat.reading())
            yield

    def _create(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        made = next_creator(**kwargs)
        key = self._key(made)
        if key is None or self._open is None:
            return made
        if key not in self._open:
            self._open[key] = OpenedInGraph() if builds_session_graph() else Opened()
        view = self._open[key].add(made)
        self._views.append(view)
        return view

    def is_missing(self, variable: Any) -> bool:
        """Returns whether a variable would be packed, had it been made in the scope."""
        if view_of(variable) is not None:
            return all(view_of(variable) is not view for view in self._views)
        return self._key(tf_variable(variable)) is not None

    def keep_alone(self, trained: Sequence[Any]) -> None:
        """Leaves views not in ``trained`` unpacked; to be called in the scope."""
        kept = {id(view) for v in trained if (view := view_of(v)) is not None}
        for one in (self._open or {}).values():
            one.keep(kept)

    def _key(self, made: Any) -> Hashable | None:
        """Returns the key shared by a flat variable's parts; None if not packed."""
        if isinstance(made, VariableView) or not isinstance(made, tf.Variable):
            return None
        may_be = (
            made.trainable
            and not is_reference_variable(made)
            and made.dtype.is_floating
            and made.shape.is_fully_defined()
            and made.constraint is None
        )
        if not may_be:
            return None
        num_bytes = made.shape.num_elements() * made.dtype.size
        if not 0 < num_bytes < self._below_bytes:
            return None
        name, tower = plain_name(made), open_tower_scope()
        name = name if tower is None else tower.shared_name(name)
        group = "" if self._group is None else self._group(name)
        if group is None:
            return None
        graph = getattr(made, "graph", None)
        return (made.dtype.name, made.device, group, is_local(made), id(graph))


def view_of(variable: Any) -> VariableView | None:
    """Returns a variable if it is a view, or a Keras variable's view; else None."""
    plain = variable if isinstance(variable, tf.Variable) else tf_variable(variable)
    return plain if isinstance(plain, VariableView) else None


def views_of(variables: Sequence[Any]) -> list[VariableView | None]:
    """As ``view_of``, for each of several variables."""
    return [view_of(variable) for variable in variables]


def flat_among(variables: Sequence[Any]) -> list[FlatVariable]:
    """Returns the flat variables among ``variables``."""
    found = [flat_variable_of(variable) for variable in tf_variables(variables)]
    return [flat for flat in found if flat is not None]


def flat_variable_of(variable: Any) -> FlatVariable | None:
    """Returns the ``FlatVariable`` of a flat variable; None for any other variable."""
    plain = variable if isinstance(variable, tf.Variable) else tf_variable(variable)
    found = getattr(plain, FLAT_KEY, None)
    return found if isinstance(found, FlatVariable) else None
