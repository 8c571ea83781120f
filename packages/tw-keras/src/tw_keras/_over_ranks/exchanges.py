"""What ranks exchange in a step, whether they have a batch or not.

While a step is traced, its exchanges are recorded. A rank without a batch makes the
same ones in the same order: sums of layers with zeros, and updates by the same stages.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    all_gather,
    all_to_all,
    has_unique_rows,
    join_rows,
    map_values,
    plan_buckets,
    reduce_scatter,
    run_independently,
    split_rows,
    with_unique_rows,
)
from tw_core.ranks import RankGroup
from tw_keras._update.gradients import NARROW, Specs, specs_of, unnumbered, zeros_of

# Places in the report, which ranks sum; then the ranks' checksums.
_WEIGHT, _ROWS, _ACTIVE, _STOPS, _HAS_MORE, _CHECKSUMS = range(6)
_CHECKED_STEPS = 2  # of an epoch: their batches are compared over ranks
# TensorFlow's collectives also match by the enclosing loop and its iteration.
_APART = {"_noinline": True}
# What is in a step as outside of it. Protocols do not ask ``__getattr__`` for methods
# from Python 3.12 on.
_SAME = ("rank", "size", "bucket_bytes", "broadcast", "bounded", "tell", "wait_for")
# Makes an update without a batch, of a batch of this weight over all ranks.
Replay = Callable[[tf.Tensor], None]


class Exchanges:
    """The exchanges of one model's training steps."""

    def __init__(
        self, group: RankGroup, *, shares_data: bool, wire_dtype: Any = None
    ) -> None:
        """Starts without a step; ``wire_dtype``: in which gradients are sent."""
        self.group, self.shares_data = group, shares_data
        # Of the group's sums of gradients.
        self.manner = {} if wire_dtype is None else {"wire_dtype": wire_dtype}
        # Of gradients that are sent while others are computed; None: all together.
        self.bucket_bytes: int | None = getattr(group, "bucket_bytes", None)
        self._counts: Counter[str] = Counter()  # of a step's exchanges, by name
        with tf.init_scope(), tf.device("/cpu:0"):
            self._heard = tf.Variable([False] * 3, trainable=False)  # of any rank
            self._says = tf.Variable([False] * 2, trainable=False)
            self._step = tf.Variable(0, trainable=False)  # of the epoch
        self._said = False, False
        self.only_records = False  # Nothing is exchanged.
        self.forget()

    def forget(self) -> None:
        """Forgets the steps' exchanges, as the model is compiled again."""
        # In a step's order: layers' sums by name, updates by the optimizers' numbers.
        self._recorded: dict[str | int, Specs | Replay] = {}
        # And whether calls of each may begin in any order.
        self._functions: dict[tuple[str, str], tuple[Callable[..., Any], bool]] = {}
        self._idle: Any = None

    def say_next(self, *, to_stop: bool, has_more: bool) -> None:
        """Sets the next step's report: whether to stop, and if more may follow."""
        if (to_stop, has_more) != self._said:
            self._said = to_stop, has_more
            self._says.assign([to_stop, has_more])

    def heard(self) -> tuple[bool, bool, bool]:
        """Returns if any rank had a batch, asked to stop, has more, last step."""
        had, stops, more = self._heard.numpy().tolist()
        return had, stops, more

    def begin_epoch(self) -> None:
        """Counts the steps of an epoch from 0."""
        self._step.assign(0)

    def begin_step(self) -> None:
        """Begins to count a step's exchanges."""
        self.count_anew()
        self._is_eager = tf.executing_eagerly()

    def count_anew(self) -> None:
        """Counts from 0, wherever all ranks begin to make the same exchanges."""
        self._counts.clear()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Makes a trace record exchanges and make none, for ranks that run eagerly.

        These exchange one by one, where a trace would wait for them all.
        """
        self.only_records = True
        try:
            yield
        finally:
            self.only_records, self._is_eager = False, True

    def report(
        self,
        weight: Any,
        rows: Any,
        *,
        checksum: Any = None,
        has_batch: bool = True,
    ) -> list[tf.Tensor]:
        """Exchanges what a step needs to know first; returns all weights and rows.

        ``checksum``: of a batch that ranks share.
        """
        with tf.device("/cpu:0"):
            numbers = [weight, rows, has_batch, *tf.unstack(self._says.read_value())]
            if self.shares_data:
                seats = range(self.group.size)
                is_own = [checksum is not None and k == self.group.rank for k in seats]
                numbers += [checksum if is_one else 0 for is_one in is_own]
            packed = tf.stack([tf.cast(number, tf.float64) for number in numbers])
            [total] = self.sum("reports of ranks", [packed], ["reports of ranks"])
            if self.shares_data:
                checks = [
                    _check_all_or_none(total[_ACTIVE], self.group.size),
                    _check_same(total[_CHECKSUMS:]),
                ]
                with tf.control_dependencies(checks):
                    total = tf.identity(total)
            self._heard.assign(total[_ACTIVE:_CHECKSUMS] > 0)
            return list(tf.unstack(total[:_ACTIVE]))

    def checksum(self, data: Any) -> tf.Tensor:
        """Returns a batch's checksum in an epoch's first steps; 0 later."""
        leaves = tf.nest.flatten(data, expand_composites=True)
        leaves = [leaf for leaf in leaves if leaf is not None]

        def compute() -> tf.Tensor:
            sums = [tf.fingerprint(tf.reshape(leaf, [1, -1])) for leaf in leaves]
            octets = tf.fingerprint(tf.reshape(tf.concat(sums, 1), [1, -1]))[0, :3]
            bits = tf.cast(octets, tf.int32) * [1, 256, 65536]
            return tf.reduce_sum(bits) + 1  # never 0

        with tf.device("/cpu:0"):
            step = self._step.assign_add(1)
            return tf.cond(step <= _CHECKED_STEPS, compute, lambda: tf.constant(0))

    def sum_layer(self, name: str, tensors: Sequence[Any]) -> list[Any]:
        """Adds sums over this rank's towers over the ranks, in the forward pass."""
        dense = [own for own in tensors if not isinstance(own, tf.IndexedSlices)]
        if not all(tensor.shape.is_fully_defined() for tensor in dense):
            raise ValueError(
                f"TowerModel: {name} sums tensors over ranks, so their shapes must be "
                f"known; got {', '.join(str(tensor.shape) for tensor in tensors)}."
            )
        key = self._counted(unnumbered(name))
        dtypes = [tensor.dtype for tensor in tensors]
        wide = [_cast(t, tf.float32) if t.dtype.name in NARROW else t for t in tensors]
        self._recorded[key] = specs_of(wide)
        sums = self._sum_layer(key, wide)
        return list(map(_cast, sums, dtypes))

    def _sum_layer(self, key: str, tensors: Sequence[Any]) -> list[Any]:
        names = [f"{key}, tensor {n}" for n in range(len(tensors))]
        return self._sum(key, tensors, names)

    def of_first(self, values: Sequence[Any]) -> list[Any]:
        """Returns the values of the first rank that has a batch in this step."""
        rank, size = self.group.rank, self.group.size
        values = [tf.identity(value) for value in values]
        [active] = self.sum_layer("ranks that assign", [tf.one_hot(rank, size)])
        is_first = tf.equal(tf.argmax(active), rank)
        selected = [tf.where(is_first, value, tf.zeros_like(value)) for value in values]
        return self.sum_layer("assigned variables", selected)

    def record(self, number: int, replay: Replay) -> None:
        """Records an optimizer's update, which a rank without a batch makes too."""
        self._recorded[number] = replay

    def sum(
        self, what: str, tensors: Sequence[Any], names: Sequence[str] = (), **how: Any
    ) -> list[Any]:
        """Adds tensors, dense or sparse, over the ranks; unique rows stay unique."""
        key = self._counted(what)
        if not names:
            names = [f"{key}, tensor {n}" for n in range(len(tensors))]
        # A sparse gradient of a table that is read in several ways has several parts.
        parts = list(map(split_rows, tensors))
        of_parts = [n for n, row in zip(names, parts, strict=True) for _ in row]
        flat = [part for row in parts for part in row]
        totals: dict[int, Any] = {}
        buckets = plan_buckets([[_bytes_of(part)] for part in flat], self.bucket_bytes)
        for n, places in enumerate(buckets):
            given = [flat[m] for m in places]
            of_bucket = f"{key}, bucket {n}" if n else key
            sums = self._sum(of_bucket, given, [of_parts[m] for m in places], **how)
            totals |= dict(zip(places, sums, strict=True))
        whole = iter(
            with_unique_rows(totals[n]) if has_unique_rows(part) else totals[n]
            for n, part in enumerate(flat)
        )
        return [join_rows([next(whole) for _ in row]) for row in parts]

    def _counted(self, what: str) -> str:
        """Names an exchange; those of one name match by their order in a step."""
        self._counts[what] += 1
        return f"{what}, sum {self._counts[what]}"

    def _sum(
        self, key: str, tensors: Sequence[Any], names: Sequence[str], **how: Any
    ) -> list[Any]:
        if self.only_records:
            return list(tensors)
        are_sparse = [isinstance(tensor, tf.IndexedSlices) for tensor in tensors]
        specs = [
            tf.TensorSpec([None, *own.shape[1:]] if is_sparse else own.shape, own.dtype)
            for tensor, is_sparse in zip(tensors, are_sparse, strict=True)
            for own in _dense([tensor])
        ]

        def run(*flat: Any) -> list[Any]:
            given = _sparse(flat, are_sparse)
            return _dense(self.group.sum(given, names=names, **how))

        return _sparse(self.apart(key, run, _dense(tensors), specs), are_sparse)

    def apart(
        self,
        key: str,
        run: Callable[..., list[Any]],
        flat: Sequence[Any],
        specs: Sequence[tf.TensorSpec],
    ) -> list[Any]:
        """Runs an exchange of dense tensors in a function that is not inlined.

        Several steps in one call are a loop. In a separate function an exchange has
        neither the loop's frame nor its iteration, and so matches that of an idle rank.
        """
        if tf.executing_eagerly():
            return list(run(*flat))
        of_function = key, str(specs)
        if of_function not in self._functions:
            in_any_order = getattr(self.group, "in_any_order", _in_order)
            with tf.init_scope(), in_any_order(self) as is_independent:
                made = tf.function(
                    run,
                    input_signature=specs,
                    autograph=False,
                    experimental_attributes=_APART,
                )
                traced = made.get_concrete_function(), is_independent
                self._functions[of_function] = traced
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        function, is_independent = self._functions[of_function]
        results = list(function(*flat))
        if is_independent:
            run_independently(graph, graph.get_operations()[known:])
        return results

    def group_of(self, what: str) -> Any:
        """Returns a group for a step's exchanges, which are given no names."""
        return StepGroup(self, what)

    def idle_step(self) -> Any:
        """Returns the functions of a step without a batch: report, and take part.

        None if no step was built.
        """
        if self._recorded and self._idle is None:

            def report() -> list[tf.Tensor]:
                self.count_anew()
                return self.report(0, 0, has_batch=False)

            def take_part(weight: tf.Tensor, _: tf.Tensor) -> None:
                self.count_anew()  # It may be traced twice.
                for key, replayed in list(self._recorded.items()):
                    if callable(replayed):
                        replayed(weight)
                    else:
                        self._sum_layer(str(key), zeros_of(replayed))

            functions: list[Callable[..., Any]] = [report, take_part]
            # A trace meets the other ranks in branches that are not taken, too.
            if not self._is_eager:
                functions = [tf.function(one, autograph=False) for one in functions]
            self._idle = tuple(map(self.group.bounded, functions))
        return self._idle


