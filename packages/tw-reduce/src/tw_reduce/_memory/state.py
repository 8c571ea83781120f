"""The memory of a reducer, in variables on the towers' devices."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    builds_session_graph,
    check_function,
    check_nested,
    read_gradients,
    tf_variables,
    values_of,
    without_autograph,
)
from tw_reduce._checks import check_devices, check_reduced
from tw_reduce._choosing import all_reduce
from tw_reduce._memory.protocol import StatefulReducer, States, check_stateful
from tw_reduce._reducer import Reducer, Tensorlike, TowerTensors

_LOG = logging.getLogger("tw_reduce")


@dataclass(frozen=True)
class Reduced:
    """The sums of one step, and what is remembered if its update is made."""

    sums: list[list[Any]]  # [K][N]; None where no tower has a gradient
    is_finite: tf.Tensor  # bool scalar: whether all towers' gradients were
    places: tuple[int, ...]  # [M] the variables of which something is remembered
    states: States  # [K][M], new


class ReducerState(
    tf.Module,  # type: ignore[misc] # TensorFlow is untyped
):
    """Keeps what a reducer remembers, for every tower and variable.

    It is a reducer itself, of means where ``mean`` is around it: called with gradients
    it returns their sums, and remembers unless one of them is infinite or NaN, in which
    case a sum is NaN. ``tf.train.Checkpoint`` saves it, and savers of session graphs.

    >>> import tensorflow as tf
    >>> from tw_reduce import compression
    >>> variables = [[tf.Variable(tf.zeros([64, 64]))] for _ in range(2)]
    >>> reduce = ReducerState(compression.power_sgd(rank=1), variables)
    >>> [[own], _] = reduce([[tf.ones([64, 64])], [2.0 * tf.ones([64, 64])]])
    >>> round(float(own[0, 0]), 4)
    3.0

    Attributes:
      takes_shares: True: for a mean, gradients are multiplied before.
    """

    takes_shares = True
    elementwise = False

    def __init__(
        self,
        reducer: Any,
        variables: Sequence[Sequence[Any]],
        *,
        add: Reducer | None = None,
        devices: Sequence[str] | None = None,
        name: str = "reducer",
    ) -> None:
        """Makes the holder; its variables are made at the first step.

        Args:
          reducer: a ``StatefulReducer``.
          variables: [K][N] trainable variables of K towers, in one order.
          add: adds over the towers, as ``all_reduce`` does, or over those of other
            processes too, as ``tw_ranks.sum_across`` does with a group bound; keeps
            ``tf.IndexedSlices`` as such. None for ``all_reduce(devices)``.
          devices: [K] where the towers remember; None for their first variables'.
          name: of the variables' scope.

        Raises:
          TypeError: something that is not such a reducer, function or list.
          ValueError: no tower, unequal numbers of variables or towers.
        """
        super().__init__(name=None)
        self._reducer = check_stateful(reducer=reducer)
        check_nested(variables=variables, of="variables")
        self._of_towers = [tf_variables(own) for own in variables]
        if not self._of_towers or len({len(own) for own in self._of_towers}) > 1:
            raise ValueError(
                "variables must be one list of variables per tower, all of one length; "
                f"got lists of lengths {[len(own) for own in self._of_towers]}."
            )
        if devices is None:
            devices = [own[0].device if own else "" for own in self._of_towers]
        else:
            check_devices(devices, num_towers=len(self._of_towers))
        self._devices = list(devices)
        if add is not None:
            check_function(add=add)
        self._add = add or all_reduce(self._devices)
        self._scope = name
        self._memories: dict[str, _Memory] = {}  # by place; those with state
        self._made: frozenset[int] = frozenset()  # the others have none
        self._sent = _Sent()

    @property
    def devices(self) -> list[str]:
        """[K] the towers' devices."""
        return list(self._devices)

    @without_autograph
    def __call__(self, grads: TowerTensors) -> list[list[Any]]:
        """Reduces, and remembers.

        Args:
          grads: [K][N] gradients, of which those of a variable may all be None.

        Returns:
          [K][N] sums; None for a variable without gradients.

        Raises:
          ValueError: as ``update``.
          TypeError: as ``update``.
        """
        reduced = self.update(grads)
        done = self.commit(reduced)
        if not builds_session_graph():
            return reduced.sums
        with tf.control_dependencies(done):
            return [
                [total if total is None else _identity(total) for total in tower]
                for tower in reduced.sums
            ]

    @without_autograph
    def update(self, grads: TowerTensors) -> Reduced:
        """Reduces, and returns what is to be remembered, for ``commit``.

        Args:
          grads: [K][N], as for a call.

        Returns:
          Sums, and new states. Sparse gradients are added as they are; nothing is
          remembered of them.

        Raises:
          ValueError: other numbers of towers or gradients than of variables, or what
            the reducer returns has another shape.
          TypeError: something that is not a gradient.
        """
        used = self._places(grads)
        read = read_gradients([[tower[n] for n in used] for tower in grads])
        dense = [
            m
            for m in range(len(used))
            if not any(isinstance(tower[m], tf.IndexedSlices) for tower in read)
        ]
        places = [used[m] for m in dense]
        states = self._states(places)
        own = [[tower[m] for m in dense] for tower in read]
        beside = [
            [tower[m] for m in range(len(used)) if m not in dense] for tower in read
        ]
        self._sent = _Sent()
        carried = _Carried(self._add, own, beside, self._sent)
        with tf.name_scope(self._scope):
            sums, new = self._reducer.update(own, states, carried.add)
            check_reduced(sums, own)
            others, is_finite = carried.finish()
            sums = _marked(sums, is_finite)
        places_beside = [n for n in used if n not in places]
        results = []
        for tower in (dict(zip(places, row, strict=True)) for row in sums):
            results.append(tower)
        for tower, row in zip(results, others, strict=True):
            tower.update(zip(places_beside, row, strict=True))
        every = range(len(grads[0]))
        return Reduced(
            [[tower.get(n) for n in every] for tower in results],
            is_finite,
            tuple(places),
            new,
        )

    @without_autograph
    def commit(self, reduced: Reduced, *, if_: Any = None) -> list[Any]:
        """Remembers, where the update is made.

        Args:
          reduced: of ``update``.
          if_: a bool scalar, whether to; None for whether all gradients were finite.

        Returns:
          In a session graph, ops; else an empty list.
        """
        pairs = [
            pair
            for m, n in enumerate(reduced.places)
            if (memory := self._memories.get(str(n))) is not None
            for own, states in zip(memory.kept, reduced.states, strict=True)
            for pair in zip(own, tf.nest.flatten(states[m]), strict=True)
        ]
        if not pairs:
            return []

        def assign() -> tf.Tensor:
            done = [v.assign(value, read_value=False) for v, value in pairs]
            with tf.control_dependencies([own for own in done if own is not None]):
                return tf.constant(True)

        condition = reduced.is_finite if if_ is None else if_
        done = tf.cond(condition, assign, lambda: tf.constant(False))
        return [done] if builds_session_graph() else []

    def describe(self) -> str:
        """Says what a tower sends in a step, as the last one was traced.

        Of tensors whose size only the run knows, the number is told.
        """
        return self._sent.describe()

    def _places(self, grads: TowerTensors) -> list[int]:
        check_nested(grads=grads, of="gradients")
        wanted = [len(own) for own in self._of_towers]
        if [len(tower) for tower in grads] != wanted:
            raise ValueError(
                f"grads must hold, for each tower, one for each variable: lists of "
                f"lengths {wanted}; got {[len(tower) for tower in grads]}."
            )
        columns = zip(*grads, strict=True)
        return [n for n, own in enumerate(columns) if any(g is not None for g in own)]

    def _states(self, places: Sequence[int]) -> States:
        self._make([n for n in places if n not in self._made])
        memories = [self._memories.get(str(n)) for n in places]
        return [
            [() if own is None else own.read(k) for own in memories]
            for k in range(len(self._of_towers))
        ]

    def _make(self, places: Sequence[int]) -> None:
        if not places:
            return
        made: list[list[Any]] = [[] for _ in places]  # [M][K] nests
        with tf.init_scope():
            for k, own in enumerate(self._of_towers):
                with tf.device(self._devices[k] or None):
                    nests = self._reducer.init(own)
                    for of_towers, n in zip(made, places, strict=True):
                        named = partial(
                            tf.Variable,
                            trainable=False,
                            name=f"{self._scope}/tower{k}/{n}",
                        )
                        of_towers.append(tf.nest.map_structure(named, nests[n]))
        self._made |= set(places)
        # Setting the attribute has a checkpoint that waits give them its values.
        self._memories = {
            **self._memories,
            **{
                str(n): _Memory(self._reducer, of_towers)
                for n, of_towers in zip(places, made, strict=True)
                if tf.nest.flatten(of_towers)
            },
        }


