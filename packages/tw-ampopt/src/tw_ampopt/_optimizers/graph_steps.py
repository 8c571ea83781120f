"""Training ops of a session graph, from registered gradients or from pairs."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import check_counter, check_name
from tw_ampopt._checks.gradients import check_gradients, check_still_usable
from tw_ampopt._checks.pairs import check_pairs, common_device
from tw_ampopt._optimizers.graph_core import GraphCore
from tw_ampopt._optimizers.registration import DeviceGradients
from tw_ampopt._variables import as_tf_variable
from tw_core import canonical_device


def step_of_towers(core: GraphCore, towers: Sequence[DeviceGradients]) -> tf.Operation:
    """Builds the op that takes in [K] towers' gradients; no towers, no effect.

    Raises:
      ValueError: gradients of a branch or loop that is finished.
    """
    updated = []
    if towers:
        variables = [tower.variables for tower in towers]
        grads = [tower.in_order() for tower in towers]
        caller = f"{core.settings.caller}.apply_updates"
        check_still_usable(grads, variables, caller=caller)
        step = core.build_step(
            [(canonical_device(tower.device), tower.device) for tower in towers],
            variables,
            grads,
            are_scaled=True,
        )
        updated.append(step)
    with core.scope():
        return tf.group(*updated, name="TrainingOp")


def step_of_pairs(
    core: GraphCore,
    grads_and_vars: Sequence[tuple[Any, Any]],
    global_step: tf.Variable | None,
    name: str | None,
) -> tf.Operation:
    """Builds the op that takes in [N] pairs as one tower's.

    Raises:
      TypeError: something that is no pair or no gradient.
      ValueError: no gradient at all, a variable that comes twice, or a gradient
        whose shape is not its variable's.
    """
    caller = f"{core.settings.caller}.apply_gradients"
    pairs = check_pairs(grads_and_vars, caller=caller)
    check_counter(global_step, caller=caller)
    if name is not None:
        check_name(name, caller=caller)
    variables = [variable for _, variable in pairs]
    [grads] = check_gradients([[grad for grad, _ in pairs]], [variables], caller=caller)
    device = common_device([as_tf_variable(variable) for variable in variables])
    updated = core.build_step(
        [(canonical_device(device), device)],
        [variables],
        [[[grad] for grad in grads]],
        are_scaled=False,
        global_step=global_step,
    )
    return tf.group(updated, name=name or f"{core.settings.prefix}_update")
