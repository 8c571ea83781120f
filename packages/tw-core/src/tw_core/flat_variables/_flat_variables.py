"""Putting the small variables that a model makes into flat ones."""

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
from tw_core.checks import check_function, check_list, check_whole_number
from tw_core.flat_packs import join
from tw_core.flat_variables._flat_variable import FlatVariable, describe_sparse
from tw_core.flat_variables._layout import (
    DEFAULT_BELOW_BYTES,
    Group,
    Layout,
    is_slot_name,
)
from tw_core.flat_variables._view import VariableView
from tw_core.modes import builds_session_graph, without_autograph

_KEYS = tf.compat.v1.GraphKeys
_FLAT = "_towers_flat_variable"


class FlatVariables:
    """The flat variables of one model.

    In its scope each small trainable variable becomes a part of one flat variable per
    dtype and device; the model gets a view of its part. A session graph reads each view
    once per step. Gradients of views are packed by ``pack_gradients``; elsewhere a
    model that is called in ``reading()`` has gradients by the flat variables
    themselves.
    """

    def __init__(
        self,
        below_bytes: int = DEFAULT_BELOW_BYTES,
        *,
        group: Group | None = None,
    ) -> None:
        """Says what is small.

        Args:
          below_bytes: variables of fewer bytes lie in flat ones; 0 for none.
          group: takes a variable's name without the tower in it, as
            ``"dense/bias"``, and returns what those in one flat variable have in
            common, for optimizers that treat variables differently; None leaves it
            alone.

        Raises:
          TypeError, ValueError: ``below_bytes`` is no whole number, or negative;
            ``group`` is no function.
        """
        self._below_bytes = check_whole_number(
            "FlatVariables", below_bytes=below_bytes, at_least=0
        )
        if group is not None:
            check_function("FlatVariables", group=group)
        self._group = group
        self._open: dict[Hashable, _Open] | None = None
        self._flat: list[FlatVariable] = []
        self._views: list[VariableView] = []

    @property
    def variables(self) -> list[tf.Variable]:
        """The flat variables that there are."""
        return [flat.variable for flat in self._flat]

    @property
    def views(self) -> list[VariableView]:
        """What the model uses in place of its own small variables."""
        return [view for view in self._views if view.is_part]

    @property
    def layouts(self) -> list[Layout]:
        """Whose part is where, for each of ``variables``."""
        return [flat.layout for flat in self._flat]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Puts the small variables that are made inside into flat ones.

        They are there when the scope is left.

        Raises:
          RuntimeError: it is entered again before it is left.
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

        Their gradient is then one tensor, by ``variables``. Does nothing in a session
        graph, where each view is read once anyway.
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
        """Returns whether a variable would be here, had it been made in the scope."""
        if view_of(variable) is not None:
            return all(view_of(variable) is not view for view in self._views)
        return self._key(tf_variable(variable)) is not None

    def keep_alone(self, trained: Sequence[Any]) -> None:
        """Leaves views that are not among ``trained`` what they are; in the scope."""
        kept = {id(view) for v in trained if (view := view_of(v)) is not None}
        for one in (self._open or {}).values():
            one.keep(kept)

    def _key(self, made: Any) -> Hashable | None:
        """Returns what variables in one flat variable have in common."""
        if isinstance(made, VariableView) or not isinstance(made, tf.Variable):
            return None
        may_be = (
            made.trainable
            and not is_reference_variable(made)
            and made.dtype.is_floating
            and made.shape.is_fully_defined()
            and made.constraint is None
        )
        if not may_be or not _is_small(made, self._below_bytes):
            return None
        group = "" if self._group is None else self._group(_name_for_group(made))
        if group is None:
            return None
        graph = getattr(made, "graph", None)
        return (made.dtype.name, made.device, group, _is_local(made), id(graph))


class _Open:
    """A flat variable that is not complete."""

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
            _swap(own.graph, own, view)
            own.graph.add_to_collection(HIDDEN_HANDLES, own.handle.op.name)
        self._own.append(own)
        self._views.append(view)
        return view

    def keep(self, views: set[int]) -> None:
        """Leaves out all but these, by their ids; outside of session graphs."""
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
        """Reads the last part of what will be there when all parts are known.

        Two handles of one name are one variable: the one that is read now knows no
        shape yet.
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
            # Cut where the model is: from a server one tensor travels.
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
        setattr(flat.variable, _FLAT, flat)
        for number, view in enumerate(self._views):
            view.bind(flat, number)
        return flat

    def _close_with_values(self) -> FlatVariable:
        first = self._own[0]
        # Optimizers may list what they keep by its name: alike in every tower.
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


@without_autograph
def pack_gradients(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Joins the gradients of views into those of their flat variables.

    In a session graph apply them by ``tw_core.optimizers.apply_pairs`` or a class of
    these packages, or within ``slots_like_parts``; a saver would otherwise have the
    slots as they lie.

    Args:
      pairs: (gradient, variable) of a model; views and others. Keras's variables too.

    Returns:
      (gradient, variable) of the flat variables, each where its first view was, and of
      the other variables as they came.

    Raises:
      ValueError: a flat variable some of whose views have no gradient, or two, or a
        sparse one, which many optimizers apply otherwise than a dense one.
      TypeError: something that is not a list of pairs.
    """
    check_list("pack_gradients", pairs=pairs, of="pairs", empty=True)
    others = [p for p in pairs if not isinstance(p, tuple | list) or len(p) != 2]
    if others:
        raise TypeError(
            f"pack_gradients: pairs must hold (gradient, variable) pairs; got {others}."
        )
    packed: dict[int, list[tuple[Any, VariableView]]] = {}
    order: list[tuple[Any, Any]] = []
    for grad, variable in pairs:
        view = view_of(variable)
        if view is None:
            order.append((grad, variable))
            continue
        own = packed.setdefault(id(_flat_of_view(view)), [])
        if not own:
            order.append((own, view))
        own.append((grad, view))
    return [
        _packed(item, variable.flat) if isinstance(item, list) else (item, variable)
        for item, variable in order
    ]


