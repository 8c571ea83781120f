"""One update of all towers: clean, accumulate, reduce, gate, apply.

The same code serves a session graph and a ``tf.function``: every effect is an
explicit dependency of the result, since the branch of a ``tf.cond`` in a
session graph runs nothing else.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import tensorflow as tf

import tw_reduce
from tw_ampopt._settings import Reducer, Settings
from tw_ampopt._update.accumulator import (
    GradientAccumulator,
    Progress,
    one_at_a_time,
)
from tw_ampopt._update.buffers import (
    Buffer,
    RawGradients,
    buffer_specs,
    clean_gradients,
    make_buffers,
    on_devices,
)
from tw_ampopt._update.state import SharedState, SlotRequest
from tw_ampopt._update.weights import total_of
from tw_ampopt._variables import are_local, bool_after, make_state, present
from tw_ampopt._wrapped.wrapped_optimizer import WrappedOptimizer
from tw_core.internal import (
    PackPlan,
    are_alike,
    finite_and_norm,
    is_elementwise,
    map_values,
    orders_effects,
    pack_tensors,
    scale,
    shares_of,
    tf_variable,
    tf_variables,
    traces_function,
    unpack_tensors,
    values_of,
    weigh,
    weight_dtype,
    with_unique_rows,
)
from tw_core.variables import override_to_local_variable
from tw_reduce.internal import with_memory

Average: TypeAlias = Callable[[Buffer], Buffer]  # turns sums over towers into means


class Updater:
    """K towers' variables, and the state that updates them."""

    def __init__(
        self,
        shared: SharedState,
        settings: Settings,
        towers: Sequence[tuple[str, str]],  # [K] keys and devices
        variables: Sequence[Sequence[Any]],  # [K][N]; [1][N] if all share theirs
        *,
        weighs: bool,  # whether accumulated gradients may have weights
    ) -> None:
        self._settings = settings
        self.devices = [device for _, device in towers]
        # [K][N]; the same lists if all towers share their variables.
        self.variables = [list(own) for own in variables] * (
            len(towers) // len(variables)
        )
        self._shapes = [tuple(variable.shape) for variable in variables[0]]
        self._wide = weight_dtype(variables[0])
        self._specs = [
            tf.TensorSpec(shape, weight_dtype([variable]))
            for shape, variable in zip(self._shapes, variables[0], strict=True)
        ]
        local = [are_local(tower) for tower in variables]
        first = tf_variable(variables[0][0])
        self._scalars = shared.start(first.device, local=local[0])
        with tf.init_scope(), override_to_local_variable(local[0]):
            self._make_own_state(weighs)
        self.memory = self._make_memory()
        self.wrapped = [
            shared.build(SlotRequest(*tower, list(own), is_local))
            for tower, own, is_local in zip(towers, variables, local, strict=False)
        ]

    def _make_own_state(self, weighs: bool) -> None:
        host, steps = self._scalars.host, self._settings.accumulation_steps
        # Of the last update.
        zero = partial(tf.zeros, [], self._wide)
        self.global_norm = make_state(zero, name="global_norm", device=host)
        self.accumulator: GradientAccumulator | None = None
        if steps is not None:
            self.accumulator = GradientAccumulator(
                buffer_specs(self._specs),
                self.devices,
                steps=steps,
                steps_message=self._settings.steps_message,
                rereads=self._settings.rereads_steps,
                drops=self._settings.drops,
                weighs=weighs,
                host=host,
            )

    def _make_memory(self) -> tw_reduce.ReducerState | None:
        """Returns the state of a reducer with memory, else None."""
        made = with_memory(self._settings.reducer, self.variables, self.devices)
        return made if isinstance(made, tw_reduce.ReducerState) else None

    @property
    def _sees_gradients(self) -> bool:
        """Whether the reducer gets gradients in their variables' shapes, unscaled."""
        reducer = self._settings.reducer
        return reducer is not None and not is_elementwise(reducer)

    def state(self) -> list[tf.Variable]:
        """Lists the state that is not shared, except a reducer's memory."""
        own = [] if self.accumulator is None else self.accumulator.state()
        return [self.global_norm, *own]

    def replicas(self) -> list[tuple[list[Any], WrappedOptimizer]]:
        """Lists each tower's variables with its optimizer."""
        return list(zip(self.variables, self.wrapped, strict=False))

    def step(
        self,
        grads: RawGradients,
        *,
        are_scaled: bool,
        weights: Sequence[Any] | None = None,
        global_step: tf.Variable | None = None,
        jit_compile: bool = False,
        group: Any = None,  # of ranks, by whose mean it updates
    ) -> tf.Tensor:
        """Processes a micro-batch; after all effects, returns whether it updated."""
        accumulator, scalars = self.accumulator, self._scalars
        update = partial(
            self._update, global_step=global_step, jit_compile=jit_compile, group=group
        )
        is_alone = len(self.devices) == 1 and self._settings.reducer is None
        is_alone = is_alone and group is None
        plan: PackPlan | None = None
        buffers: Any = grads
        # Without a sum, weights or accumulators, XLA gets the gradients as they are.
        if not (jit_compile and is_alone and accumulator is None and weights is None):
            plan, buffers = make_buffers(
                grads, self._specs, self.devices, keep_sparse=accumulator is None
            )
        if accumulator is None:
            factor = scalars.scale(self._wide) if are_scaled else None
            if factor is not None and self._sees_gradients:
                buffers = self._averaged(buffers, partial(_divided, factor))
                factor = None
            buffers, average = self._weighed(buffers, weights, factor, jit_compile)
            return update(plan, buffers, average, True)
        inverse = scalars.inverse(self._wide) if are_scaled else None

        def add_and_update() -> tf.Tensor:
            progress = accumulator.add(
                *(buffers, inverse, weights), jit=jit_compile, group=group
            )
            return tf.cond(
                progress.full,
                lambda: self._update_by_sums(plan, accumulator, progress, update),
                lambda: tf.constant(False),
            )

        return one_at_a_time(
            add_and_update,
            mutex=scalars.mutex,
            device=scalars.host,
            after=[values_of(buffer) for tower in buffers for buffer in tower],
        )

    def _update_by_sums(
        self,
        plan: PackPlan | None,
        accumulator: GradientAccumulator,
        progress: Progress,
        update: Callable[..., tf.Tensor],
    ) -> tf.Tensor:
        sums, emptied = accumulator.take()
        complete = tf.equal(progress.summed, progress.seen)
        average = partial(_divided, progress.divisor)
        updated = update(plan, sums, average, complete)
        with tf.control_dependencies(emptied):
            return tf.identity(updated)

    def _update(
        self,
        plan: PackPlan | None,  # None if the sums are a single tower's gradients
        sums: Any,
        average: Average | None,
        complete: tf.Tensor | bool,
        *,
        global_step: tf.Variable | None,
        jit_compile: bool,
        group: Any,
    ) -> tf.Tensor:
        remember: Callable[[], list[Any]] = list
        if plan is not None:
            sums, average, remember = self._sum_over_towers(plan, sums, average, group)
        if jit_compile:
            finite, norm, done = self._update_compiled(plan, sums, average)
        else:
            means = self._averaged(sums, average)
            with tf.device(self.devices[0] or None):
                finite, norm = finite_and_norm(list(map(with_unique_rows, means[0])))
            done = partial(self._apply, plan, means, norm)

        def update() -> tf.Tensor:
            return self._count([*done(), *remember()], norm, global_step)

        updated = tf.cond(finite, update, self._skip)
        # In parallel with the update: the rule only needs ``finite``.
        good = finite if complete is True else tf.logical_and(finite, complete)
        moved = self._scalars.move_scale(good)
        with tf.control_dependencies(moved):
            return tf.identity(updated)

    def _weighed(
        self,
        buffers: list[list[Buffer]],
        weights: Sequence[Any] | None,
        factor: tf.Tensor | None,
        jit_compile: bool,
    ) -> tuple[list[list[Buffer]], Average | None]:
        """Returns [K][M] weighted gradients, and the function that averages their sums.

        The steps are the same with and without weights, so that equal weights change no
        bit. Without a scale the mean is a product: TensorFlow turns a division by a
        constant into one.
        """
        if weights is None:
            total: Any = float(len(buffers))
            if total == 1:
                return buffers, None if factor is None else partial(_divided, factor)
        else:
            with tf.device(self._scalars.host or None):
                shares = shares_of(weights)
                total = total_of(shares, self._wide)
            towers = (buffers, shares)
            buffers = on_devices(
                self.devices, _weigh_each, *towers, jit_compile=jit_compile
            )
        with tf.device(self._scalars.host or None):
            if factor is None:
                return buffers, partial(scale, factor=1.0 / total)
            return buffers, partial(_divided, factor * total)

    def _averaged(
        self, sums: Sequence[Sequence[Buffer]], average: Average | None
    ) -> list[list[Buffer]]:
        """Returns [K][M] means over towers, which ``average`` computes from their sums.

        It divides once, by the number (or weight) of towers times all other factors in
        the sums (micro-batches, or the scale), so that nothing is rounded twice.
        """
        if average is None:
            return [list(tower) for tower in sums]
        return on_devices(self.devices, lambda own: list(map(average, own)), sums)

    def _sum_over_towers(
        self,
        plan: PackPlan,
        given: Sequence[Sequence[Buffer]],
        average: Average | None,
        group: Any,
    ) -> tuple[Any, Average | None, Callable[[], list[Any]]]:
        """Returns [K][M] sums, what turns them into means, and what remembers them.

        With a group, sums are means over the ranks. The last is called in the branch
        that updates, as a reducer's memory is that of the updates that are made.
        """
        reducer = self._settings.reducer
        if reducer is not None and self._sees_gradients:
            return self._sum_unpacked(reducer, plan, given, average, group)
        if reducer is None:
            if len(given) == 1 and group is None:
                return given, average, list  # A single tower needs none.
            reducer = self._on_first
            if group is None:
                reducer = tw_reduce.all_reduce(self.devices)
        sums = _of_ranks(self._checked(given, reducer(given)), group)
        return sums, average, list

    def _sum_unpacked(
        self,
        reducer: Reducer,
        plan: PackPlan,
        given: Sequence[Sequence[Buffer]],
        average: Average | None,
        group: Any,
    ) -> tuple[Any, Average | None, Callable[[], list[Any]]]:
        """Does the same by a reducer of gradients in their variables' shapes.

        One with memory gets shares of the mean, so that it remembers these.
        """
        if self.memory is not None:
            given, average = self._averaged(given, average), None
        grads = on_devices(
            self.devices, lambda own: unpack_tensors(own, plan, self._shapes), given
        )
        remember: Callable[[], list[Any]] = list
        if self.memory is None:
            sums = _of_ranks(self._checked(grads, reducer(grads)), group)
        else:
            add = None
            if group is not None:
                grads = self._averaged(grads, partial(scale, factor=1.0 / group.size))
                add = partial(self._sum_of_all, group)
            reduced = self.memory.update(grads, add=add)
            remember = partial(self.memory.commit, reduced, if_=True)
            sums = reduced.sums
        packed = on_devices(self.devices, lambda own: pack_tensors(own, plan), sums)
        return packed, average, remember

    def _sum_of_all(self, group: Any, given: Sequence[Sequence[Any]]) -> Any:
        """Adds the tensors of the towers of all ranks."""
        return [_summed(group, self._on_first(given)[0])] * len(given)

    def _on_first(self, given: Sequence[Sequence[Any]]) -> Any:
        """Adds over towers, which need no copies of the sums, as ranks add next."""
        return tw_reduce.sum_on_device(given, device=self.devices[0])

    def _checked(self, given: Sequence[Sequence[Buffer]], sums: Any) -> Any:
        if not _are_sums_of(given, sums):
            wanted = [[str(buffer.shape) for buffer in tower] for tower in given]
            raise ValueError(
                "reducer must return [K][M] sums, one per tower and tensor, here of "
                f"shapes {wanted}; got {sums!r}."
            )
        return sums

    def _apply(
        self, plan: PackPlan | None, means: Sequence[Sequence[Buffer]], norm: tf.Tensor
    ) -> list[Any]:
        """Updates every tower; returns tensors or ops that depend on the updates."""
        once = self._are_alike()

        def update(*own: Any) -> Any:
            done = self._update_tower(plan, *own)
            return bool_after([done], True) if once else done

        number = len(self.wrapped)
        columns = (means[:number], [norm] * number, *zip(*self.replicas(), strict=True))
        return on_devices(self.devices[:number], update, *columns, once=once)

    def _update_compiled(
        self, plan: PackPlan | None, sums: Any, average: Average | None
    ) -> tuple[tf.Tensor, tf.Tensor, Callable[[], list[Any]]]:
        """Updates every tower in its own function, if its means are finite.

        All values are kept or replaced one by one: a branch could not read a schedule's
        count on another device, and on a GPU it would wait for the test.
        """

        def update(own: Any, variables: list[Any], wrapped: Any) -> Any:
            means = clean_gradients(self._specs, own) if plan is None else own
            means = means if average is None else list(map(average, means))
            finite, norm = finite_and_norm(list(map(with_unique_rows, means)))
            state = tf_variables([*variables, *wrapped.variables()])
            before = [variable.read_value() for variable in state]
            self._update_tower(plan, means, norm, variables, wrapped)
            for variable, old in zip(state, before, strict=True):
                kept = tf.where(finite, variable.read_value(), old)
                variable.assign(kept, read_value=False)
            return finite, norm

        columns = list(zip(*self.replicas(), strict=True))
        number = len(self.wrapped)
        results = on_devices(
            [tf_variable(own[0]).device for own in columns[0]],
            update,
            *([list(tower) for tower in sums[:number]], *columns),
            once=self._are_alike(),
            jit_compile=True,
        )
        with (
            tf.device(self._scalars.host or None),
            tf.control_dependencies([finite for finite, _ in results]),
        ):
            finite, norm = map(tf.identity, results[0])
        return finite, norm, list

    def _are_alike(self) -> bool:
        """Returns whether one tower's update can be traced for all."""
        if len(self.wrapped) == 1 or not (traces_function() and orders_effects()):
            return False
        return are_alike([own.inner for own in self.wrapped])

    def _update_tower(
        self,
        plan: PackPlan | None,
        means: Sequence[Buffer],
        norm: tf.Tensor,
        variables: list[Any],
        wrapped: Any,
    ) -> Any:
        grads = self._clipped(means, norm)
        if plan is not None:
            grads = unpack_tensors(grads, plan, self._shapes)
        return wrapped.apply(grads, variables)

    def _count(
        self, done: Sequence[Any], norm: tf.Tensor, global_step: tf.Variable | None
    ) -> tf.Tensor:
        with tf.control_dependencies(present(done)):
            # Learning rates may be computed from these counts: they change last.
            counts = present([self._scalars.updates, global_step])
            noted = [v.assign_add(1, read_value=False) for v in counts]
            noted.append(self.global_norm.assign(norm, read_value=False))
        return bool_after(noted, True)

    def _skip(self) -> tf.Tensor:
        skipped = self._scalars.skipped.assign_add(1, read_value=False)
        return bool_after([skipped], False)

    def _clipped(self, buffers: Sequence[Buffer], norm: tf.Tensor) -> Sequence[Buffer]:
        bound = self._settings.clip
        if bound is None:
            return buffers
        return [scale(buffer, bound / tf.maximum(norm, bound)) for buffer in buffers]


