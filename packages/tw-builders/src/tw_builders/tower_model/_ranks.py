"""What the processes of a ``TowerModel`` exchange.

Every rank runs Keras's ``fit`` on its own towers. What one process reduces, all ranks
add: gradients in every step, and with them whether a rank had a batch and whether one
of its callbacks asks to stop; metrics at the end of an epoch. A rank whose data has
ended takes part with zeros and makes the others' updates, until none has a batch.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tw_builders._parts import rows_of
from tw_builders.tower_model._agreement import begin_fit
from tw_builders.tower_model._updates import Brought
from tw_core.gradients import map_values, values_of, weigh
from tw_core.ranks import RankGroup
from tw_core.variables import tf_variable
from tw_reduce import sum_on_device

_WEIGHT, _ACTIVE, _STOPS = range(3)  # places in what is added beside gradients
_CHECKED_STEPS = 2  # of an epoch, whose batches must be the same on all ranks
# TensorFlow's collectives match by the loop that they are in, and its iteration, too.
_APART = {"_noinline": True}
_NARROW = ("float16", "bfloat16")
_Run = Callable[..., Any]


_Like = tuple[Any, tf.DType, tf.DType | None]  # shape, dtype, dtype of indices


@dataclass(frozen=True)
class _Sum:
    """A sum of a synchronised layer, as it was last built."""

    place: str
    like: Sequence[_Like]


@dataclass(frozen=True)
class _Exchange:
    """What an update exchanges, as it was last built."""

    place: int  # of the optimizer
    brought: Sequence[Brought]  # [K]
    used: Sequence[int]  # places of the gradients that are not None
    like: Sequence[_Like]  # of those, as they travel
    averages: bool


class Ranks:
    """The other processes, as one rank's model sees them."""

    def __init__(self, group: RankGroup, *, shares_data: bool, ends_first: bool):
        """Takes whether all ranks get the same batches, and whether the first ends."""
        self.group, self.shares_data = group, shares_data
        self._ends_first = ends_first
        self._exchanges: dict[int | str, _Exchange | _Sum] = {}  # in a step's order
        self._logs: dict[str, list[str]] = {}  # names, by method
        self._sums: dict[tuple[int | str, str], _Run] = {}  # by place and what is added
        self._counts: Counter[str] = Counter()  # of a step's sums, by layer
        self._idle: tuple[Any, Any] | None = None
        self._parted: list[tuple[Any, Any]] = []  # metrics' variables, own states
        self._asked = self.stops = self._has_begun = False
        self._is_last = True  # Had a batch in the last step of the epoch.
        with tf.init_scope(), tf.device("/cpu:0"):
            self._told = tf.Variable(tf.zeros([3]), trainable=False)  # by all ranks
            self._asks = tf.Variable(0.0, trainable=False)
            self._step = tf.Variable(0, trainable=False)  # of the epoch

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.group.rank == 0

    def parts(self, num_towers: int) -> tuple[int, slice]:
        """Returns into how many parts a batch is cut, and which are this rank's."""
        if not self.shares_data:
            return num_towers, slice(num_towers)
        first = self.group.rank * num_towers
        return self.group.size * num_towers, slice(first, first + num_towers)

    # In a step

    def begin_step(self) -> None:
        """Forgets which sums the step before has built."""
        self._counts.clear()

    def sum_layer(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Adds a synchronised layer's sums of this rank's towers over the ranks."""
        if not all(own.shape.is_fully_defined() for own in tensors):
            raise ValueError(
                f"TowerModel: {name} sums tensors over ranks, whose shapes must be "
                f"known; got {', '.join(str(own.shape) for own in tensors)}."
            )
        self._counts[name] += 1
        place = f"{name}, sum {self._counts[name]}"
        dtypes = [own.dtype for own in tensors]
        travelling = [
            tf.cast(own, tf.float32) if own.dtype.name in _NARROW else own
            for own in tensors
        ]
        self._exchanges[place] = _Sum(place, [_describe(own) for own in travelling])
        sums = self._sum_at(place, travelling)
        return [tf.cast(own, dtype) for own, dtype in zip(sums, dtypes, strict=True)]

    def _sum_at(self, place: str, tensors: Sequence[Any]) -> list[Any]:
        names = [f"{place}, tensor {n}" for n in range(len(tensors))]
        return self._summed(place, tensors, names)

    def reduce(
        self,
        place: int,
        brought: Sequence[Brought],
        weights: Sequence[Any] | None,
        total: Any,
        *,
        device: str,
        checksum: Any,
    ) -> list[Brought]:
        """Adds gradients over all towers of all ranks; all towers get the same.

        ``weights`` are [K], and None for a sum; ``total`` is this rank's. ``device`` is
        where its towers' are added. ``checksum`` is of a batch that all ranks have.
        """
        first = brought[0]
        used = [n for n, grad in enumerate(first.grads) if grad is not None]
        grads = [
            [
                _to_travel(own.grads[n], own.variables[n], n in own.same_rows)
                for n in used
            ]
            for own in brought
        ]
        if weights is not None:
            grads = [
                [weigh(grad, weight) for grad in own]
                for own, weight in zip(grads, weights, strict=True)
            ]
        local = list(sum_on_device(grads, device=device)[0])
        like = [_describe(grad) for grad in local]
        made = _Exchange(place, brought, used, like, weights is not None)
        self._exchanges[place] = made
        told = [tf.cast(total, tf.float32), tf.constant(1.0), self._asks.read_value()]
        return self._add(made, local, told, checksum)

    def _add(
        self, own: _Exchange, local: Sequence[Any], told: Sequence[Any], checksum: Any
    ) -> list[Brought]:
        variables = [own.brought[0].variables[n] for n in own.used]
        names = [str(getattr(v, "path", v.name)) for v in variables]
        told = tf.stack([*told, *self._slots(checksum)])
        names.append(f"what ranks tell, update {own.place}")
        *reduced, told = self._summed(own.place, [*local, told], names)
        if self.shares_data:
            checks = [_check_all_or_none(told[_ACTIVE], self.group.size)]
            with tf.control_dependencies([*checks, _check_same(told[3:])]):
                told = tf.identity(told)
        self._told.assign(told[:3])
        if own.averages:
            reduced = [_divided(grad, told[_WEIGHT]) for grad in reduced]
        return _for_towers(reduced, own)

    def _summed(
        self, place: int | str, tensors: Sequence[Any], names: Sequence[str]
    ) -> list[Any]:
        """Adds tensors over the ranks, in a function that is not inlined.

        Several steps in one call are a loop. In a function of its own an exchange has
        neither the loop's frame nor its iterations, and meets that of an idle rank.
        """
        if tf.executing_eagerly():
            return self.group.sum(tensors, names=names)
        are_sparse = [isinstance(own, tf.IndexedSlices) for own in tensors]
        flat = _flat(tensors)
        specs = [
            tf.TensorSpec([None, *own.shape[1:]] if is_part else own.shape, own.dtype)
            for own, is_part in zip(
                flat, [s for s in are_sparse for _ in range(1 + s)], strict=True
            )
        ]
        key = place, str(specs)
        if key not in self._sums:

            def run(*flat: Any) -> list[Any]:
                own = _packed(flat, are_sparse)
                return _flat(self.group.sum(own, names=names))

            with tf.init_scope():
                made = tf.function(
                    run,
                    input_signature=specs,
                    autograph=False,
                    experimental_attributes=_APART,
                )
                self._sums[key] = made.get_concrete_function()
        return _packed(self._sums[key](*flat), are_sparse)

    def _slots(self, checksum: Any) -> list[Any]:
        """Returns one number per rank, of which this rank's is the checksum."""
        if not self.shares_data:
            return []
        own = [tf.constant(0.0)] * self.group.size
        if checksum is not None:
            own[self.group.rank] = checksum
        return own

    def share(self, data: Any, sizes: Sequence[Any]) -> tf.Tensor:
        """Returns the part of a batch's rows that is this rank's.

        Where each has batches of its own, other ranks are taken to have as many rows.
        """
        own = tf.cast(tf.add_n([tf.cast(size, tf.int64) for size in sizes]), tf.float64)
        if not self.shares_data:
            return tf.cast(own > 0, tf.float64) / self.group.size
        leaf = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
        return tf.math.divide_no_nan(own, tf.cast(rows_of(leaf), tf.float64))

    def checksum(self, data: Any) -> tf.Tensor:
        """Returns a number of a batch, at the beginning of an epoch; 0 later."""
        leaves = tf.nest.flatten(data, expand_composites=True)
        leaves = [leaf for leaf in leaves if leaf is not None]

        def compute() -> tf.Tensor:
            sums = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
            octets = tf.fingerprint(tf.reshape(tf.concat(sums, 1), [1, -1]))[0, :3]
            bits = tf.cast(octets, tf.float32) * [1.0, 256.0, 65536.0]
            return tf.reduce_sum(bits) + 1.0  # exact, and never 0

        with tf.device("/cpu:0"):
            step = self._step.assign_add(1)
            return tf.cond(step <= _CHECKED_STEPS, compute, lambda: tf.constant(0.0))

    def note_step(self, method: str, logs: Any) -> None:
        """Notes what a step returns, for a rank that has no batch."""
        self._logs[method] = [
            name
            for name, own in sorted(logs.items() if isinstance(logs, dict) else ())
            if tf.is_tensor(own) and own.dtype.is_floating and own.shape.rank == 0
        ]

    def forget_steps(self) -> None:
        """Forgets what steps exchange and return, as the model is compiled again."""
        self._exchanges, self._logs, self._sums, self._idle = {}, {}, {}, None
        self._parted = []

    @property
    def has_stepped(self) -> bool:
        """Whether this rank has built or run a step."""
        return "train_step" in self._logs

    # Around steps

    def running(self, function: _Run) -> _Run:
        """Wraps the function that runs a step, or several."""
        bounded = self.group.bounded(function)

        def run(iterator: Any) -> Any:
            self._asks.assign(float(self._asked))
            logs = bounded(iterator)
            self._hear()
            return logs

        return run

    def _hear(self) -> bool:
        """Reads what ranks told in the last step; returns whether one had a batch."""
        told = self._told.numpy()
        self.stops = self.stops or told[_STOPS] > 0
        return bool(told[_ACTIVE] > 0)

    def ask_to_stop(self) -> None:
        """Notes that a callback of this rank asks to stop."""
        self._asked = True

    def go_on(self) -> None:
        """Forgets that training was stopped."""
        self._asked = self.stops = False

    def agree_on_stop(self) -> None:
        """Learns whether a callback of any rank asks to stop; all ranks call it."""
        if not self.stops:
            asked = tf.constant([float(self._asked)])
            (total,) = self.group.sum([asked], names=["whether ranks stop"])
            self.stops = bool(total[0] > 0)

    def begin_epoch(self, batches: Any) -> None:
        """Prepares an epoch over Keras's ``batches``, which may end early."""
        self._step.assign(0)
        if not self._ends_first:
            return
        number = batches.num_batches
        own = [0] * self.group.size
        own[self.group.rank] = -1 if number is None else number
        own = tf.constant(own, tf.int64)
        (of_all,) = self.group.sum([own], names=["numbers of batches"])
        least, steps = int(tf.reduce_min(of_all)), batches.steps_per_execution
        if least < 0:
            raise ValueError(
                "TowerModel: uneven='stop' needs to know how many batches each rank "
                "has; pass steps_per_epoch, or data of known length."
            )
        if least == 0 or (least % steps and least < int(tf.reduce_max(of_all))):
            raise ValueError(
                "TowerModel: with uneven='stop' every rank needs a batch, and the "
                "least number must be one of whole calls of steps_per_execution="
                f"{steps} batches; got {of_all.numpy().tolist()} by rank. Use "
                "uneven='wait'."
            )
        if batches.steps_per_epoch:  # Data goes on in the next epoch.
            batches.steps_per_epoch = least
        else:
            batches._num_batches = least

    def finish_epoch(self, apply: Callable[[int, Sequence[Brought]], None]) -> None:
        """Takes part in the others' updates until no rank has a batch.

        ``apply`` applies the reduced gradients of an optimizer.
        """
        self._is_last = True
        if not self._exchanges:
            return
        if self._idle is None:
            self._idle = self._make_idle(apply)
        exchange, update = self._idle
        while True:
            self._asks.assign(float(self._asked))
            reduced = exchange()
            if not self._hear():
                return
            update(reduced)
            self._is_last = False

    def _make_idle(self, apply: Callable[[int, Sequence[Brought]], None]) -> Any:
        """Makes the functions of a step without a batch: exchange, and update."""
        updates: list[_Exchange] = []

        def exchange() -> list[Any]:
            results = []
            updates.clear()
            for own in self._exchanges.values():
                zeros = [_zeros(*like) for like in own.like]
                if isinstance(own, _Sum):
                    self._sum_at(own.place, zeros)
                    continue
                updates.append(own)
                none = tf.constant(0.0)
                told = [none, none, self._asks.read_value()]
                brought = self._add(own, zeros, told, None)
                results.append([brought[0].grads[n] for n in own.used])
            return results

        def update(results: Sequence[Sequence[Any]]) -> None:
            for own, reduced in zip(updates, results, strict=True):
                apply(own.place, _for_towers(reduced, own))

        functions = [tf.function(own, autograph=False) for own in (exchange, update)]
        return self.group.bounded(functions[0]), functions[1]

    # Outside of steps

    def begin_fit(self, settings: Mapping[str, int]) -> None:
        """Refuses settings that differ; gives ranks that share their data one seed."""
        own = {"data": self.shares_data, "uneven": self._ends_first, **settings}
        begin_fit(self.group, own, seeds=self.shares_data)

    def begin(self, variables: Sequence[Any]) -> None:
        """Gives all ranks the values of rank 0; all ranks call it."""
        self.group.broadcast(variables)
        self._has_begun = True

    def take_state(self, variables: Sequence[Any], *, of_last: bool) -> None:
        """Gives all ranks the state of rank 0, or of one with the epoch's last batch.

        Layers that are synchronised over ranks are equal in those that had a batch.
        """
        root = 0
        if of_last:
            own = [0] * self.group.size
            own[self.group.rank] = int(self._is_last)
            (had,) = self.group.sum([tf.constant(own)], names=["who had a batch"])
            root = int(tf.argmax(had))
        if root == 0:
            self.begin(variables)
            return
        values = [tf_variable(v).read_value() for v in variables]
        if self.group.rank != root:
            values = [tf.zeros_like(value) for value in values]
        names = [str(v.path) for v in variables]
        for variable, value in zip(
            variables, self.group.sum(values, names=names), strict=True
        ):
            variable.assign(value)

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have had the values of rank 0."""
        return self._has_begun

    def merge_metrics(self, metrics: Sequence[Any]) -> None:
        """Adds the states of metrics over the ranks, until ``part_metrics``."""
        variables = [v for metric in metrics for v in metric.variables]
        if not variables:
            return
        values = [tf_variable(v).read_value() for v in variables]
        names = [str(v.path) for v in variables]
        totals = self.group.sum(values, names=names)
        self._parted = list(zip(variables, values, strict=True))
        for variable, total in zip(variables, totals, strict=True):
            variable.assign(total)

    def part_metrics(self) -> None:
        """Gives metrics this rank's states again: some are not reset by epoch."""
        for variable, own in self._parted:
            variable.assign(own)
        self._parted = []

    def merge_logs(
        self, method: str, logs: Any, results: dict[str, Any]
    ) -> tuple[Any, list[str]]:
        """Averages what is no metric over the ranks that had a batch.

        Returns the logs, and the names of those that are ``results`` of metrics: a step
        may return some metrics and not others.
        """
        names = self._logs.get(method, [])
        if not names or set(names) == set(results):  # Keras takes the metrics'
            return logs, []
        own = [tf.cast(logs[n], tf.float32) if logs else 0.0 for n in names]
        shown = [
            float(bool(logs) and n in results and _are_same(logs[n], results[n]))
            for n in names
        ]
        told = tf.stack([*own, *shown, float(bool(logs))])
        (total,) = self.group.sum([told], names=["logs of the last batches"])
        count = len(names)
        averages = tf.math.divide_no_nan(total[:count], total[-1])
        are_metrics = tf.equal(total[count:-1], total[-1]).numpy()
        merged = dict(zip(names, tf.unstack(averages), strict=True))
        return {**logs, **merged}, [
            n for n, is_one in zip(names, are_metrics, strict=True) if is_one
        ]


def _are_same(one: Any, other: Any) -> bool:
    return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True))


