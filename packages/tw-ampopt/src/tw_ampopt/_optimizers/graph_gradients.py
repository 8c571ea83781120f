"""Gradients of the scaled loss in a session graph, and the same unscaled."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import check_loss, check_options
from tw_ampopt._checks.pairs import trained_variables
from tw_ampopt._optimizers.graph_core import GraphCore
from tw_ampopt._variables import as_tf_variable

_GATE_OP = 1  # v1's name for gradients that wait for each other


def scaled_gradients(
    core: GraphCore, loss: tf.Tensor, variables: Sequence[Any], **options: Any
) -> list[Any]:
    """Returns [N] gradients of the scaled loss, or None, on the loss's device.

    What comes in has been checked.

    Args:
      core: has the scale.
      loss: scalar tensor.
      variables: [N].
      **options: as ``tf.compat.v1.gradients`` takes them, and ``gate_gradients``
        as v1 optimizers do.
    """
    tf_variables = [as_tf_variable(variable) for variable in variables]
    shared = core.start_beside(tf_variables)
    gate = options.pop("gate_gradients", 0) == _GATE_OP
    with _scope(core), tf.device(loss.device or None):
        scaled = shared.scaled(tf.cast(loss, tf.float32))
        return list(
            tf.compat.v1.gradients(scaled, tf_variables, gate_gradients=gate, **options)
        )


def unscaled_pairs(
    core: GraphCore, loss: tf.Tensor, var_list: Sequence[Any] | None, **options: Any
) -> list[tuple[Any, Any]]:
    """Returns [N] pairs of a float32 gradient, or None, and its variable.

    Args:
      core: has the scale.
      loss: scalar tensor, unscaled; it is scaled on the way back only.
      var_list: by default the graph's trainable variables.
      **options: as for ``scaled_gradients``.

    Raises:
      TypeError: no loss, variables or options.
      ValueError: no variables, a loss that is no scalar, or another graph's.
    """
    caller = f"{core.settings.caller}.compute_gradients"
    check_loss(loss, caller=caller)
    taken = {key: o for key, o in options.items() if key != "gate_gradients"}
    check_options(tf.compat.v1.gradients, taken, caller=caller)
    variables = trained_variables(
        var_list, tf.compat.v1.trainable_variables(), caller=caller
    )
    grads = scaled_gradients(core, loss, variables, **options)
    with _scope(core):
        unscaled = core.shared.unscaled_gradients(grads)
    return list(zip(unscaled, variables, strict=True))


def _scope(core: GraphCore) -> Any:
    return tf.name_scope(f"{core.settings.prefix}_grad")
