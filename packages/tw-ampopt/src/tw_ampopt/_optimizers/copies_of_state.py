"""Tower 0's variables and slots for the other towers, e.g. after a restore."""

import tensorflow as tf

from tw_ampopt._update.update import Updater
from tw_ampopt._variables import as_tf_variable
from tw_core import copy_to_replicas


def copy_from_first(updater: Updater) -> tf.Operation | None:
    """Copies variables and slots from tower 0.

    Accumulators are left alone: towers differ in theirs, and all are saved.

    Returns:
      The op in a graph, None where there is one tower or it is done.
    """
    lists = [
        [*map(as_tf_variable, variables), *inner.variables()]
        for variables, inner in updater.replicas()
    ]
    return copy_to_replicas(lists)