def _of_ranks(sums: Any, group: Any) -> Any:
    """Returns [K][M] means of the ranks' sums; without a group, the sums."""
    if group is None:
        return sums
    totals = _summed(group, list(map(tf.convert_to_tensor, sums[0])))
    return [[total / group.size for total in totals]] * len(sums)


def _summed(group: Any, tensors: Sequence[Any]) -> list[Any]:
    names = [f"gradients, {m}" for m in range(len(tensors))]
    return list(group.sum(tensors, names=names))


def _weigh_each(tower: Sequence[Buffer], share: tf.Tensor) -> list[Buffer]:
    return [weigh(buffer, share) for buffer in tower]


def _divided(divisor: tf.Tensor, buffer: Buffer) -> Buffer:
    # Multiplying by an inverse would round twice unless it is a power of two.
    return map_values(lambda values: values / tf.cast(divisor, values.dtype), buffer)


def _are_sums_of(given: Sequence[Sequence[Buffer]], sums: Any) -> bool:
    try:
        towers = list(zip(given, sums, strict=True))
        pairs = [pair for tower in towers for pair in zip(*tower, strict=True)]
    except (TypeError, ValueError):
        return False
    return all(
        isinstance(total, tf.Tensor | tf.IndexedSlices)
        and buffer.shape.is_compatible_with(total.shape)
        for buffer, total in pairs
    )
