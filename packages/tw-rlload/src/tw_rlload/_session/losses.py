"""The losses of all towers in a session graph, and the gradients they give."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tw_core import Tower, map_towers
from tw_rlload._session.tower_loss import gradients_of
from tw_rlload._training.gradients import Pairs

BuildLoss = Callable[[list[tf.Tensor]], Any]


@dataclass(frozen=True)
class BuiltLosses:
    """The losses of all towers, built.

    Attributes:
      common: what was made of the whole placeholders.
      towers: [K], what was made of the towers' inputs.
      grad_list: [K][N] (gradient or None, variable) pairs.
      updates: the towers' update operations (batch norm), not the common one's.
    """

    common: Any
    towers: list[Any]
    grad_list: list[Pairs]
    updates: list[Any]


def with_weights(build_graph: Callable[..., Any]) -> BuildLoss:
    """Makes ``build_graph(inputs, weights)`` take the weights as last input."""
    return lambda tensors: build_graph(tensors[:-1], tensors[-1])


def build_losses(
    towers: Sequence[Tower],
    placeholders: Sequence[tf.Tensor],
    tower_inputs: Sequence[Sequence[tf.Tensor]],
    build_loss: BuildLoss,
    optimizer: Any,
    *,
    caller: str,
) -> BuiltLosses:
    """Builds the common loss, which makes the variables, then each tower's.

    Args:
      towers: K towers.
      placeholders: C tensors for whole batches.
      tower_inputs: [K][C] rows of a step.
      build_loss: takes C tensors.
      optimizer: handed to each tower's ``gradients``.
      caller: who asks; opens messages.

    Returns:
      The losses; gradients live on the towers' devices.

    Raises:
      TypeError: a loss object without ``gradients``.
    """
    v1 = tf.compat.v1

    def build(tower: Tower, inputs: Sequence[tf.Tensor]) -> tuple[Any, Pairs]:
        del tower  # Its scope is in force already.
        loss = build_loss(list(inputs))
        return loss, gradients_of(loss, optimizer, caller=caller)

    with v1.variable_scope(
        v1.get_variable_scope(), reuse=v1.AUTO_REUSE, auxiliary_name_scope=False
    ):
        with tf.name_scope("tower"):
            common = build_loss(list(placeholders))
        known = {id(update) for update in _updates()}
        built = map_towers(build, towers, tower_inputs)
    return BuiltLosses(
        common=common,
        towers=[loss for loss, _ in built],
        grad_list=[pairs for _, pairs in built],
        updates=[update for update in _updates() if id(update) not in known],
    )


def sum_weights(
    towers: Sequence[Tower], tower_inputs: Sequence[Sequence[tf.Tensor]]
) -> list[tf.Tensor]:
    """Counts the rows of each tower that are no pads.

    Args:
      towers: K towers.
      tower_inputs: [K][C], the weights last.

    Returns:
      K float32 scalars on the towers' devices.
    """
    return map_towers(
        lambda tower, inputs: tf.reduce_sum(inputs[-1]), towers, tower_inputs
    )


def check_shared(grad_list: Sequence[Pairs], *, caller: str) -> None:
    """Refuses towers with variables of their own.

    Args:
      grad_list: [K] lists of pairs.
      caller: who asks; opens the message.

    Raises:
      ValueError: variables that are not the same object in all towers.
    """
    variables = {id(v): v for tower in grad_list for _, v in tower}
    everywhere = set.intersection(*({id(v) for _, v in tower} for tower in grad_list))
    own = [
        str(getattr(variable, "name", variable))
        for key, variable in variables.items()
        if key not in everywhere
    ]
    if own:
        raise ValueError(
            f"{caller}: all towers must share their variables; got different ones: "
            f"{own}. Make them with tf.compat.v1.get_variable, or once, outside of "
            "build_graph."
        )


def _updates() -> list[Any]:
    return list(tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.UPDATE_OPS))
