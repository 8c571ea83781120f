"""Sums and joined rows of all towers, in the function that builds one."""

from typing import TypeVar, cast

import tensorflow as tf

from tw_core._modes import without_autograph
from tw_core.synchronized._places import current_place

_T = TypeVar("_T")


@without_autograph
def sum_over_towers(tensors: _T) -> _T:
    """Sums tensors over all towers of a build, in the function that builds a tower.

    The n-th call in one tower is matched with the n-th call in every other. The
    gradient of a sum is the sum of its gradients in all towers: with respect to tower
    k's tensors, the gradients of tower k's loss are those of the sum of all towers'
    losses. Differentiate the losses of all towers in the same way.

    Args:
      tensors: a tensor, or a structure of tensors as of ``tf.nest``, of the same
        dtypes and shapes in all towers.

    Returns:
      The sums in the same structure, made on tower 0's device. Outside of towers, and
      with a single tower, ``tensors`` unchanged.

    Raises:
      ValueError: the layer, structure, dtypes or shapes differ from tower 0's; on
        leaving a tower, its sums differ from tower 0's.
      RuntimeError: in eager mode; in the body of a loop, or, where each tower is
        traced, of a ``tf.cond`` or a function that a tower builds; or in a tower that
        neither ``map_towers`` nor a builder builds.
    """
    place = current_place()
    if place is None or place.joined.total == 1:
        return tensors
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
    with tf.name_scope("sum_over_towers"):
        sums = place.joined.sum(place, flat)
    return cast(_T, tf.nest.pack_sequence_as(tensors, sums))


@without_autograph
def gather(tensors: _T) -> _T:
    """Joins the rows of all towers of a build, in the function that builds a tower.

    For a loss that is not a mean over rows: over pairs of rows (contrastive losses,
    triplets), or of statistics of the whole batch::

        def loss_of(tower, model, images):
            z = gather(model(images))  # [rows of all towers, features]
            return contrastive_loss(z)

    The n-th call in one tower is matched with the n-th call in every other. The
    gradient of a tower's rows is the sum of their gradients in all towers, so that with
    respect to tower k's rows the gradients of tower k's loss are those of the sum of
    all towers' losses. A loss of all rows is the same in every tower: average the
    gradients over the towers, or divide this loss by their number. If towers have
    numbers of rows that differ and gradients are averaged by them, multiply each
    tower's loss by its weight before it is differentiated, and add the gradients.
    ``tw_keras.TowerModel`` does so.

    Args:
      tensors: a tensor [rows, ...], or a structure of tensors as of ``tf.nest``, of the
        same dtypes and shapes in all towers, but for the number of rows.

    Returns:
      The rows of all towers, tower 0's first, in the same structure, made on tower 0's
      device. Over processes, as with ``TowerModel(group=)``, those of rank 0 come
      first, and they are floats of 16 to 64 bits or integers of 32 or 64. Outside of
      towers, and with a single tower, ``tensors`` unchanged.

    Raises:
      ValueError: a tensor without rows; otherwise as ``sum_over_towers``.
      RuntimeError: as ``sum_over_towers``.
    """
    place = current_place()
    if place is None or place.joined.total == 1:
        return tensors
    flat = [tf.convert_to_tensor(tensor) for tensor in tf.nest.flatten(tensors)]
    if any(tensor.shape.rank in (0, None) for tensor in flat):
        raise ValueError(
            "gather: joins the rows of tensors [rows, ...] of a known rank; got "
            f"{', '.join(str(tensor.shape) for tensor in flat)}. sum_over_towers "
            "adds scalars."
        )
    with tf.name_scope("gather"):
        rows = place.joined.gather(place, flat)
    return cast(_T, tf.nest.pack_sequence_as(tensors, rows))
