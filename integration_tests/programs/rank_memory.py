"""What ranks do with reducers with memory, and one process with all of their towers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import tw_ranks
from tw_core.testing import CPUS
from tw_reduce import ReducerState
from tw_reduce.compression import (
    after,
    error_feedback,
    from_rows,
    int8,
    power_sgd,
    sign,
    to_row,
    top_k,
)

SHAPES = [(64, 80), (7,)]


def parts(tensor: Any) -> Any:
    """Sends parts of all kinds, of whole numbers, which are exact in each dtype."""
    flat = tf.round(4 * tf.reshape(tensor, [-1])[:16])
    whole, half, octets, table = (tf.reshape(own, [2, 2]) for own in tf.split(flat, 4))
    kinds = {tf.float16: half, tf.int8: octets}
    sent = [
        *(tf.cast(whole, tf.int32), tf.reduce_sum(flat), flat[:0]),
        to_row([tf.cast(own, kind) for kind, own in kinds.items()]),
        to_row([]),
        tf.IndexedSlices(
            tf.cast(table, tf.bfloat16), tf.constant([4, 1]), tf.constant([5, 2])
        ),
    ]

    def read(
        whole: Any, total: Any, nothing: Any, row: Any, none: Any, rows: Any
    ) -> Any:
        assert nothing.shape == [0] and len(from_rows(none, [])) == 0
        specs = [tf.TensorSpec([2, 2], kind) for kind in kinds]
        added = [
            tf.reduce_sum(tf.cast(own, flat.dtype), 0) for own in from_rows(row, specs)
        ]
        values = tf.cast(rows.values, flat.dtype)
        added.append(
            tf.gather(tf.math.unsorted_segment_sum(values, rows.indices, 5), [4, 1])
        )
        own = tf.concat([tf.cast(whole, flat.dtype), *added], 0) / 4
        own = tf.reshape(own, [-1])
        size = tensor.shape.num_elements()
        return tf.reshape(tf.pad(own, [[0, size - 16]]), tensor.shape) + total / size

    return sent, read


def drawn(tensor: Any, seed: Any) -> Any:
    """Sends random elements, whose sums are right only if all draw the same ones."""
    size = tensor.shape.num_elements()
    order = tf.random.experimental.stateless_shuffle(tf.range(size), seed)
    places = order[: size // 10, tf.newaxis]

    def read(total: Any) -> Any:
        return tf.reshape(tf.scatter_nd(places, total, [size]), tensor.shape)

    return [tf.gather_nd(tf.reshape(tensor, [-1]), places)], read


REDUCERS = {
    "top_k": error_feedback(top_k(0.01)),
    "whole first": after(2, error_feedback(top_k(0.01))),
    "drawn": error_feedback(drawn, draws=True),
    "sampled": error_feedback(top_k(0.2, sampled=True)),
    "sign": error_feedback(sign()),
    "int8": error_feedback(int8()),
    "power_sgd": power_sgd(rank=3),
    "parts": error_feedback(parts),
}


def gradients(step: int, tower: int) -> list[np.ndarray]:
    """A tower's, counted over all ranks; the last are values of two sparse rows."""
    random = np.random.default_rng([step, tower])
    shapes = [*SHAPES, (2, 3)]
    return [random.standard_normal(own).astype(np.float32) for own in shapes]


def started(
    group: Any, num_towers: int, in_parts: bool
) -> tuple[dict[str, ReducerState], Callable[[Any], dict[str, Any]]]:
    """Makes the memory of all reducers, and a step of all towers' gradients."""
    add, ranks = None, group if in_parts else None
    if group is not None and not in_parts:
        add = partial(tw_ranks.sum_across, group=group)
    variables = []
    for device in CPUS[:num_towers]:
        with tf.device(device):
            variables.append([tf.Variable(tf.zeros(s)) for s in [*SHAPES, (5, 3)]])
    states = {
        name: ReducerState(own, variables, add=add, group=ranks)
        for name, own in REDUCERS.items()
    }

    def step(towers: Any) -> dict[str, Any]:
        sparse = [
            [*own, tf.IndexedSlices(rows, tf.constant([4, 1]), tf.constant([5, 3]))]
            for *own, rows in towers
        ]
        return {
            name: [list(map(tf.convert_to_tensor, own)) for own in state(sparse)]
            for name, state in states.items()
        }

    return states, step


def reduced(
    group: Any, num_towers: int, steps: int, in_parts: bool = False
) -> dict[str, Any]:
    """Reduces by each; returns the last sums of all towers, and all errors' sum.

    Then what is sent, and the first variable's sums of all steps.
    """
    states, step = started(group, num_towers, in_parts)
    run: Callable[..., Any] = tf.function(step, autograph=False)
    run = run if group is None else group.bounded(run)
    first = 0 if group is None else group.rank * num_towers
    totals = dict.fromkeys(states, 0.0)
    for n in range(steps):
        towers = [gradients(n, first + k) for k in range(num_towers)]
        sums = tf.nest.map_structure(
            lambda own: own.numpy(), run(tf.nest.map_structure(tf.constant, towers))
        )
        totals = {name: own + sums[name][0][0] for name, own in totals.items()}
    errors = tf.nest.map_structure(lambda own: own.numpy(), _errors(states))
    return _found(states, sums, errors, totals)


def reduced_in_session(group: Any, steps: int) -> dict[str, Any]:
    """Does the same in a session graph, in parts, with one tower a rank."""
    totals = dict.fromkeys(REDUCERS, 0.0)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        states, step = started(group, 1, in_parts=True)
        fed = [tf.compat.v1.placeholder(tf.float32, g.shape) for g in gradients(0, 0)]
        built = step([fed])
        session.run(tf.compat.v1.global_variables_initializer())
        for n in range(steps):
            given = zip(fed, gradients(n, group.rank), strict=True)
            sums = session.run(built, dict(given))
            totals = {name: own + sums[name][0][0] for name, own in totals.items()}
        return _found(states, sums, session.run(_errors(states)), totals)


def _errors(states: dict[str, ReducerState]) -> dict[str, Any]:
    return {
        name: [own[0] for own in state._memories["0"].towers]
        for name, state in states.items()
    }


def _found(
    states: dict[str, ReducerState], sums: Any, errors: Any, totals: Any
) -> dict[str, Any]:
    return {
        name: (sums[name], sum(errors[name]), state.describe(), totals[name])
        for name, state in states.items()
    }


def overflowing(group: Any, in_parts: bool) -> list[Any]:
    """Has rank 1 bring infinity; returns if memory stayed, and sums are finite.

    Before, all ranks bring finite gradients whose sum overflows; last is if theirs is.
    """
    variables = [[tf.Variable(tf.zeros(own)) for own in SHAPES]]
    add = None if in_parts else partial(tw_ranks.sum_across, group=group)
    ranks = group if in_parts else None
    state = ReducerState(REDUCERS["sign"], variables, add=add, group=ranks)
    run = group.bounded(tf.function(state, autograph=False))
    *grads, _ = map(tf.constant, gradients(0, group.rank))
    [huge] = run([[1e36 * own for own in grads]])
    huge = [bool(np.isfinite(own).all()) for own in huge]
    run([grads])
    before = state.variables[0].numpy()
    grads[1] += np.inf if group.rank == 1 else 0.0
    [sums] = run([grads])
    finite = [bool(np.isfinite(own).all()) for own in sums]
    return [np.array_equal(before, state.variables[0]), finite, huge]
