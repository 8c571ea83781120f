"""What the chief does with a round's means: the wrapped optimizer's step."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_core import sum_duplicate_rows
from tw_syncrep._exact_device_scope import on_device
from tw_syncrep._protocol.chief import Apply


def inner_step(
    opt: Any,
    variables: Sequence[tf.Variable],
    *,
    global_step: tf.Variable,
    then: Callable[[], Any] | None,
) -> Apply:
    """Makes the function that builds the step.

    Args:
      opt: the wrapped optimizer.
      variables: [N].
      global_step: increased by one; the step is on its server where there is a
        choice.
      then: builds what follows the step, such as moving averages; or None.

    Returns:
      A function of mean gradients by index; a variable without one gets None.
    """

    def apply(means: dict[int, Any]) -> Any:
        """Applies the means of all replicas as one step."""
        # TensorFlow's own class adds rows of one index by itself, others need not.
        if not isinstance(opt, tf.compat.v1.train.Optimizer):
            means = {n: _with_rows_added(mean) for n, mean in means.items()}
        pairs = [(means.get(n), variable) for n, variable in enumerate(variables)]
        with on_device(global_step.device), tf.compat.v1.name_scope(""):
            update = opt.apply_gradients(pairs, global_step)
            if then is None:
                return update
            with tf.control_dependencies([update]):
                return then()

    return apply


def _with_rows_added(mean: Any) -> Any:
    """Adds the rows that several replicas brought of one index."""
    if not isinstance(mean, tf.IndexedSlices):
        return mean
    with on_device(mean.values.device):
        return sum_duplicate_rows(mean)