def _to_travel(grad: Any, variable: Any, has_same_rows: bool) -> Any:
    if has_same_rows:  # a table that every tower and rank reads in the same order
        grad = tf.convert_to_tensor(grad)
    if tf.is_tensor(grad) and not isinstance(grad, tf.IndexedSlices):
        grad = tf.ensure_shape(grad, variable.shape)  # which it must be without a batch
    if values_of(grad).dtype.name in _NARROW:  # a sum times rows may overflow
        return map_values(lambda values: tf.cast(values, tf.float32), grad)
    return grad


def _describe(grad: Any) -> tuple[Any, tf.DType, tf.DType | None]:
    if isinstance(grad, tf.IndexedSlices):
        return [0, *grad.values.shape[1:]], grad.values.dtype, grad.indices.dtype
    return grad.shape, grad.dtype, None


def _zeros(shape: Any, dtype: tf.DType, indices: tf.DType | None) -> Any:
    values = tf.zeros(shape, dtype)
    if indices is None:
        return values
    return tf.IndexedSlices(values, tf.zeros([0], indices))


def _flat(tensors: Sequence[Any]) -> list[Any]:
    parts = [
        [own.values, own.indices] if isinstance(own, tf.IndexedSlices) else [own]
        for own in tensors
    ]
    return [part for own in parts for part in own]


