"""One update of all towers, from raw gradients to changed variables.

The same code serves a session graph and a ``tf.function``: every effect is an
explicit dependency of what is returned, since the branch of a ``tf.cond`` in a
session graph runs nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

import tw_reduce
from tw_ampopt._buffer_plan import BufferPlan, plan_buffers
from tw_ampopt._buffers import Buffer, divided, pack, scaled, unpack
from tw_ampopt._clean import clean_gradient
from tw_ampopt._group import GroupProgress, MicroBatchGroup
from tw_ampopt._inner import Inner, as_tf_variable
from tw_ampopt._multiplier import Multiplier
from tw_ampopt._shared_state import SharedState
from tw_ampopt._state_variable import are_local, make_state
from tw_ampopt._verdict import verdict
from tw_core import override_to_local_variable

Reducer: TypeAlias = Callable[[Sequence[Sequence[Any]]], Sequence[Sequence[Any]]]
# [K][N][calls]: what each call of a tower gave for a variable.
RawGradients: TypeAlias = Sequence[Sequence[Sequence[Buffer | None]]]
AfterUpdate: TypeAlias = Callable[[], Any]


@dataclass(frozen=True)
class UpdateOptions:
    """How updates are made.

    Attributes:
      multiplier: micro-batches in a group; None for no accumulation.
      drops: whether a bad micro-batch is dropped rather than its group skipped.
      clip: bound of the global norm, or None.
      reducer: sums over towers; None for the default one.
      caller: opens messages.
    """

    multiplier: Multiplier | None
    drops: bool
    clip: float | None
    reducer: Reducer | None
    caller: str


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
        self._shapes = [tuple(v.shape) for v in variables[0]]
        self._local = [are_local(_tf_variables(tower)) for tower in variables]
        first = _tf_variables(variables[0])[0]
        self._scalars = shared.start(first.device, local=self._local[0])
        self.global_norm = make_state(
            0.0, name="global_norm", device=self._scalars.host, local=self._local[0]
        )
        self.group = self._make_group() if options.multiplier is not None else None
        self.inners = [
            self._make_inner(k, *tower)
            for k, tower in zip(range(len(variables)), towers, strict=False)
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
        after_update: AfterUpdate | None = None,
    ) -> tf.Tensor:
        """Takes in a micro-batch and, with a full group, updates.

        Args:
          grads: [K][N][calls] gradients.
          are_scaled: whether they are those of the scaled loss.
          after_update: builds what an update brings with it, e.g. a step counter.

        Returns:
          bool scalar, whether variables changed; all effects have happened when it
          is known.
        """
        scale = self._scalars.scale
        if self.group is None:
            plan, buffers = self._buffers(grads)
            divisor = _product(len(buffers), scale.scale() if are_scaled else None)
            return self._update(plan, buffers, divisor, True, after_update)
        plan, buffers = self._buffers(grads)
        group = self.group
        progress = group.add(buffers, scale.inverse() if are_scaled else None)
        return tf.cond(
            progress.full,
            lambda: self._update_by_group(plan, group, progress, after_update),
            lambda: tf.constant(False),
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

    def _make_inner(self, k: int, key: str, device: str) -> Inner:
        inner = self._shared.inner_of(key, device)
        with tf.device(device or None), override_to_local_variable(self._local[k]):
            inner.build(self._variables[k])
        return inner

    def _buffers(self, grads: RawGradients) -> tuple[BufferPlan, list[list[Buffer]]]:
        clean = []
        for device, tower in zip(self._devices, grads, strict=True):
            with tf.device(device or None):
                clean.append(list(map(clean_gradient, tower, self._shapes)))
        sparse = _sparse_everywhere(clean)
        plan = plan_buffers(self._shapes, sparse=None if self.group else sparse)
        buffers = []
        for device, tower in zip(self._devices, clean, strict=True):
            with tf.device(device or None):
                buffers.append(pack(plan, _densify_where_not(sparse, tower)))
        return plan, buffers

    def _update_by_group(
        self,
        plan: BufferPlan,
        group: MicroBatchGroup,
        progress: GroupProgress,
        after_update: AfterUpdate | None,
    ) -> tf.Tensor:
        sums, emptied = group.take()
        divisor = _product(len(sums), tf.cast(progress.summed, tf.float32))
        complete = tf.equal(progress.summed, progress.seen)
        updated = self._update(plan, sums, divisor, complete, after_update)
        with tf.control_dependencies(emptied):
            return tf.identity(updated)

    def _update(
        self,
        plan: BufferPlan,
        sums: Sequence[Sequence[Buffer]],
        divisor: tf.Tensor | None,
        complete: tf.Tensor | bool,
        after_update: AfterUpdate | None,
    ) -> tf.Tensor:
        means = self._means(sums, divisor)
        with tf.device(self._devices[0] or None):
            finite, norm = verdict(means[0])
        updated = tf.cond(
            finite,
            lambda: self._apply(plan, means, norm, after_update),
            self._skip,
        )
        # Beside the update, not after it: it needs the verdict only.
        good = finite if complete is True else tf.logical_and(finite, complete)
        moved = self._scalars.scale.update(good)
        with tf.control_dependencies(moved):
            return tf.identity(updated)

    def _means(
        self, sums: Sequence[Sequence[Buffer]], divisor: tf.Tensor | None
    ) -> list[list[Buffer]]:
        reduced = sums
        if len(sums) > 1:
            reducer = self._options.reducer or default_reducer(self._devices)
            reduced = reducer(sums)
        means = []
        for device, tower in zip(self._devices, reduced, strict=True):
            with tf.device(device or None):
                means.append([divided(buffer, divisor) for buffer in tower])
        return means

    def _apply(
        self,
        plan: BufferPlan,
        means: Sequence[Sequence[Buffer]],
        norm: tf.Tensor,
        after_update: AfterUpdate | None,
    ) -> tf.Tensor:
        done = []
        for k, (inner, variables) in enumerate(
            zip(self.inners, self._variables, strict=True)
        ):
            with tf.device(self._devices[k] or None):
                buffers = [scaled(b, self._clip_factor(norm)) for b in means[k]]
                done.append(inner.apply(unpack(plan, buffers), variables))
        with tf.control_dependencies(_present(done)):
            # Learning rates may be computed from these counts: they come last.
            noted = [
                self._scalars.updates.assign_add(1, read_value=False),
                self.global_norm.assign(norm, read_value=False),
                after_update() if after_update else None,
            ]
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


def default_reducer(devices: Sequence[str]) -> Reducer:
    """Returns the reducer of optimizers that are given none."""
    return partial(tw_reduce.sum_balanced, devices=tuple(devices))


def _present(ops: Sequence[Any]) -> list[Any]:
    # Outside of graphs an assignment gives None, and has happened.
    return [op for op in ops if op is not None]


def _product(count: int, factor: tf.Tensor | None) -> tf.Tensor | None:
    if factor is None:
        return None if count == 1 else tf.constant(float(count), tf.float32)
    return factor if count == 1 else factor * float(count)


def _sparse_everywhere(towers: Sequence[Sequence[Buffer]]) -> list[bool]:
    return [
        all(isinstance(grad, tf.IndexedSlices) for grad in column)
        for column in zip(*towers, strict=True)
    ]


def _densify_where_not(sparse: Sequence[bool], tower: Sequence[Buffer]) -> list[Buffer]:
    return [
        grad if stays else tf.convert_to_tensor(grad)
        for grad, stays in zip(tower, sparse, strict=True)
    ]


def _tf_variables(variables: Sequence[Any]) -> list[tf.Variable]:
    return [as_tf_variable(variable) for variable in variables]
