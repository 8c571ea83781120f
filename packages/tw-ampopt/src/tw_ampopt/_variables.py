"""Variables: state made the same way in both modes, and the devices of variables."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core.devices import canonical_device
from tw_core.internal import tf_variable, tf_variables

_LOCAL = tf.compat.v1.GraphKeys.LOCAL_VARIABLES


def make_state(
    initial: float | int | Callable[[], tf.Tensor], *, name: str, device: str
) -> tf.Variable:
    """Makes one variable of state, outside of any control flow being built."""
    dtype = {int: tf.int64, float: tf.float32}.get(type(initial))
    with tf.init_scope(), tf.device(device or None):
        return tf.Variable(initial, trainable=False, name=name, dtype=dtype)


def are_local(variables: Sequence[Any]) -> bool:
    """Tests whether all are local variables of a session graph, that is, copies."""
    plain = tf_variables(variables)
    graphs = [g for v in plain if (g := getattr(v, "graph", None)) is not None]
    if not graphs or len(graphs) < len(plain):
        return False
    local = {id(variable) for variable in graphs[0].get_collection(_LOCAL)}
    return all(id(variable) in local for variable in plain)


def host_of(device: str) -> str:
    """Returns the host CPU of a device, where the scalars that control a step live.

    >>> host_of("/gpu:3")
    '/device:CPU:0'
    >>> host_of("/cpu:1")
    '/device:CPU:1'
    """
    spec = tf.DeviceSpec.from_string(canonical_device(device))
    if spec.device_type in (None, "CPU"):
        return str(spec.to_string())
    return str(spec.replace(device_type="CPU", device_index=0).to_string())


def common_device(variables: Sequence[Any]) -> str:
    """Returns the device that holds all variables, or ``""`` where there is none."""
    devices = [variable.device for variable in tf_variables(variables)]
    return str(devices[0]) if len(set(map(canonical_device, devices))) == 1 else ""


def identity(variable: Any) -> int:
    """Returns a key shared by a Keras variable and the ``tf.Variable`` in it."""
    return id(tf_variable(variable))


def bool_after(ops: Sequence[Any], value: bool) -> tf.Tensor:
    """Returns a constant for a branch to return, known once ops have run."""
    with tf.control_dependencies(present(ops)):
        return tf.constant(value)


def present(items: Sequence[Any]) -> list[Any]:
    """Drops None, which an eager assignment without ``read_value`` returns."""
    return [item for item in items if item is not None]
