"""A flat variable of a session graph that is not complete yet."""

import tensorflow as tf

from tw_core._flat_packs import join_flat
from tw_core._records.origins import TowerScope, make_record, open_tower_scope
from tw_core._variable_kinds import HIDDEN_HANDLES
from tw_core.flat_variables._flat_variable import FlatVariable
from tw_core.flat_variables._opening import Opened
from tw_core.flat_variables._session.collections import is_local, swap_in_collections
from tw_core.flat_variables._view import VariableView

_KEYS = tf.compat.v1.GraphKeys


class OpenedInGraph(Opened):
    """A flat variable whose parts are read before it is made."""

    def __init__(self) -> None:
        super().__init__()
        self._read: tf.Tensor | None = None
        self._scope = ""
        self._tower: TowerScope | None = None
        self._prefix = ""

    def make_view(self, own: tf.Variable) -> VariableView:
        """Puts the view of a variable in the variable's place in collections."""
        view = VariableView(own, self._value_of_last(own))
        swap_in_collections(own.graph, own, view)
        own.graph.add_to_collection(HIDDEN_HANDLES, own.handle.op.name)
        return view

    def _value_of_last(self, own: tf.Variable) -> tf.Tensor:
        """Reads the last part of a flat variable whose later parts are not known yet.

        Handles with one name are one variable: the one read here has no shape yet.
        """
        part = self.layout.parts[-1]
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

    def make(self) -> FlatVariable:
        """Joins the initial values, and takes the parts out of the collections."""
        first, view = self.own[0], self.views[0]
        local = is_local(view)
        v1 = tf.compat.v1
        with (
            tf.init_scope(),
            tf.device(None),
            tf.device(first.device),
            v1.name_scope(f"{self._scope}/"),
        ):
            made = v1.Variable(
                join_flat([tf.reshape(own.initial_value, [-1]) for own in self.own]),
                trainable=False,
                collections=[],
                name=first.dtype.base_dtype.name,
                use_resource=True,
            )
        flat = FlatVariable(made, self.layout)
        graph = made.graph
        key = _KEYS.LOCAL_VARIABLES if local else _KEYS.GLOBAL_VARIABLES
        parts = {id(view) for view in self.views}
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