class _Memory(
    tf.Module,  # type: ignore[misc] # TensorFlow is untyped
):
    """What all towers remember of one variable, saved for any number of towers."""

    def __init__(self, reducer: StatefulReducer, nests: Sequence[Any]) -> None:
        super().__init__(name="memory")
        self._resize: Callable[..., Any] | None = getattr(reducer, "resize", None)
        self._nest = tf.nest.map_structure(lambda _: None, nests[0])
        self.kept = [tf.nest.flatten(own) for own in nests]  # [K][leaves]

    def read(self, tower: int) -> Any:
        """Returns what a tower remembers, in its nest."""
        return self._packed([own.read_value() for own in self.kept[tower]])

    def _packed(self, leaves: Sequence[Any]) -> Any:
        return tf.nest.pack_sequence_as(self._nest, list(leaves))

    def _trackable_children(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {}

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        columns = zip(*self.kept, strict=True)
        return {f"leaf_{i}": tf.stack(list(own)) for i, own in enumerate(columns)}

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> tf.Operation:
        leaves = [restored[f"leaf_{i}"] for i in range(len(self.kept[0]))]
        count = leaves[0].shape[0]
        towers = list(zip(*map(tf.unstack, leaves), strict=True))
        if count != len(self.kept):
            if self._resize is None:
                _LOG.warning(
                    "A reducer's memory of %d towers is not that of %d: it begins anew.",
                    *(count, len(self.kept)),
                )
                return tf.no_op()
            resized = self._resize(list(map(self._packed, towers)), len(self.kept))
            towers = [tuple(tf.nest.flatten(own)) for own in resized]
        done = [
            variable.assign(value, read_value=False)
            for own, values in zip(self.kept, towers, strict=True)
            for variable, value in zip(own, values, strict=True)
        ]
        return tf.group(*[own for own in done if own is not None])


class _Sent:
    """Counts what tower 0 sends in a step, as it is traced."""

    def __init__(self) -> None:
        self.num_bytes = self.num_gradient_bytes = self.num_unknown = self.num_sums = 0

    def note(self, tensors: Sequence[Tensorlike]) -> None:
        self.num_sums += 1
        for leaf in tf.nest.flatten(list(tensors), expand_composites=True):
            elements = leaf.shape.num_elements()
            self.num_unknown += elements is None
            self.num_bytes += (elements or 0) * leaf.dtype.size

    def describe(self) -> str:
        unknown = f" and {self.num_unknown} tensors" if self.num_unknown else ""
        return (
            f"{self.num_bytes:,} bytes{unknown} in {self.num_sums} sums, for gradients "
            f"of {self.num_gradient_bytes:,} bytes"
        )


class _Carried:
    """Has the first sum of a step carry what goes beside it."""

    def __init__(
        self,
        add: Reducer,
        dense: TowerTensors,
        beside: TowerTensors,
        sent: _Sent,
    ) -> None:
        self._reduce, self._sent = add, sent
        self._beside = [
            [*own, _number_of_nonfinite([*tower, *own])]
            for tower, own in zip(dense, beside, strict=True)
        ]
        self._sums: list[list[Tensorlike]] | None = None
        sent.num_gradient_bytes = sum(
            (own.shape.num_elements() or 0) * own.dtype.size
            for own in (values_of(grad) for grad in [*dense[0], *beside[0]])
        )

    def add(self, tensors: TowerTensors) -> list[list[Tensorlike]]:
        """Adds what a reducer sends."""
        if self._sums is not None:
            return self._added(tensors)
        count = len(tensors[0])
        sums = self._added(
            [
                [*own, *more]
                for own, more in zip(tensors, self._beside, strict=True)
            ]
        )
        self._sums = [list(row[count:]) for row in sums]
        return [list(row[:count]) for row in sums]

    def finish(self) -> tuple[list[list[Tensorlike]], tf.Tensor]:
        """Returns the sums of sparse gradients, and if all towers' are finite."""
        if self._sums is None:
            self._sums = self._added(self._beside)
        *_, count = self._sums[0]
        return [row[:-1] for row in self._sums], tf.equal(count, 0.0)

    def _added(self, tensors: TowerTensors) -> list[list[Tensorlike]]:
        self._sent.note(tensors[0])
        return self._reduce(tensors)


def _number_of_nonfinite(grads: Sequence[Tensorlike]) -> tf.Tensor:
    """Counts gradients whose sum is infinite or NaN, on their tower's device."""
    flags = [tf.zeros([])]
    for grad in map(values_of, grads):
        with tf.device(grad.device):
            total = tf.reduce_sum(tf.cast(grad, tf.float32))
            flags.append(tf.cast(tf.logical_not(tf.math.is_finite(total)), tf.float32))
    with tf.device(flags[-1].device):
        return tf.add_n(flags)


def _marked(sums: TowerTensors, is_finite: tf.Tensor) -> list[list[Tensorlike]]:
    """Makes each tower's smallest sum NaN where a gradient was not finite."""
    marked = [list(own) for own in sums]
    for own in marked:
        if own:
            m = min(range(len(own)), key=lambda m: own[m].shape.num_elements() or 0)
            with tf.device(own[m].device):
                nan = tf.where(is_finite, 0.0, float("nan"))
                own[m] += tf.cast(nan, own[m].dtype)
    return marked


def _identity(total: Tensorlike) -> Tensorlike:
    return tf.nest.map_structure(tf.identity, total, expand_composites=True)