def _cast(grad: Any, dtype: tf.DType) -> Any:
    return map_values(lambda values: tf.cast(values, dtype), grad)


class StepGroup:
    """A group whose exchanges in a step are functions that are not inlined."""

    def __init__(self, exchanges: Exchanges, what: str = "") -> None:
        """Takes the name of its sums, where callers give them none of their own."""
        self._exchanges, self._group, self._what = exchanges, exchanges.group, what
        for name in _SAME:
            if hasattr(self._group, name):
                setattr(self, name, getattr(self._group, name))
        if hasattr(self._group, "all_to_all"):
            self.all_to_all = self._all_to_all

    def sum(self, tensors: Sequence[Any], *, names: Sequence[str] = ()) -> list[Any]:
        """Adds tensors, dense or sparse, over the ranks."""
        if tf.executing_eagerly():
            return self._group.sum(tensors, names=names)
        return self._exchanges.sum(self._what or str(names), tensors, names)

    def reduce_scatter(self, parts: Sequence[Any], *, name: str) -> Any:
        """Adds each rank's part over the ranks."""
        if self._exchanges.only_records:
            return parts[self._group.rank]

        def run(*parts: Any) -> list[Any]:
            return [reduce_scatter(self._group, parts, name=name)]

        return self._run(name, run, parts)[0]

    def all_gather(self, own: Any, lengths: Sequence[int], *, name: str) -> list[Any]:
        """Gives all ranks every rank's tensor."""
        if self._exchanges.only_records:
            return [tf.zeros([length], own.dtype) for length in lengths]

        def run(own: Any) -> list[Any]:
            return all_gather(self._group, own, lengths, name=name)

        return self._run(name, run, [own])

    def _all_to_all(self, rows: Any, *, name: str) -> Any:
        """Sends row r to rank r."""
        if self._exchanges.only_records:
            return rows

        def run(rows: Any) -> list[Any]:
            return [all_to_all(self._group, rows, name=name)]

        return self._run(name, run, [rows])[0]

    def _run(
        self, name: str, run: Callable[..., list[Any]], tensors: Sequence[Any]
    ) -> list[Any]:
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        return self._exchanges.apart(f"{self._what}, {name}", run, tensors, specs)