def _packed(
    own: Sequence[tuple[Any, VariableView]], flat: FlatVariable
) -> tuple[tf.Tensor, tf.Variable]:
    counts = [0] * len(flat.layout.parts)
    grads: list[Any] = [None] * len(counts)
    for grad, view in own:
        counts[view.number] += grad is not None
        grads[view.number] = grad
    wrong = [
        f"{part.name} ({count})"
        for part, count in zip(flat.layout.parts, counts, strict=True)
        if count != 1
    ]
    if wrong:
        raise ValueError(
            f"pack_gradients: the variables of {flat.name} must have one gradient "
            f"each; got another number for {', '.join(wrong)}. Leave those that do "
            "not train out of it with FlatVariables(group=...)."
        )
    sparse = [v.name for g, v in own if isinstance(g, tf.IndexedSlices)]
    if sparse:
        raise ValueError(f"pack_gradients: {describe_sparse(sparse)}")
    # Where they were computed: what travels then is one tensor.
    with tf.device(getattr(grads[0], "device", "") or flat.device):
        return join(grads), flat.variable


def view_of(variable: Any) -> VariableView | None:
    """Returns the view that a variable is or, as Keras's may, holds."""
    plain = tf_variable(variable)
    return plain if isinstance(plain, VariableView) else None


def flat_variable_of(variable: Any) -> FlatVariable | None:
    """Returns what lies in a flat variable; None for any other variable."""
    found = getattr(tf_variable(variable), _FLAT, None)
    return found if isinstance(found, FlatVariable) else None


@contextmanager
def slots_like_parts(variables: Sequence[Any]) -> Iterator[None]:
    """Has what an optimizer keeps beside flat variables be saved part by part.

    Args:
      variables: that the optimizer updates inside, flat ones or not.
    """
    flats = [flat for v in variables if (flat := flat_variable_of(v)) is not None]
    if not flats or not builds_session_graph():
        yield
        return

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        made = next_creator(**kwargs)
        name = made.name.split(":")[0]
        for flat in flats:
            layout = _layout_of_slot(name, flat)
            if made.shape == flat.shape and layout is not None:
                slot = FlatVariable(made, layout)
                setattr(made, _FLAT, slot)
                _swap(made.graph, made, slot)
        return made

    with tf.variable_creator_scope(create):
        yield


def _layout_of_slot(name: str, flat: FlatVariable) -> Layout | None:
    """Returns what lies where in a slot; None if it is another's.

    It may be called after tower 0's variable, of which ``flat`` is a copy.
    """
    own, main = flat.name.split(":")[0], base_name(flat)
    if is_slot_name(name, own):
        return flat.layout.renamed(name, own)
    if is_slot_name(name, main):
        prefix = own.removesuffix(main)
        return flat.layout.without_prefix(prefix).renamed(name, main)
    return None


def _flat_of_view(view: VariableView) -> FlatVariable:
    if view.flat is None:
        raise ValueError(
            f"pack_gradients: the flat variable of {view.name} is made when the scope "
            "of FlatVariables is left; pack afterwards."
        )
    return view.flat


def _name_for_group(variable: tf.Variable) -> str:
    name = str(variable.name).split(":")[0]
    tower = open_tower_scope()
    return name if tower is None else tower.shared_name(name)


def _is_small(variable: tf.Variable, below_bytes: int) -> bool:
    size = variable.shape.num_elements() * variable.dtype.size
    return bool(0 < size < below_bytes)


def _is_local(variable: Any) -> bool:
    graph = getattr(variable, "graph", None)
    local = graph.get_collection(_KEYS.LOCAL_VARIABLES) if graph is not None else []
    return any(variable is other for other in local)


def _swap(graph: tf.Graph, old: Any, new: Any) -> None:
    """Puts ``new`` in the place of ``old`` in a graph's collections and its record."""
    for key in graph.get_all_collection_keys():
        items = graph.get_collection_ref(key)
        for i, item in enumerate(items):
            if item is old:
                items[i] = new
    make_record(graph).hand_over(old, new)
