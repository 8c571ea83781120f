"""Packs the small variables that a model makes into flat ones."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf

from tw_core._records.origins import (
    TowerScope,
    base_name,
    make_record,
    open_tower_scope,
)
from tw_core._variable_kinds import (
    HIDDEN_HANDLES,
    is_reference_variable,
    tf_variable,
)
from tw_core.checks import check_function, check_whole_number, public
from tw_core.flat_packs import join
from tw_core.flat_variables._flat_variable import FlatVariable
from tw_core.flat_variables._layout import (
    DEFAULT_BELOW_BYTES,
    Group,
    Layout,
)
from tw_core.flat_variables._view import VariableView
from tw_core.modes import builds_session_graph

_KEYS = tf.compat.v1.GraphKeys
FLAT_KEY = "_towers_flat_variable"


class FlatVariables:
    """The flat variables of one model.

    In its scope each small trainable variable becomes a part of one flat variable per
    dtype and device; the model gets a view of its part. A session graph reads each view
    once per step, and ``pack_gradients`` packs the gradients of views; elsewhere a
    model that is called in ``reading()`` has gradients with respect to the flat
    variables themselves.
    """

    @public
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
        self._open: dict[Hashable, _Open] | None = None
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
                "FlatVariables.scope: is open already; make one FlatVariables per "
                "model."
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
        view = self._open.setdefault(key, _Open()).add(made)
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
        name, tower = str(made.name).split(":")[0], open_tower_scope()
        name = name if tower is None else tower.shared_name(name)
        group = "" if self._group is None else self._group(name)
        if group is None:
            return None
        graph = getattr(made, "graph", None)
        return (made.dtype.name, made.device, group, _is_local(made), id(graph))


class _Open:
    """A flat variable that is not complete yet."""

    def __init__(self) -> None:
        self._views: list[VariableView] = []
        self._own: list[tf.Variable] = []
        self._layout = Layout()
        self._read: tf.Tensor | None = None
        self._scope = ""
        self._tower: TowerScope | None = None
        self._prefix = ""

    def add(self, own: tf.Variable) -> VariableView:
        """Returns the view that takes a variable's place."""
        self._layout = self._layout.add(own.name.split(":")[0], own.shape)
        value = self._value_in_graph(own) if builds_session_graph() else None
        view = VariableView(own, value)
        if value is not None:
            swap_in_collections(own.graph, own, view)
            own.graph.add_to_collection(HIDDEN_HANDLES, own.handle.op.name)
        self._own.append(own)
        self._views.append(view)
        return view

    def keep(self, views: set[int]) -> None:
        """Keeps only the views with these ids; outside of session graphs."""
        kept = [
            (own, view)
            for own, view in zip(self._own, self._views, strict=True)
            if id(view) in views
        ]
        self._own, self._views = [own for own, _ in kept], [view for _, view in kept]
        self._layout = Layout()
        for own in self._own:
            self._layout = self._layout.add(own.name.split(":")[0], own.shape)

    def _value_in_graph(self, own: tf.Variable) -> tf.Tensor:
        """Reads the last part of a flat variable whose later parts are not known yet.

        Handles with one name are one variable: the one read here has no shape yet.
        """
        part = self._layout.parts[-1]
        dtype = own.dtype.base_dtype
        with tf.init_scope():
            if self._read is None:
                self._scope = self._open_scope(own.graph)
                name = f"{self._scope}/{dtype.name}"
                with (
                    tf.device(None),
                    tf.device(own.device),
                    tf.name_scope(f"{self._scope}/"),
                ):
                    handle = tf.raw_ops.VarHandleOp(
                        dtype=dtype,
                        shape=tf.TensorShape(None),
                        shared_name=name,
                        name="incomplete",
                    )
                    own.graph.add_to_collection(HIDDEN_HANDLES, handle.op.name)
                    self._read = tf.raw_ops.ReadVariableOp(
                        resource=handle, dtype=dtype, name="read"
                    )
            # Sliced where the model is: a server sends one tensor.
            with tf.name_scope(f"{part.name}/"):
                flat = tf.slice(self._read, [part.start], [part.size], name="view")
                is_flat = len(part.shape) == 1
                return flat if is_flat else tf.reshape(flat, part.shape, name="view")

    def close(self) -> FlatVariable | None:
        """Makes the flat variable; None if nothing is in it."""
        if not self._views:
            return None
        if self._read is None:
            flat = self._close_with_values()
        else:
            flat = self._close_in_graph()
        setattr(flat.variable, FLAT_KEY, flat)
        for number, view in enumerate(self._views):
            view.bind(flat, number)
        return flat

    def _close_with_values(self) -> FlatVariable:
        first = self._own[0]
        # Optimizers may list slots by this name: the same in every tower.
        prefix = str(first.name).split(":")[0].removesuffix(base_name(first))
        with tf.init_scope(), tf.device(first.device):
            made = tf.Variable(
                join([tf.reshape(own.read_value(), [-1]) for own in self._own]),
                name=f"{prefix}flat/{first.dtype.name}",
            )
        return FlatVariable(made, self._layout)

    def _close_in_graph(self) -> FlatVariable:
        first, view = self._own[0], self._views[0]
        local = _is_local(view)
        v1 = tf.compat.v1
        with (
            tf.init_scope(),
            tf.device(None),
            tf.device(first.device),
            v1.name_scope(f"{self._scope}/"),
        ):
            made = v1.Variable(
                join([tf.reshape(own.initial_value, [-1]) for own in self._own]),
                trainable=False,
                collections=[],
                name=first.dtype.base_dtype.name,
                use_resource=True,
            )
        flat = FlatVariable(made, self._layout)
        graph = made.graph
        key = _KEYS.LOCAL_VARIABLES if local else _KEYS.GLOBAL_VARIABLES
        parts = {id(view) for view in self._views}
        for collection in (_KEYS.LOCAL_VARIABLES, _KEYS.GLOBAL_VARIABLES):
            items = graph.get_collection_ref(collection)
            items[:] = [item for item in items if id(item) not in parts]
        graph.add_to_collection(key, flat)
        if self._tower is not None:
            record = make_record(graph)
            record.add(flat, self._tower.index, self._prefix, is_local=local)
        return flat

    def _open_scope(self, graph: tf.Graph) -> str:
        """Finds a name scope like those of the tower's other variables."""
        self._tower = open_tower_scope()
        if self._tower is not None:
            self._prefix = self._tower.prefix()
        with graph.name_scope(None):
            return str(graph.unique_name(f"{self._prefix}/flat".lstrip("/")))


