"""Metrics, which tower 0 updates once, with the arguments of all towers joined.

So any metric has the value that it has on one device.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tw_core.internal import is_variable, may_meet, meet
from tw_keras._keras_compat import mask_of, set_mask
from tw_keras._meetings.losses import Losses
from tw_keras._meetings.step import Step


def updating(
    n: int, is_mean: Callable[[Any], bool], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns an ``update_state`` that passes its arguments to metric ``n``."""

    def method(*arguments: Any, **named: Any) -> Any:
        if not may_meet():
            return original(*arguments, **named)
        masks = tf.nest.map_structure(mask_of, arguments)
        # Variables are read here: the update may run after a later assignment.
        values = tf.nest.map_structure(_read, (arguments, named))
        means = tf.nest.map_structure(is_mean, values[0])
        return meet(("metric", n), (*values, masks, means))

    return method


def showing(n: int, losses: Losses, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``result`` of metric ``n`` over all towers."""

    def method() -> Any:
        if not may_meet():
            return original()
        # Only the shapes of these ops are used.
        specs = tf.nest.map_structure(tf.type_spec_from_value, as_tensors(original()))
        if not tf.nest.flatten(specs):  # compile(metrics=[]) has a metric without any.
            return specs
        result = meet(("result", n), None, answer=specs, is_same=True)
        losses.results.update(map(id, tf.nest.flatten(result)))
        return result

    return method


def update(step: Step, metric: Any, calls: Sequence[Any]) -> None:
    """Updates a metric with the arguments of [K] towers."""
    positional = [call[0] for call in calls]
    named = [dict(call[1]) for call in calls]
    weights = [options.pop("sample_weight", None) for options in named]
    with tf.device(step.copies.towers[0].device):
        merge = partial(step.merged, adds=isinstance(metric, keras.metrics.Sum))
        values = tf.nest.map_structure(
            lambda is_mean, *of_towers: merge(*of_towers, is_mean=is_mean),
            *(calls[0][3], *positional),
        )
        masks = tf.nest.map_structure(merge, *[call[2] for call in calls])
        for value, mask in zip(
            tf.nest.flatten(values), tf.nest.flatten(masks), strict=True
        ):
            if mask is not None:
                set_mask(value, mask)
        options = tf.nest.map_structure(merge, *named)
        if weights[0] is not None:
            add = partial(step.merged, adds=True)
            options["sample_weight"] = tf.nest.map_structure(add, *weights)
        elif _takes_a_mean(metric, values):
            share = step.report.share_of_rank()
            options |= {} if share is None else {"sample_weight": share}
        given = tf.nest.flatten((values, options), expand_composites=True)
        # An error in a tower, such as XLA's, comes before any part of the update.
        with tf.control_dependencies(filter(tf.is_tensor, given)):
            metric.update_state(*values, **options)


def merged_logs(
    step: Step, of_towers: Sequence[Any], are_means: Mapping[str, bool]
) -> Any:
    """Merges the logs of the towers' steps: metrics once, other losses averaged."""
    first = of_towers[0]
    if not isinstance(first, dict):
        return first
    return {
        name: _log(
            step,
            [logs[name] for logs in of_towers],
            is_mean=are_means.get(name, False),
        )
        for name in first
    }


def _log(step: Step, values: Sequence[Any], *, is_mean: bool) -> Any:
    first = values[0]
    if isinstance(first, keras.Variable):  # a learning rate
        return tf.convert_to_tensor(first)
    if all(value is first for value in values) or not tf.is_tensor(first):
        return first
    if first.shape.rank == 0 and first.dtype.is_floating:
        return step.mean(values, is_mean=is_mean)
    return first


def as_tensors(result: Any) -> Any:
    """Returns the tensors of a metric's result."""
    return tf.nest.map_structure(tf.convert_to_tensor, result)


def _takes_a_mean(metric: Any, values: Sequence[Any]) -> bool:
    """Returns whether a metric averages one number per batch."""
    is_number = len(values) == 1 and tf.is_tensor(values[0])
    return isinstance(metric, keras.metrics.Mean) and (
        is_number and values[0].shape.rank == 0
    )


def _read(value: Any) -> Any:
    return tf.convert_to_tensor(value) if is_variable(value) else value
