"""Restoring checkpoints that tensorpack's trainers saved.

tensorpack 0.11 called the optimizer in a name scope of the builder. Slots are named
after their variables, but the names of other state, such as Adam's ``beta1_power``,
include the scope; here they do not, as on one device.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import tensorflow as tf

from tw_core.internal import check_list, check_text, plain_name

# Those of SyncMultiGPUReplicatedBuilder and AsyncMultiGPUBuilder; the rest have none.
_SCOPES = ("", "apply_gradients/", "async_apply_gradients/")


def assignment_map(
    checkpoint: str, variables: Sequence[tf.Variable] | None = None
) -> dict[str, tf.Variable]:
    """Finds the name under which tensorpack saved each variable.

    For ``tf.compat.v1.train.Saver(assignment_map(path)).restore(session, path)``, or
    ``tf.compat.v1.train.init_from_checkpoint(path, assignment_map(path))``.
    Checkpoints written by these packages work as well.

    Args:
      checkpoint: the prefix that ``ModelSaver`` logged, such as
        ``"train_log/model-1000"``; or a folder, for its latest checkpoint.
      variables: those to restore; by default the default graph's global variables.

    Returns:
      Variables by their names in the checkpoint.

    Raises:
      ValueError: there is no such checkpoint; it lacks some of the variables, or their
        shapes or dtypes differ; or there are no variables.
      TypeError: an argument of another type.
    """
    check_text(checkpoint=checkpoint)
    saved = _read_specs(checkpoint)
    if variables is None:
        variables = tf.compat.v1.global_variables()
    check_list(variables=variables, of="variables")
    others = [value for value in variables if not isinstance(value, tf.Variable)]
    if others:
        raise TypeError(
            f"assignment_map: variables must be tf.Variables; got {others}."
        )
    names = [_saved_name(variable, saved) for variable in variables]
    faults = filter(None, map(partial(_fault, saved=saved), variables, names))
    if listed := "; ".join(faults):
        raise ValueError(
            f"assignment_map: {checkpoint} does not fit: {listed}. Build the model "
            "that was saved, or pass only the variables to be restored."
        )
    return dict(zip(names, variables, strict=True))


def _read_specs(checkpoint: str) -> dict[str, tf.TensorSpec]:
    try:
        reader = tf.train.load_checkpoint(checkpoint)
    except (ValueError, tf.errors.OpError) as error:
        raise ValueError(
            f"assignment_map: {checkpoint!r} is neither a checkpoint nor a folder with "
            "one; pass e.g. 'train_log/model-1000', without '.index'."
        ) from error
    dtypes = reader.get_variable_to_dtype_map()
    shapes = reader.get_variable_to_shape_map()
    return {name: tf.TensorSpec(shapes[name], dtypes[name]) for name in shapes}


def _saved_name(variable: tf.Variable, saved: Mapping[str, tf.TensorSpec]) -> str:
    """Returns the name in the checkpoint, or the variable's own if it is missing."""
    own = plain_name(variable)
    return next((scope + own for scope in _SCOPES if scope + own in saved), own)


def _fault(
    variable: tf.Variable, name: str, *, saved: Mapping[str, tf.TensorSpec]
) -> str | None:
    if name not in saved:
        return f"it has no {name}"
    spec, dtype = saved[name], variable.dtype.base_dtype
    if spec.shape == variable.shape and spec.dtype == dtype:
        return None
    return (
        f"it has {name} as {spec.dtype.name} {spec.shape}, and the variable is "
        f"{dtype.name} {variable.shape}"
    )
