"""What the processes of a ``TowerModel`` exchange.

Every rank runs Keras's ``fit`` on its own towers. What one process reduces, all ranks
add: gradients in every step, and with them whether a rank had a batch and whether one
of its callbacks asks to stop; metrics at the end of an epoch. A rank whose data has
ended takes part with zeros and makes the others' updates, until none has a batch.
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tw_builders.internal import rows_of
from tw_core.gradients import has_unique_rows, split_rows, weigh
from tw_core.ranks import RankGroup
from tw_core.variables import tf_variable
from tw_keras._accumulation import Told
from tw_keras._over_ranks.agreement import begin_fit
from tw_keras._over_ranks.exchanges import (
    NARROW,
    AccumulatedExchange,
    SumExchange,
    UpdateExchange,
    check_all_or_none,
    check_same,
    describe,
    divided,
    flatten,
    for_towers,
    joined,
    make_zeros,
    to_travel,
    unflatten,
)
from tw_keras._over_ranks.results import Results
from tw_keras._updates import Brought
from tw_reduce import Reducer

_WEIGHT, _ACTIVE, _STOPS = range(3)  # places in what is added beside gradients
_CHECKED_STEPS = 2  # of an epoch, whose batches must be the same on all ranks
# TensorFlow's collectives match by the loop that they are in, and its iteration, too.
_APART = {"_noinline": True}
_Run = Callable[..., Any]
_Apply = Callable[[int, Sequence[Brought]], None]
_Collect = Callable[[AccumulatedExchange], Sequence[Brought]]


class Ranks:
    """The other processes, as one rank's model sees them."""

    def __init__(self, group: RankGroup, *, shares_data: bool, ends_first: bool):
        """Takes whether all ranks get the same batches, and whether the first ends."""
        self.group, self.shares_data = group, shares_data
        self._ends_first = ends_first
        self._exchanges: dict[
            int | str, UpdateExchange | AccumulatedExchange | SumExchange
        ] = {}  # in a step's order
        self.results = Results(group)
        self.num_calls = 0  # that all ranks have made together, such as fit
        self._sums: dict[tuple[int | str, str], _Run] = {}  # by place and what is added
        self._counts: Counter[str] = Counter()  # of a step's sums, by layer
        self._idle: tuple[Any, Any] | None = None
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
            tf.cast(own, tf.float32) if own.dtype.name in NARROW else own
            for own in tensors
        ]
        self._exchanges[place] = SumExchange(
            place, [describe(own) for own in travelling]
        )
        sums = self._sum_at(place, travelling)
        return [tf.cast(own, dtype) for own, dtype in zip(sums, dtypes, strict=True)]

    def of_first(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values of the first rank that has a batch in this step."""
        rank, size = self.group.rank, self.group.size
        values = [tf.identity(value) for value in values]
        [active] = self.sum_layer("ranks that assign", [tf.one_hot(rank, size)])
        is_first = tf.equal(tf.argmax(active), rank)
        own = [tf.where(is_first, value, tf.zeros_like(value)) for value in values]
        return self.sum_layer("assigned variables", own)

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
        add: Reducer,
        checksum: Any,
    ) -> list[Brought]:
        """Adds gradients over all towers of all ranks; all towers get the same.

        ``weights`` are [K], and None for a sum; ``total`` is this rank's. ``add`` adds
        its towers'. ``checksum`` is of a batch that all ranks have.
        """
        first = brought[0]
        used = [n for n, grad in enumerate(first.grads) if grad is not None]
        grads = [
            [
                to_travel(own.grads[n], own.variables[n], n in own.same_rows)
                for n in used
            ]
            for own in brought
        ]
        if weights is not None:
            grads = [
                [weigh(grad, weight) for grad in own]
                for own, weight in zip(grads, weights, strict=True)
            ]
        own_parts = [split_rows(grad) for grad in add(grads)[0]]
        local = [part for own in own_parts for part in own]
        made = UpdateExchange(
            *(place, brought, used, [len(own) for own in own_parts]),
            like=[describe(part) for part in local],
            unique=[has_unique_rows(part) for part in local],
            averages=weights is not None,
        )
        self._exchanges[place] = made
        told = [tf.cast(total, tf.float32), tf.constant(1.0), self._asks.read_value()]
        return self._add(made, local, told, checksum)

    def _add(
        self,
        own: UpdateExchange,
        local: Sequence[Any],
        told: Sequence[Any],
        checksum: Any,
    ) -> list[Brought]:
        variables = [own.brought[0].variables[n] for n in own.used]
        names = [
            str(getattr(v, "path", v.name))
            for v, count in zip(variables, own.counts, strict=True)
            for _ in range(count)
        ]
        told = tf.stack([*told, *self._slots(checksum)])
        names.append(f"what ranks tell, update {own.place}")
        *reduced, told = self._summed(own.place, [*local, told], names)
        told = self._noted(told)
        reduced = joined(reduced, own)
        if own.averages:
            reduced = [divided(grad, told[_WEIGHT]) for grad in reduced]
        return for_towers([reduced], own)

    def _noted(self, told: Any) -> Any:
        """Keeps what all ranks told, and compares their batches."""
        if self.shares_data:
            checks = [check_all_or_none(told[_ACTIVE], self.group.size)]
            with tf.control_dependencies([*checks, check_same(told[3:])]):
                told = tf.identity(told)
        self._told.assign(told[:3])
        return told

    def tell(self, own: AccumulatedExchange, told: Told, checksum: Any) -> Told:
        """Learns of all ranks what must be known of a step to add gradients up."""
        self._exchanges[own.place] = own
        numbers = [told.divisor, told.has_batch, self._asks.read_value()]
        numbers += [*self._slots(checksum), tf.logical_not(told.is_finite)]
        place = f"what ranks tell, update {own.place}"
        packed = tf.stack([tf.cast(number, tf.float32) for number in numbers])
        [of_all] = self._summed(place, [packed], [place])
        noted = self._noted(of_all[:-1])
        divisor = noted[_WEIGHT] if own.averages else 1
        return Told(divisor, noted[_ACTIVE] > 0, tf.equal(of_all[-1], 0))

    def sum_accumulated(
        self, own: AccumulatedExchange, sums: Sequence[Any]
    ) -> list[Any]:
        """Adds what the towers of all ranks have added up."""
        names = [str(getattr(v, "path", v.name)) for v in own.variables]
        return self._summed(f"gradients, update {own.place}", sums, names)

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
        flat = flatten(tensors)
        specs = [
            tf.TensorSpec([None, *own.shape[1:]] if is_part else own.shape, own.dtype)
            for own, is_part in zip(
                flat, [s for s in are_sparse for _ in range(1 + s)], strict=True
            )
        ]
        key = place, str(specs)
        if key not in self._sums:

            def run(*flat: Any) -> list[Any]:
                own = unflatten(flat, are_sparse)
                return flatten(self.group.sum(own, names=names))

            with tf.init_scope():
                made = tf.function(
                    run,
                    input_signature=specs,
                    autograph=False,
                    experimental_attributes=_APART,
                )
                self._sums[key] = made.get_concrete_function()
        return unflatten(self._sums[key](*flat), are_sparse)

    def _slots(self, checksum: Any) -> list[Any]:
        """Returns one number per rank, of which this rank's is the checksum."""
        if not self.shares_data:
            return []
        own = [tf.constant(0.0)] * self.group.size
        if checksum is not None:
            own[self.group.rank] = checksum
        return own

    def share(
        self, data: Any, sizes: Sequence[Any], *, trains: bool
    ) -> Callable[[], tf.Tensor]:
        """Returns a function of the part of a batch's rows that is this rank's.

        Where each has batches of its own, it asks the others in a step that trains, and
        else, as they may have no batch, takes them to have as many rows.
        """
        own = tf.cast(tf.add_n([tf.cast(size, tf.int64) for size in sizes]), tf.float64)

        def find() -> tf.Tensor:
            if self.shares_data:
                leaf = next(leaf for leaf in tf.nest.flatten(data) if leaf is not None)
                total = tf.cast(rows_of(leaf), tf.float64)
            elif trains:
                [total] = self.sum_layer("rows of a batch", [own])
            else:
                return tf.cast(own > 0, tf.float64) / self.group.size
            return tf.math.divide_no_nan(own, total)

        return functools.cache(find)

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

    def forget_steps(self) -> None:
        """Forgets what steps exchange and return, as the model is compiled again."""
        self._exchanges, self._sums, self._idle = {}, {}, None
        self.results = Results(self.group)

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

    def is_any(self, own: bool) -> bool:
        """Returns whether a condition is true on any rank; all ranks call it."""
        (total,) = self.group.sum([tf.constant([float(own)])], names=["if any looks"])
        return bool(total[0] > 0)

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

    def finish_epoch(self, apply: _Apply, collect: _Collect) -> None:
        """Takes part in the others' updates until no rank has a batch.

        ``apply`` applies the reduced gradients of an optimizer; ``collect`` returns
        those of one that accumulates.
        """
        self._is_last = True
        if not self._exchanges:
            return
        if self._idle is None:
            self._idle = self._make_idle(apply, collect)
        exchange, update = self._idle
        while True:
            self._asks.assign(float(self._asked))
            reduced = exchange()
            if not self._hear():
                return
            update(reduced)
            self._is_last = False

    def _make_idle(self, apply: _Apply, collect: _Collect) -> Any:
        """Makes the functions of a step without a batch: exchange, and update."""
        updates: list[UpdateExchange | AccumulatedExchange] = []

        def exchange() -> list[Any]:
            results = []
            updates.clear()
            for own in list(self._exchanges.values()):
                if isinstance(own, AccumulatedExchange):
                    updates.append(own)
                    reduced = collect(own)
                    results.append([[k.grads[n] for n in own.used] for k in reduced])
                    continue
                zeros = [make_zeros(*like) for like in own.like]
                if isinstance(own, SumExchange):
                    self._sum_at(own.place, zeros)
                    continue
                updates.append(own)
                none = tf.constant(0.0)
                told = [none, none, self._asks.read_value()]
                brought = self._add(own, zeros, told, None)
                results.append([[brought[0].grads[n] for n in own.used]])
            return results

        def update(results: Sequence[Sequence[Any]]) -> None:
            for own, reduced in zip(updates, results, strict=True):
                apply(own.place, for_towers(reduced, own))

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
        if not variables:
            return
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
        names = [str(getattr(v, "path", v.name)) for v in variables]
        for variable, value in zip(
            variables, self.group.sum(values, names=names), strict=True
        ):
            variable.assign(value)

    @property
    def has_begun(self) -> bool:
        """Whether all ranks have had the values of rank 0."""
        return self._has_begun
