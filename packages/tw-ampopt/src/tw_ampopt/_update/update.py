"""One update of all towers, from raw gradients to changed variables.

The same code serves a session graph and a ``tf.function``: every effect is an
explicit dependency of what is returned, since the branch of a ``tf.cond`` in a
session graph runs nothing else.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._update.accumulator import GroupProgress, MicroBatchGroup
from tw_ampopt._update.buffer_plan import BufferPlan, plan_buffers
from tw_ampopt._update.buffers import Buffer, scaled, unpack
from tw_ampopt._update.finite import verdict
from tw_ampopt._update.means import tower_means
from tw_ampopt._update.one_at_a_time import one_at_a_time
from tw_ampopt._update.options import UpdateOptions
from tw_ampopt._update.state import Built, SharedState
from tw_ampopt._update.tower_buffers import RawGradients, known_shapes, tower_buffers
from tw_ampopt._variables import are_local, as_tf_variable, make_state
from tw_ampopt._wrapped.wrapped_optimizer import Inner


class Updater:
    """K towers' variables with what updates them.

    Attributes:
      group: accumulators, or None without accumulation.
      global_norm: norm of the last update's gradients.
      inners: the optimizers that apply, one a list of variables.
    """

    def __init__(
        self,
        shared: SharedState,
        options: UpdateOptions,
        towers: Sequence[tuple[str, str]],
        variables: Sequence[Sequence[Any]],
    ) -> None:
        """Makes the state that belongs to these variables alone.

        Args:
          shared: slots, scale and counts.
          options: how updates are made.
          towers: [K] keys and devices.
          variables: [K][N], or [1][N] where all towers share their variables.
        """
        self._shared = shared
        self._options = options
        self._devices = tuple(device for _, device in towers)
        self._variables = [list(tower) for tower in variables]
        self._shapes = known_shapes(variables[0], caller=options.caller)
        self._local = [are_local(_tf_variables(tower)) for tower in variables]
        first = _tf_variables(variables[0])[0]
        self._scalars = shared.start(first.device, local=self._local[0])
        self.global_norm = make_state(
            0.0, name="global_norm", device=self._scalars.host, local=self._local[0]
        )
        self.group = self._make_group() if options.multiplier is not None else None
        self.inners = [
            shared.build(Built(*tower, own, local))
            for tower, own, local in zip(
                towers, self._variables, self._local, strict=False
            )
        ]

    def state(self) -> list[tf.Variable]:
        """Lists the state that is not shared."""
        return [self.global_norm, *([] if self.group is None else self.group.state())]

    def replicas(self) -> list[tuple[list[Any], Inner]]:
        """Lists each tower's variables with its optimizer."""
        return list(zip(self._variables, self.inners, strict=True))

    def step(
        self,
        grads: RawGradients,
        *,
        are_scaled: bool,
        global_step: tf.Variable | None = None,
    ) -> tf.Tensor:
        """Takes in a micro-batch and, with a full group, updates.

        Args:
          grads: [K][N][calls] gradients.
          are_scaled: whether they are those of the scaled loss.
          global_step: grows by 1 with an update.

        Returns:
          bool scalar, whether variables changed; all effects have happened when it
          is known.
        """
        group, scale = self.group, self._scalars.scale
        plan, buffers = tower_buffers(
            grads, self._shapes, self._devices, keep_sparse=group is None
        )
        if group is None:
            factor = scale.scale() if are_scaled else None
            return self._update(plan, buffers, factor, True, global_step)
        inverse = scale.inverse() if are_scaled else None

        def add_and_update() -> tf.Tensor:
            progress = group.add(buffers, inverse)
            return tf.cond(
                progress.full,
                lambda: self._update_by_group(plan, group, progress, global_step),
                lambda: tf.constant(False),
            )

        return one_at_a_time(
            add_and_update,
            mutex=self._scalars.mutex,
            device=self._scalars.host,
            after=[_values(buffer) for tower in buffers for buffer in tower],
        )

    def _make_group(self) -> MicroBatchGroup:
        return MicroBatchGroup(
            plan_buffers(self._shapes).buffer_shapes,
            self._devices,
            multiplier=self._options.multiplier,
            drops=self._options.drops,
            host=self._scalars.host,
            local=self._local[0],
            caller=self._options.caller,
        )

    def _update_by_group(
        self,
        plan: BufferPlan,
        group: MicroBatchGroup,
        progress: GroupProgress,
        global_step: tf.Variable | None,
    ) -> tf.Tensor:
        sums, emptied = group.take()
        summed = tf.cast(progress.summed, tf.float32)
        complete = tf.equal(progress.summed, progress.seen)
        updated = self._update(plan, sums, summed, complete, global_step)
        with tf.control_dependencies(emptied):
            return tf.identity(updated)

    def _update(
        self,
        plan: BufferPlan,
        sums: Sequence[Sequence[Buffer]],
        factor: tf.Tensor | None,
        complete: tf.Tensor | bool,
        global_step: tf.Variable | None,
    ) -> tf.Tensor:
        options = self._options
        means = tower_means(
            sums, factor, self._devices, options.reducer, caller=options.caller
        )
        with tf.device(self._devices[0] or None):
            finite, norm = verdict(means[0])
        updated = tf.cond(
            finite,
            lambda: self._apply(plan, means, norm, global_step),
            self._skip,
        )
        # Beside the update, not after it: it needs the verdict only.
        good = finite if complete is True else tf.logical_and(finite, complete)
        moved = self._scalars.scale.update(good)
        with tf.control_dependencies(moved):
            return tf.identity(updated)

    def _apply(
        self,
        plan: BufferPlan,
        means: Sequence[Sequence[Buffer]],
        norm: tf.Tensor,
        global_step: tf.Variable | None,
    ) -> tf.Tensor:
        done = []
        for k, (variables, inner) in enumerate(self.replicas()):
            with tf.device(self._devices[k] or None):
                buffers = [scaled(b, self._clip_factor(norm)) for b in means[k]]
                done.append(inner.apply(unpack(plan, buffers), variables))
        with tf.control_dependencies(_present(done)):
            # Learning rates may be computed from these counts: they come last.
            counts = [self._scalars.updates, global_step]
            noted = [v.assign_add(1, read_value=False) for v in _present(counts)]
            noted.append(self.global_norm.assign(norm, read_value=False))
        with tf.control_dependencies(_present(noted)):
            return tf.constant(True)

    def _skip(self) -> tf.Tensor:
        skipped = self._scalars.skipped.assign_add(1, read_value=False)
        with tf.control_dependencies(_present([skipped])):
            return tf.constant(False)

    def _clip_factor(self, norm: tf.Tensor) -> tf.Tensor | None:
        if self._options.clip is None:
            return None
        return self._options.clip / tf.maximum(norm, self._options.clip)


def _values(buffer: Buffer) -> tf.Tensor:
    return buffer.values if isinstance(buffer, tf.IndexedSlices) else buffer


def _present(ops: Sequence[Any]) -> list[Any]:
    # Outside of graphs an assignment gives None, and has happened.
    return [op for op in ops if op is not None]


def _tf_variables(variables: Sequence[Any]) -> list[tf.Variable]:
    return [as_tf_variable(variable) for variable in variables]