def _in_order(_: Any) -> AbstractContextManager[bool]:
    """Says that a group's exchanges begin in one order."""
    return nullcontext(enter_result=False)


def _dense(tensors: Sequence[Any]) -> list[Any]:
    """Lists tensors, of sparse ones the values and indices."""
    parts = [
        (own.values, own.indices) if isinstance(own, tf.IndexedSlices) else (own,)
        for own in tensors
    ]
    return [part for row in parts for part in row]


def _bytes_of(tensor: Any) -> int:
    """Returns the size of a tensor; 0 if it is unknown, as for a sparse one."""
    if isinstance(tensor, tf.IndexedSlices):
        return 0
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)


def _sparse(flat: Sequence[Any], are_sparse: Sequence[bool]) -> list[Any]:
    """Returns tensors from their values and, of sparse ones, indices."""
    parts = iter(flat)
    return [
        tf.IndexedSlices(next(parts), next(parts)) if is_sparse else next(parts)
        for is_sparse in are_sparse
    ]


def _check_all_or_none(active: tf.Tensor, size: int) -> tf.Operation:
    """Fails if some, but not all, of the ranks that share data have no batch left."""
    says = (
        "TowerModel: with data='shared' all ranks must get the same batches; the "
        "data of some ranks has ended. Give all ranks the same data, or use "
        "data='own'. Ranks with a batch:"
    )
    good = tf.reduce_any(tf.equal(active, [0.0, float(size)]))
    return tf.debugging.Assert(good, [says, active])


def _check_same(checksums: tf.Tensor) -> tf.Operation:
    """Fails if ranks that must have equal batches have different ones."""
    some = tf.boolean_mask(checksums, checksums > 0)
    same = tf.reduce_all(tf.equal(some, some[:1]))
    says = (
        "TowerModel: with data='shared' all ranks must get the same batches; the first "
        "ones of an epoch differ. Give all ranks one order and one seed, or use "
        "data='own'. Checksums by rank:"
    )
    return tf.debugging.Assert(same, [says, checksums], summarize=1 << 10)
