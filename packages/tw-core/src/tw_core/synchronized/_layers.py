"""The replica context that ``tf.distribute`` returns inside a tower.

Layers that are synchronised over replicas call its ``all_reduce``: those of Keras 3 and
tf_keras with ``synchronized=True``, and others written for ``tf.distribute``. The
strategy stays TensorFlow's default, which places nothing and mirrors no variable.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from tw_core.synchronized._places import around_towers, current_place
from tw_core.synchronized._sums import gather, sum_over_towers


class _TowerReplicaContext(tf.distribute.ReplicaContext):  # type: ignore[misc]
    """A replica context of one tower, which reduces and gathers over all towers."""

    def __init__(self, index: int | tf.Tensor, total: int) -> None:
        super().__init__(tf.distribute.get_strategy(), index)
        self._total = total

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of towers."""
        return self._total

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the sum over towers; MEAN divides it by the number of towers."""
        del options
        kind = str(getattr(reduce_op, "value", reduce_op)).upper()
        if kind not in ("SUM", "MEAN"):
            raise ValueError(
                "synchronized_layers: all_reduce supports SUM and MEAN; got "
                f"{reduce_op!r}."
            )
        sums = sum_over_towers(value)
        if kind == "SUM":
            return sums
        return tf.nest.map_structure(lambda total: total / self._total, sums)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Returns the towers' values, joined along an axis."""
        del options

        def moved(tensor: Any, source: int, target: int) -> tf.Tensor:
            return tf.experimental.numpy.moveaxis(tensor, source, target)

        rows = tf.nest.map_structure(lambda own: moved(own, axis, 0), value)
        return tf.nest.map_structure(lambda own: moved(own, 0, axis), gather(rows))


@contextmanager
def synchronized_layers() -> Iterator[None]:
    """Synchronises layers written for ``tf.distribute`` over towers.

    Inside, each tower's ``tf.distribute.get_replica_context()`` reduces over all towers
    of the build, so that ``BatchNormalization(synchronized=True)`` of Keras 3 and of
    tf_keras uses the whole batch. Enter it around ``map_towers`` or a builder's
    ``call_for_each_tower``, in the function that is traced::

        with synchronized_layers():
            grads = map_towers(loss_and_gradients, towers, models, xs, ys)

    or inside a tower, around a part of its model. Without it such layers use each
    tower's own rows; with one tower it changes nothing.

    Two things are as under a strategy of ``tf.distribute``: ``tf.summary`` writes for
    tower 0 only, and an optimizer of Keras 3 that a tower applies inside adds the
    gradients of all towers first. Apply gradients that are already reduced outside of
    it.

    Raises:
      RuntimeError: as ``sum_over_towers``; or, in a tower, under a strategy of
        ``tf.distribute``, which has contexts of its own.
    """
    place = current_place()
    with _in_tower() if place is not None else around_towers(_in_tower):
        yield


@contextmanager
def _in_tower() -> Iterator[None]:
    place = current_place()
    if place is None or place.joined.total == 1:
        yield
        return
    if tf.distribute.has_strategy():
        raise RuntimeError(
            "synchronized_layers: towers are built inside "
            f"{tf.distribute.get_strategy()!r}, which has replicas of its own; leave "
            "that strategy's scope first."
        )
    with _TowerReplicaContext(place.number, place.joined.total):
        yield
