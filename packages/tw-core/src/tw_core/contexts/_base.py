"""Entering and leaving a tower: its names, variables and collections.

Shared by training and inference towers, in a session graph and inside a
``tf.function``. Everything is restored on exit, even after an exception.

The current tower is not a module global: two threads may build two graphs, and one
thread may open a second graph inside a tower of the first. The bodies of ``tf.cond``,
``tf.while_loop`` and functions belong to the graph around them.
"""

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, Self

import tensorflow as tf

from tw_core._checks import check_text
from tw_core._modes import without_autograph
from tw_core._records.collections import TowerCollections, with_outer_graphs
from tw_core._records.losses import own_losses
from tw_core._variable_kinds import refuse_reference_variables

_SCOPE = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")


class _Entered(threading.local):
    """The towers that this thread has entered, with their graphs."""

    towers: "tuple[tuple[tf.Graph, BaseTowerContext], ...]" = ()


_entered = _Entered()


@without_autograph
def get_current_tower_context() -> Any:
    """Returns the tower entered in this thread for the graph being built.

    Inside the body of a ``tf.cond``, ``tf.while_loop`` or ``tf.function`` that
    a tower builds, it is that tower.

    Returns:
      The context, such as a ``TrainTowerContext``, or None outside of towers.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    for own in with_outer_graphs(graph):
        for entered_graph, tower in _entered.towers:
            if entered_graph is own:
                return tower
    return None


class BaseTowerContext(ABC):
    """Base of training and inference towers; enter it with ``with``, once.

    Attributes:
      is_training: whether the model is built for training.
    """

    is_training = False

    def __init__(self, ns_name: str, vs_name: str = "") -> None:
        """Names the tower; nothing is built before it is entered.

        Args:
          ns_name: name scope of the tower's ops; empty for none.
          vs_name: variable scope of the tower's own variables; empty to use
            the current scope.

        Raises:
          ValueError: a ``vs_name`` without a ``ns_name``, or a name that ends
            in ``/``.
          TypeError: a name that is not a string.
        """
        check_text(ns_name=ns_name, empty=True)
        check_text(vs_name=vs_name, empty=True)
        self._name = ns_name
        self._vs_name = vs_name
        self._graph: tf.Graph | None = None
        self._collections: TowerCollections | None = None
        self._scopes = ExitStack()
        self._new_trainable: list[str] = []
        if vs_name and not ns_name:
            raise ValueError(
                f"{self}: a tower with a vs_name needs a name as well, the name scope "
                "of its ops."
            )
        if ns_name.endswith("/") or vs_name.endswith("/"):
            raise ValueError(f"{self}: names must not end in '/'; omit it.")

    @property
    def name(self) -> str:
        """The tower's name, ``""`` for a tower without one."""
        return self._name

    @property
    def ns_name(self) -> str:
        """The name scope of the tower's ops; the same as ``name``."""
        return self._name

    @property
    def vs_name(self) -> str:
        """The variable scope of the tower's own variables, or ``""``."""
        return self._vs_name

    @property
    @abstractmethod
    def is_main_training_tower(self) -> bool:
        """Whether this is the first training tower."""

    @property
    @abstractmethod
    def has_own_variables(self) -> bool:
        """Whether the tower makes variables, rather than reusing another tower's."""

    @property
    def graph(self) -> tf.Graph:
        """The graph the tower was built in.

        Raises:
          RuntimeError: the tower has not been entered yet.
        """
        if self._graph is None:
            raise RuntimeError(f"{self}: enter the tower first: with {self}: ...")
        return self._graph

    def get_collection_in_tower(self, key: str) -> list[Any]:
        """Lists this tower's additions to a collection, frozen collections included.

        Args:
          key: e.g. ``tf.compat.v1.GraphKeys.UPDATE_OPS``.

        Raises:
          RuntimeError: the tower has not been entered yet.
          TypeError: ``key`` is not a string.
        """
        check_text(key=key)
        if self._collections is None:
            raise RuntimeError(f"{self}: enter the tower first: with {self}: ...")
        return self._collections.added(key)

    def __enter__(self) -> Self:
        """Makes this the current tower of the thread and graph.

        Raises:
          RuntimeError: in eager mode.
          ValueError: inside another tower, a second time, in a variable scope
            that the tower refuses, or where the name is taken.
        """
        graph = self._check_can_enter()
        collections = TowerCollections(graph, self._frozen_keys(graph))
        with ExitStack() as scopes:
            scopes.callback(collections.close)
            scopes.enter_context(self._variable_scope())
            scopes.enter_context(own_losses(self._owner_of_losses()))
            scopes.enter_context(self._name_scope(graph))
            scopes.enter_context(tf.variable_creator_scope(self._note))
            scopes.enter_context(self._recording())
            scopes.enter_context(self._as_current(graph))
            self._scopes = scopes.pop_all()
        self._graph, self._collections = graph, collections
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Leaves the tower and restores its frozen collections.

        Raises:
          ValueError: the tower made trainable variables but may not.
        """
        self._scopes.__exit__(kind, error, trace)
        new = self._new_trainable
        if kind is None and new and not self.has_own_variables:
            raise ValueError(
                f"{self}: may not make trainable variables, since it reuses those "
                f"of another tower; got {new}. Make them in the first tower with "
                "tf.compat.v1.get_variable, or give this tower a vs_name."
            )

    def __repr__(self) -> str:
        """Shows the class, the name and the variable scope."""
        return f"{type(self).__name__}({self._name!r}, vs_name={self._vs_name!r})"

    @abstractmethod
    def _frozen_keys(self, graph: tf.Graph) -> list[str]:
        """Lists the collections that the tower leaves unchanged."""

    @abstractmethod
    def _check_current_scope(self) -> None:
        """Notes or refuses the current variable scope."""

    def _owner_of_losses(self) -> Hashable:
        return id(self)  # It shares losses with no other tower.

    def _recording(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _reuse(self) -> bool | None:
        return None  # as in the current scope

    def _variable_scope(self) -> AbstractContextManager[Any]:
        # Always a scope object, so that scopes with a default name get the same
        # numbers in every tower (tensorflow/tensorflow#14703).
        scope = tf.compat.v1.variable_scope(
            self._vs_name or tf.compat.v1.get_variable_scope(),
            reuse=self._reuse(),
            auxiliary_name_scope=False,
        )
        return scope  # type: ignore[no-any-return]

    @contextmanager
    def _name_scope(self, graph: tf.Graph) -> Iterator[None]:
        """Opens a name scope with exactly the tower's name.

        TensorFlow would silently make the name unique, or nest it in an open scope;
        handles would then look for tensors under a name that does not exist. A scope
        that is already open, as in ``Tower.scope()``, is used as it is.
        """
        open_scope = graph.get_name_scope()
        if self._name == open_scope:
            yield
            return
        if not self._name:
            raise ValueError(
                f"{self}: a tower without a name cannot be entered in the name scope "
                f"{open_scope!r}, with which its tensors' names would begin; enter it "
                "outside of that scope, or name it."
            )
        with graph.name_scope(None):
            unique = graph.unique_name(self._name, mark_as_used=False)
            if unique != self._name:
                raise ValueError(
                    f"{self}: the graph has something named {self._name!r} already, so "
                    f"that the tower's ops would be named {unique!r}; give the tower "
                    "another name."
                )
            with graph.name_scope(self._name):
                yield

    def _note(
        self, next_creator: Callable[..., tf.Variable], **kwargs: Any
    ) -> tf.Variable:
        # A creator, since a tf.function has no collections to read afterwards.
        variable = next_creator(**kwargs)
        refuse_reference_variables([variable])
        if variable.trainable:
            self._new_trainable.append(variable.name)
        return variable

    @contextmanager
    def _as_current(self, graph: tf.Graph) -> Iterator[None]:
        _entered.towers = (*_entered.towers, (graph, self))
        try:
            yield
        finally:
            _entered.towers = tuple(t for t in _entered.towers if t[1] is not self)

    def _check_can_enter(self) -> tf.Graph:
        if tf.executing_eagerly():
            raise RuntimeError(
                f"{self}: a tower context needs a graph; got eager mode. Use it "
                "inside tf.Graph().as_default() or a tf.function, or use "
                "tw_core.map_towers, which works eagerly too."
            )
        current = get_current_tower_context()
        if current is not None:
            raise ValueError(
                f"{self}: cannot be entered inside {current}; leave that tower first."
            )
        if self._graph is not None:
            raise ValueError(f"{self}: was entered before; make a new one.")
        unfit = [
            n for n in (self._name, self._vs_name) if n and not _SCOPE.fullmatch(n)
        ]
        if unfit:
            raise ValueError(
                f"{self}: {unfit} cannot name scopes of a graph; use letters, digits, "
                "'_', '.', '-' and '/', beginning with a letter, a digit or '.'."
            )
        self._check_current_scope()
        return tf.compat.v1.get_default_graph()