def _packed(flat: Sequence[Any], are_sparse: Sequence[bool]) -> list[Any]:
    parts = iter(flat)
    return [
        tf.IndexedSlices(next(parts), next(parts)) if is_sparse else next(parts)
        for is_sparse in are_sparse
    ]


def _divided(grad: Any, weight: tf.Tensor) -> Any:
    def divide(values: tf.Tensor) -> tf.Tensor:
        return tf.math.divide_no_nan(values, tf.cast(weight, values.dtype))

    return map_values(divide, grad)


def _for_towers(reduced: Sequence[Any], exchange: _Exchange) -> list[Brought]:
    """Puts [N] reduced gradients where the towers had theirs, for each tower."""
    variables = exchange.brought[0].variables
    grads: list[Any] = [None] * len(variables)
    for n, grad in zip(exchange.used, reduced, strict=True):
        grads[n] = _as_of(variables[n], grad)
    return [Brought(grads, own.variables) for own in exchange.brought]


def _as_of(variable: Any, grad: Any) -> Any:
    """Gives a gradient the dtype and, where it is sparse, the shape of a variable."""
    values = tf.cast(values_of(grad), tf.as_dtype(variable.dtype))
    if not isinstance(grad, tf.IndexedSlices):
        return values
    return tf.IndexedSlices(values, grad.indices, tf.constant(list(variable.shape)))


def _check_all_or_none(active: tf.Tensor, size: int) -> tf.Operation:
    """Fails where some of the ranks that share their data have no batch left."""
    says = (
        "TowerModel: with data='shared' all ranks must get the same batches; here the "
        "data of some has ended. Give all ranks the same data, or use data='own'. "
        "Ranks with a batch:"
    )
    good = tf.reduce_any(tf.equal(active, [0.0, float(size)]))
    return tf.debugging.Assert(good, [says, active])


def _check_same(checksums: tf.Tensor) -> tf.Operation:
    """Fails where ranks that must have one batch have several."""
    some = tf.boolean_mask(checksums, checksums > 0)
    same = tf.reduce_all(tf.equal(some, some[:1]))
    says = (
        "TowerModel: with data='shared' all ranks must get the same batches; here the "
        "first ones of an epoch differ. Give all ranks one order and one seed, or use "
        "data='own'. Their checksums by rank:"
    )
    return tf.debugging.Assert(same, [says, checksums], summarize=1 << 10)
