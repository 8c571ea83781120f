"""A model's variable that is part of a flat variable."""

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tw_core._tf_compat import with_gradient
from tw_core._variable_kinds import plain_name
from tw_core.flat_variables._session.saving import NotYetSaveable

if TYPE_CHECKING:
    from tw_core.flat_variables._flat_variable import FlatVariable

_VALUE = "VARIABLE_VALUE"


class VariableView(tf.Variable, tf.__internal__.types.Tensor):  # type: ignore[misc]
    """A part of a flat variable, which a model uses in place of its own variable.

    Has the variable's name, shape and dtype; reading it returns its part of the flat
    variable. In a session graph a step reads it once (``value()``); ``read_value()``
    reads it again. An optimizer cannot update it: it updates the flat variable.
    """

    _save_slice_info = None
    # TensorFlow's are properties: here the first four are set for each view.
    name, device = "", ""
    shape, dtype = tf.TensorShape(None), tf.float32
    trainable, constraint = True, None
    synchronization = tf.VariableSynchronization.AUTO
    aggregation = tf.VariableAggregation.NONE

    def __init__(self, own: tf.Variable, value: tf.Tensor | None) -> None:
        """Replaces ``own``, which without ``value`` keeps its value until ``bind``."""
        self._own: tf.Variable | None = own
        self._value = value  # in a session graph, the part that a step reads
        self.flat: FlatVariable | None = None  # until it is made
        self.number = 0  # the index of this part in the flat variable
        self.name, self.device = str(own.name), str(own.device)
        self.shape, self.dtype = own.shape, own.dtype

    def bind(self, flat: "FlatVariable", number: int) -> None:
        """Makes this part ``number`` of a flat variable."""
        self.flat, self.number = flat, number
        if self._value is None:
            self._own = None  # Frees its memory.

    @property
    def is_part(self) -> bool:
        """Whether it is, or will be, part of a flat variable."""
        return self.flat is not None or self._own is None or self._value is not None

    @property
    def holder(self) -> Any:
        """The variable that stores it: the flat one, or its own if it is not packed."""
        return self._own if self.flat is None else self.flat

    # The properties of a variable.

    graph = property(lambda self: self._in_graph("graph").graph)
    op = property(lambda self: self._in_graph("op").op)
    initial_value = property(lambda self: self._in_graph("initial_value").initial_value)
    _in_graph_mode = property(lambda self: self._value is not None)
    _shared_name = property(plain_name)
    _unique_id = property(lambda self: f"view_{id(self)}")

    @property
    def initializer(self) -> tf.Operation:
        return self._bound("initializer").initializer

    @property
    def handle(self) -> tf.Tensor:
        raise AttributeError(
            f"{self.name} is part of a flat variable and has no memory of its own; "
            "apply tw_core.flat_variables.pack_gradients(pairs) instead of pairs."
        )

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        return self._bound("is_initialized").is_initialized(name)

    # Reading.

    def value(self) -> tf.Tensor:
        if self._value is not None:
            return self._value
        return self.read_value()

    def read_value(self) -> tf.Tensor:
        if self._value is not None and self.flat is not None:
            fresh = self.flat.read_part(self.number)
            # Gradients are with respect to ``value()``, as the model's own are.
            return with_gradient([fresh], [self._value], lambda dy: [dy])[0]
        if self._value is not None:  # There is nothing else to read yet.
            return self._value
        if self._own is not None:
            return self._own.read_value()
        return self._bound("read_value").read_part(self.number)

    _ref = _as_graph_element = value

    def _dense_var_to_tensor(
        self, dtype: Any = None, name: str | None = None, as_ref: bool = False
    ) -> tf.Tensor:
        del name, as_ref
        if dtype is not None and not tf.as_dtype(dtype).is_compatible_with(self.dtype):
            raise ValueError(
                f"{self.name}: has the dtype {self.dtype.name}; got a use as "
                f"{tf.as_dtype(dtype).name}. Cast it with tf.cast."
            )
        return self.value()

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self._dense_var_to_tensor(dtype, name)

    def numpy(self) -> Any:
        """Returns its value; only outside of graphs."""
        return self.read_value().numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        del copy  # np.array always copies.
        return np.array(self.numpy(), dtype)

    def eval(self, session: tf.compat.v1.Session | None = None) -> Any:
        return self.read_value().eval(session=session)

    def __repr__(self) -> str:
        return (
            f"<VariableView {self.name!r} shape={self.shape} dtype={self.dtype.name}>"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> tf.Variable:
        copied = tf.Variable(self.read_value(), name=self._shared_name)
        memo[id(self)] = copied
        return copied

    # Writing: loading weights, not training.

    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Writes its part of the flat variable.

        Each such call copies the flat variable; a checkpoint is restored in one go.
        """
        if self.flat is None and self._value is None and self._own is not None:
            return self._own.assign(value, use_locking, name, read_value)
        given = tf.convert_to_tensor(value, self.dtype)
        if not given.shape.is_compatible_with(self.shape):
            raise ValueError(
                f"{self.name}: has the shape {self.shape}; got a value of shape "
                f"{given.shape}."
            )
        op = self._bound("assign").assign_part(self.number, given)
        if self._value is None:
            return self if read_value else None
        if not read_value:
            return op
        with tf.control_dependencies([op]):
            return self.read_value()

    def assign_add(self, delta: Any, *options: Any, **named: Any) -> Any:
        return self.assign(self.read_value() + delta, *options, **named)

    def assign_sub(self, delta: Any, *options: Any, **named: Any) -> Any:
        return self.assign(self.read_value() - delta, *options, **named)

    def load(self, value: Any, session: tf.compat.v1.Session | None = None) -> None:
        session = session or tf.compat.v1.get_default_session()
        session.run(self.assign(value, read_value=False))

    def _set_save_slice_info(self, save_slice_info: Any) -> None:
        raise ValueError(
            f"{self.name}: has a partitioner, and a partitioned variable cannot be in "
            "a flat variable; make it without, or large enough to stay separate."
        )

    def to_proto(self, export_scope: str | None = None) -> None:
        """Returns None: an exported graph has the flat variable only."""
        del export_scope

    # tf.compat.v1.train.Saver, and init_from_checkpoint, which sets _initial_value.

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        if self.flat is not None:
            return self.flat.gather_parts([self.number])
        if self._value is None:
            return {_VALUE: self._own}
        return {_VALUE: lambda name="": NotYetSaveable(self)}

    @property
    def _initial_value(self) -> tf.Tensor:
        return self.initial_value

    @_initial_value.setter
    def _initial_value(self, value: tf.Tensor) -> None:
        self._in_graph("initial_value")._initial_value = value
        if self.flat is not None:  # Otherwise it starts from its parts' values.
            self.flat.start_part(self.number, value)

    # tf.train.Checkpoint, including Keras's.

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_VALUE: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return self.assign(restored_tensors[_VALUE])

    def _export_to_saved_model_graph(self, *arguments: Any, **named: Any) -> Any:
        del arguments, named
        raise ValueError(
            f"{self.name} is part of a flat variable, which a SavedModel cannot hold; "
            "save the model as a .keras file, or its weights or checkpoint, load that "
            "into a model made without flat variables, and export that model."
        )

    def _bound(self, asked: str) -> "FlatVariable":
        if self.flat is None:
            raise RuntimeError(
                f"{self.name}.{asked}: its flat variable is made when the scope of "
                "FlatVariables is left; ask afterwards."
            )
        return self.flat

    def _in_graph(self, asked: str) -> tf.Variable:
        if self._value is None:
            raise AttributeError(f"{asked} is meaningless outside of session graphs.")
        return self._own