def view_of(variable: Any) -> VariableView | None:
    """Returns the view that a variable is or, as Keras's may, holds; else None."""
    plain = variable if isinstance(variable, tf.Variable) else tf_variable(variable)
    return plain if isinstance(plain, VariableView) else None


def views_of(variables: Sequence[Any]) -> list[VariableView | None]:
    """As ``view_of``, of each of several."""
    return [view_of(variable) for variable in variables]


def flat_among(variables: Sequence[Any]) -> list[FlatVariable]:
    """Returns those of several variables that are flat."""
    found = [flat_variable_of(variable) for variable in variables]
    return [flat for flat in found if flat is not None]


def flat_variable_of(variable: Any) -> FlatVariable | None:
    """Returns the ``FlatVariable`` of a flat variable; None for any other variable."""
    plain = variable if isinstance(variable, tf.Variable) else tf_variable(variable)
    found = getattr(plain, FLAT_KEY, None)
    return found if isinstance(found, FlatVariable) else None


def _is_local(variable: Any) -> bool:
    graph = getattr(variable, "graph", None)
    local = graph.get_collection(_KEYS.LOCAL_VARIABLES) if graph is not None else []
    return any(variable is other for other in local)


def swap_in_collections(graph: tf.Graph, old: Any, new: Any) -> None:
    """Puts ``new`` in the place of ``old`` in a graph's collections and its record."""
    for key in graph.get_all_collection_keys():
        items = graph.get_collection_ref(key)
        for i, item in enumerate(items):
            if item is old:
                items[i] = new
    make_record(graph).hand_over(old, new)
