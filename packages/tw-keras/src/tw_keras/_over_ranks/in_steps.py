"""The exchanges of ranks in a step, whether it has a batch or not."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tw_builders.internal import RankShards, rows_of
from tw_core.internal import has_unique_rows, split_rows, weigh, weight_dtype
from tw_core.ranks import RankGroup
from tw_keras._over_ranks import exchanges as travel
from tw_keras._updates.accumulation import Told
from tw_keras._updates.update import Brought
from tw_reduce import Reducer

# Places in the report that is summed with gradients; then the ranks' checksums.
_WEIGHT, _ACTIVE, _STOPS, _HAS_MORE, _CHECKSUMS = range(5)
_CHECKED_STEPS = 2  # of an epoch: their batches are compared over ranks
# TensorFlow's collectives also match by the enclosing loop and its iteration.
_APART = {"_noinline": True}
# Returns the gradients of an update, [K][M]; applies them.
Collect = Callable[[travel.AccumulatedExchange], Sequence[Sequence[Any]]]
Apply = Callable[[Any, Sequence[Sequence[Any]]], None]


class InSteps:
    """The sums over ranks of one model's steps.

    They are built as the step is traced; a rank without a batch builds the same ones
    from their recorded specs, with zeros.
    """

    def __init__(self, group: RankGroup, *, shares_data: bool) -> None:
        """Starts without a step."""
        self.group, self.shares_data = group, shares_data
        self._counts: Counter[str] = Counter()  # of a step's sums, by layer
        with tf.init_scope(), tf.device("/cpu:0"):
            self._told = tf.Variable([False] * 3, trainable=False)  # by any rank
            self._tells = tf.Variable([False] * 2, trainable=False)
            self._step = tf.Variable(0, trainable=False)  # of the epoch
        self._told_last = False, False
        self.forget()

    def forget(self) -> None:
        """Forgets the steps' exchanges, as the model is compiled again."""
        self._exchanges: dict[
            int | str,
            travel.UpdateExchange | travel.AccumulatedExchange | travel.SumExchange,
        ] = {}  # in a step's order
        self._sums: dict[tuple[int | str, str], Callable[..., Any]] = {}
        self._idle: tuple[Any, Any] | None = None

    def tell_next(self, *, to_stop: bool, has_more: bool) -> None:
        """Sets the next step's report: whether to stop, and if more may follow."""
        if (to_stop, has_more) != self._told_last:
            self._told_last = to_stop, has_more
            self._tells.assign([to_stop, has_more])

    def heard(self) -> tuple[bool, bool, bool]:
        """Returns if any rank had a batch, asked to stop, has more, last step."""
        had, stops, more = self._told.numpy().tolist()
        return had, stops, more

    def begin_epoch(self) -> None:
        """Counts the steps of an epoch from 0."""
        self._step.assign(0)

    def begin_step(self) -> None:
        """Forgets the sums built by the previous step."""
        self._counts.clear()
        self._is_eager = tf.executing_eagerly()

    def sum_layer(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Adds a synchronised layer's sums of this rank's towers over the ranks."""
        if not all(own.shape.is_fully_defined() for own in tensors):
            raise ValueError(
                f"TowerModel: {name} sums tensors over ranks, so their shapes must be "
                f"known; got {', '.join(str(own.shape) for own in tensors)}."
            )
        name = travel.unnumbered(name)
        self._counts[name] += 1
        place = f"{name}, sum {self._counts[name]}"
        dtypes = [own.dtype for own in tensors]
        travelling = [
            tf.cast(own, tf.float32) if own.dtype.name in travel.NARROW else own
            for own in tensors
        ]
        self._exchanges[place] = travel.SumExchange(
            place, [travel.describe(own) for own in travelling]
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
        *,
        add: Reducer,
        checksum: Any,
        shards: RankShards | None = None,
    ) -> list[Any]:
        """Adds gradients over all towers of all ranks; all towers get the same.

        ``weights``: [K], or None for a sum. ``add`` adds over this rank's towers.
        ``checksum``: of a batch that ranks share. Returns [K] ``Brought``; with
        ``shards``, the gradients of this rank's shards.
        """
        first, total = brought[0], tf.constant(0)
        used = [n for n, grad in enumerate(first.grads) if grad is not None]
        grads = [
            [
                travel.to_travel(own.grads[n], own.variables[n], n in own.same_rows)
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
        kind: Callable[..., travel.UpdateExchange] = travel.UpdateExchange
        if shards is not None:
            kind = functools.partial(travel.ShardedExchange, shards=shards)
        made = kind(
            *(place, brought, used, weights is not None),
            counts=[len(own) for own in own_parts],
            like=[travel.describe(part) for part in local],
            unique=[has_unique_rows(part) for part in local],
        )
        self._exchanges[place] = made
        if weights is not None:
            total = tf.add_n([tf.cast(own, weight_dtype(local)) for own in weights])
        told = [total, 1, *tf.unstack(self._tells.read_value())]
        return self._add(made, local, told, checksum)

    def exchange_at(self, place: int) -> Any:
        """Returns an update's exchange, as it was last built."""
        return self._exchanges[place]

    def _add(
        self,
        own: travel.UpdateExchange,
        local: Sequence[Any],
        told: Sequence[Any],
        checksum: Any,
    ) -> list[Any]:
        names = [
            travel.name_of(variable)
            for variable, count in zip(own.variables, own.counts, strict=True)
            for _ in range(count)
        ]
        wide = weight_dtype(local)
        told = _packed([*told, *self._slots(checksum)], wide)
        if isinstance(own, travel.ShardedExchange):
            return self._add_to_shards(own, local, told, names)
        names.append(f"reports of ranks, update {own.place}")
        *reduced, told = self._summed(own.place, [*local, told], names)
        told = self._noted(told)
        reduced = travel.joined(reduced, own.counts, own.unique)
        if own.averages:
            reduced = [travel.divided(grad, told[_WEIGHT]) for grad in reduced]
        return travel.for_towers([reduced], own)

    def _add_to_shards(
        self,
        own: travel.ShardedExchange,
        local: Sequence[Any],
        told: Any,
        names: Sequence[str],
    ) -> list[Any]:
        """Sums dense gradients where their shards are, and sparse ones on all ranks."""
        are_sparse = [isinstance(part, tf.IndexedSlices) for part in local]
        rows = [part for part, is_one in zip(local, are_sparse, strict=True) if is_one]
        of_rows = [n for n, is_one in zip(names, are_sparse, strict=True) if is_one]
        if rows:
            place = f"rows, update {own.place}"
            rows = self._summed(place, rows, of_rows)
        left, reduced = iter(rows), []
        for part, is_one in zip(local, are_sparse, strict=True):
            reduced.append(next(left) if is_one else part)
        whole = travel.joined(reduced, own.counts, own.unique)
        grads: list[Any] = [None] * len(own.shards.shapes)
        for n, grad in zip(own.places, whole, strict=True):
            grads[n] = grad
        name = f"gradients, update {own.place}"
        sums, told = own.shards.reduce(grads, told, name=name)
        told = self._noted(told)
        return own.shards.divided(sums, told[_WEIGHT] if own.averages else None)

    def _noted(self, told: Any) -> Any:
        """Stores the sum of all ranks' reports, and compares their batches."""
        if self.shares_data:
            checks = [travel.check_all_or_none(told[_ACTIVE], self.group.size)]
            checks.append(travel.check_same(told[_CHECKSUMS:]))
            with tf.control_dependencies(checks):
                told = tf.identity(told)
        self._told.assign(told[_ACTIVE:_CHECKSUMS] > 0)
        return told

    def tell(self, own: travel.AccumulatedExchange, told: Told, checksum: Any) -> Told:
        """Exchanges the scalars of a step that ranks need to accumulate gradients."""
        self._exchanges[own.place] = own
        numbers = [told.divisor, told.has_batch]
        numbers += tf.unstack(self._tells.read_value())
        numbers += [*self._slots(checksum), tf.logical_not(told.is_finite)]
        place = f"reports of ranks, update {own.place}"
        packed = _packed(numbers, weight_dtype(own.variables))
        [of_all] = self._summed(place, [packed], [place])
        noted = self._noted(of_all[:-1])
        divisor = noted[_WEIGHT] if own.averages else 1
        return Told(divisor, noted[_ACTIVE] > 0, tf.equal(of_all[-1], 0))

    def sum_accumulated(
        self, own: travel.AccumulatedExchange, sums: Sequence[Any]
    ) -> list[Any]:
        """Adds the accumulated gradients of all ranks."""
        names = list(map(travel.name_of, own.variables))
        return self._summed(f"gradients, update {own.place}", sums, names)

    def begin_sums(self, place: int) -> None:
        """Starts to count an update's sums, by a reducer with memory."""
        self._counts[_remembered(place)] = 0

    def sum_remembered(self, place: int, tensors: Sequence[Any]) -> list[Any]:
        """Adds the tensors of a reducer with memory; unique rows stay unique."""
        name = _remembered(place)
        self._counts[name] += 1
        parts = [split_rows(own) for own in tensors]
        flat = [part for own in parts for part in own]
        sums = self._sum_at(f"{name}, sum {self._counts[name]}", flat)
        counts, unique = [len(own) for own in parts], list(map(has_unique_rows, flat))
        return travel.joined(sums, counts, unique)

    def _summed(
        self, place: int | str, tensors: Sequence[Any], names: Sequence[str]
    ) -> list[Any]:
        """Adds tensors over the ranks, in a function that is not inlined.

        Several steps in one call are a loop. In a separate function an exchange has
        neither the loop's frame nor its iteration, and so matches that of an idle rank.
        """
        if tf.executing_eagerly():
            return self.group.sum(tensors, names=names)
        are_sparse = [isinstance(own, tf.IndexedSlices) for own in tensors]
        flat = travel.flatten(tensors)
        specs = [
            tf.TensorSpec([None, *own.shape[1:]] if is_part else own.shape, own.dtype)
            for own, is_part in zip(
                flat, [s for s in are_sparse for _ in range(1 + s)], strict=True
            )
        ]

        def run(*flat: Any) -> list[Any]:
            own = travel.unflatten(flat, are_sparse)
            return travel.flatten(self.group.sum(own, names=names))

        return travel.unflatten(self.apart(place, run, flat, specs), are_sparse)

    def apart(
        self,
        place: int | str,
        run: Callable[..., list[Any]],
        flat: Sequence[Any],
        specs: Sequence[tf.TensorSpec],
    ) -> list[Any]:
        """Runs an exchange of dense tensors in a function that is not inlined."""
        key = place, str(specs)
        if key not in self._sums:
            with tf.init_scope():
                made = tf.function(
                    run,
                    input_signature=specs,
                    autograph=False,
                    experimental_attributes=_APART,
                )
                self._sums[key] = made.get_concrete_function()
        return list(self._sums[key](*flat))

    def _slots(self, checksum: Any) -> list[Any]:
        """Returns a number per rank: this rank's checksum, and 0 for others."""
        if not self.shares_data:
            return []
        own = [tf.constant(0)] * self.group.size
        if checksum is not None:
            own[self.group.rank] = checksum
        return own

    def share(
        self, data: Any, sizes: Sequence[Any], *, trains: bool
    ) -> Callable[[], tf.Tensor]:
        """Returns a function that computes this rank's share of a batch's rows.

        If each rank has its own batches, a step that trains sums the rows over ranks.
        In other steps, where other ranks may have no batch, the rows are assumed equal.
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
        """Returns a batch's checksum in an epoch's first steps; 0 later."""
        leaves = tf.nest.flatten(data, expand_composites=True)
        leaves = [leaf for leaf in leaves if leaf is not None]

        def compute() -> tf.Tensor:
            sums = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
            octets = tf.fingerprint(tf.reshape(tf.concat(sums, 1), [1, -1]))[0, :3]
            bits = tf.cast(octets, tf.int32) * [1, 256, 65536]
            return tf.reduce_sum(bits) + 1  # exact in float32, and never 0

        with tf.device("/cpu:0"):
            step = self._step.assign_add(1)
            return tf.cond(step <= _CHECKED_STEPS, compute, lambda: tf.constant(0))

    def idle_step(self, apply: Apply, collect: Collect) -> tuple[Any, Any] | None:
        """Returns the functions of a step without a batch: exchange, and update.

        None if no step was built. ``collect`` returns the gradients for an optimizer
        that accumulates; ``apply`` applies these, or reduced gradients.
        """
        if self._exchanges and self._idle is None:
            self._idle = self._make_idle(apply, collect)
        return self._idle

    def _make_idle(self, apply: Apply, collect: Collect) -> Any:
        """Makes the functions of a step without a batch: exchange, and update."""
        updates: list[travel.UpdateExchange | travel.AccumulatedExchange] = []

        def exchange() -> list[Any]:
            results: list[Any] = []
            updates.clear()
            for own in list(self._exchanges.values()):
                if isinstance(own, travel.SumExchange):
                    self._sum_at(own.place, _zeros(own))
                    continue
                updates.append(own)
                if isinstance(own, travel.AccumulatedExchange):
                    results.append(collect(own))
                    continue
                told = [0, 0, *tf.unstack(self._tells.read_value())]
                brought = self._add(own, _zeros(own), told, None)
                if not isinstance(own, travel.ShardedExchange):
                    brought = [brought[0].grads[n] for n in own.used]
                results.append([brought])
            return results

        def update(results: Sequence[Sequence[Any]]) -> None:
            for own, reduced in zip(updates, results, strict=True):
                apply(own, reduced)

        functions: list[Callable[..., Any]] = [exchange, update]
        if not self._is_eager:  # A trace meets the other ranks in branches not taken.
            functions = [tf.function(own, autograph=False) for own in functions]
        return tuple(map(self.group.bounded, functions))


def _packed(numbers: Sequence[Any], dtype: tf.DType) -> tf.Tensor:
    return tf.stack([tf.cast(number, dtype) for number in numbers])


def _zeros(own: travel.SumExchange | travel.UpdateExchange) -> list[Any]:
    return [travel.make_zeros(*like) for like in own.like]


def _remembered(place: int) -> str:
    return f"sums of a reducer, update {place}"
