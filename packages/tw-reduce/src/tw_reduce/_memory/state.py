"""The memory of a reducer, in variables on the towers' devices."""

import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import tensorflow as tf

from tw_core.internal import (
    builds_session_graph,
    check_kind,
    check_list,
    check_nested,
    check_text,
    check_whole_number,
    plain_name,
    read_gradients,
    tf_variables,
    without_autograph,
)
from tw_core.ranks import RankGroup
from tw_reduce._checks import check_devices, check_reducer
from tw_reduce._choosing import all_reduce
from tw_reduce._memory.carried import (
    FEWEST_IN_PARTS,
    Carried,
    Sent,
    are_finite,
    marked,
)
from tw_reduce._memory.kept import Kept, SavedCount, tell_of_new_memory
from tw_reduce._memory.protocol import States, check_stateful
from tw_reduce._reducer import Reducer, TowerTensors, check_reduced, is_stateful

_LOG = logging.getLogger("tw_reduce")


@dataclass(frozen=True)
class Reduced:
    """The sums of one step, and the memory if its update is made."""

    sums: list[list[Any]]  # [K][N]; None where no tower has a gradient
    is_finite: tf.Tensor  # bool scalar: whether all towers' gradients were
    places: tuple[int, ...]  # [M] of the variables whose gradients are dense
    states: States  # [K][M], new


class ReducerState(
    tf.Module,  # type: ignore[misc] # TensorFlow is untyped
):
    """Keeps a reducer's memory, for every tower and variable.

    It is a reducer itself, of means inside ``mean``: called with gradients, it returns
    their sums and updates its memory, unless a gradient is infinite or NaN, in which
    case a sum is NaN. ``tf.train.Checkpoint`` and savers of session graphs save it.
    When ``tf.train.Checkpoint`` restores another number of towers, the memory is
    divided by the reducer's method ``resize(states, count)``, or starts from zero with
    a line in the log. Savers of session graphs refuse another number of towers.

    >>> import tensorflow as tf
    >>> from tw_reduce import compression
    >>> variables = [[tf.Variable(tf.zeros([64, 64]))] for _ in range(2)]
    >>> reduce = ReducerState(compression.power_sgd(rank=1), variables)
    >>> [[own], _] = reduce([[tf.ones([64, 64])], [2.0 * tf.ones([64, 64])]])
    >>> round(float(own[0, 0]), 4)
    3.0

    Attributes:
      takes_shares: True: for a mean, gradients are multiplied first.
      elementwise: False: it gets gradients in their variables' shapes.
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
        group: RankGroup | None = None,
        name: str = "reducer",
    ) -> None:
        """Makes the holder; its variables are made at the first step.

        Args:
          reducer: a ``StatefulReducer``.
          variables: [K][N] trainable variables of K towers, in one order.
          add: adds over the towers, as ``all_reduce`` does, or over those of other
            processes too, as ``tw_ranks.sum_across`` does with a group bound; keeps
            ``tf.IndexedSlices`` sparse. None for ``all_reduce(devices)``, and then for
            the sum of ``group``.
          devices: [K] of the towers' memory; None for their first variables' devices.
          group: the ranks over which it adds. If they are more than two, of one tower
            each, and a ``tw_core.ranks.AllToAllGroup``, they exchange parts of what
            ``top_k``, ``sign`` and ``int8`` compress, in which all ranks must take
            part: what each sends does not grow with their number. None: ranks get all
            that the others compress.
          name: of the variables' scope.

        Raises:
          TypeError: something that is not such a reducer, function or list.
          ValueError: no tower, unequal numbers of variables or towers.
        """
        super().__init__(name=None)
        self._reducer = check_stateful(reducer=reducer)
        self._towers = _Towers.read(variables, devices)
        if add is not None:
            check_reducer(add=add)
        check_text(name=name)
        if group is not None:
            check_kind(RankGroup, "a group of ranks", group=group)
        self._group, self._has_logged = group, False
        self._add = add or _sum_over(self._towers.devices, group)
        self._scope = name
        self._memories: dict[str, Kept] = {}  # by place; only those with state
        self._made: frozenset[int] = frozenset()  # places, also without state
        self._sent = Sent()
        self._tell = cache(tell_of_new_memory)  # once for all variables

    @property
    def num_variables(self) -> int:
        """N, the number of each tower's variables."""
        return len(self._towers.variables[0])

    @property
    def devices(self) -> list[str]:
        """[K] the towers' devices."""
        return list(self._towers.devices)

    @without_autograph
    def __call__(self, grads: TowerTensors, *, if_: Any = True) -> list[list[Any]]:
        """Reduces, and updates the memory.

        Args:
          grads: [K][N] gradients; those of a variable may be None in all towers.
          if_: a bool scalar, whether to update the memory if all gradients are finite.

        Returns:
          [K][N] sums; None for a variable without gradients.

        Raises:
          ValueError: as ``update``.
          TypeError: as ``update``.
        """
        reduced = self.update(grads)
        condition = reduced.is_finite
        if if_ is not True:
            condition = tf.logical_and(condition, if_)
        done = self.commit(reduced, if_=condition)
        if not builds_session_graph():
            return reduced.sums
        with tf.control_dependencies(done):
            passed: list[list[Any]] = tf.nest.map_structure(
                _identity, reduced.sums, expand_composites=True
            )
            return passed

    @without_autograph
    def update(self, grads: TowerTensors, *, add: Reducer | None = None) -> Reduced:
        """Reduces, and returns the new memory, for ``commit``.

        Args:
          grads: [K][N], as for a call.
          add: adds in this step, in place of the holder's.

        Returns:
          Sums, and new states. Sparse gradients are added unchanged, and have no
          memory.

        Raises:
          ValueError: other numbers of towers or gradients than of variables, a gradient
            of another shape than its variable, or lists of another shape from the
            reducer.
          TypeError: something that is not a gradient, or ``add`` is not a function.
        """
        if add is not None:
            check_reducer(add=add)
        used = self._towers.places(grads)
        read = read_gradients([[tower[n] for n in used] for tower in grads])
        are_sparse = [
            any(isinstance(own, tf.IndexedSlices) for own in column)
            for column in zip(*read, strict=True)
        ]
        places = [n for n, sparse in zip(used, are_sparse, strict=True) if not sparse]
        beside = [n for n, sparse in zip(used, are_sparse, strict=True) if sparse]
        towers = [dict(zip(used, own, strict=True)) for own in read]
        dense = self._towers.shaped(
            [[own[n] for n in places] for own in towers], places
        )
        self._sent, group = self._count(read, add)
        rows = [[own[n] for n in beside] for own in towers]
        carried = Carried(add or self._add, dense, rows, self._sent, group)
        states = self._states(places)
        with tf.name_scope(self._scope):
            sums, new = self._reducer.update(dense, states, carried)
            check_reduced(sums, dense)
            check_reduced(new, dense)
            others, is_finite = carried.finish()
            # Where an approximation overflowed, errors are not finite either. All
            # towers, on all ranks, have the same sums.
            kept = zip(sums[0], states[0], strict=True)
            approximate = [own for own, state in kept if tf.nest.flatten(state)]
            is_finite = tf.logical_and(is_finite, are_finite(approximate))
            sums = marked(sums, is_finite)
        self._log_once()
        order = [*places, *beside]
        both = zip(sums, others, strict=True)
        found = [dict(zip(order, [*own, *more], strict=True)) for own, more in both]
        every = range(self.num_variables)
        results = [[own.get(n) for n in every] for own in found]
        return Reduced(results, is_finite, tuple(places), new)

    @without_autograph
    def commit(self, reduced: Reduced, *, if_: Any = None) -> list[Any]:
        """Updates the memory; call it where the update is made.

        Args:
          reduced: the result of ``update``.
          if_: a bool scalar, whether to update it; None to do so if all gradients were
            finite, True in a branch that decides that.

        Returns:
          Tensors that depend on the update, for use in a session graph.

        Raises:
          TypeError: ``reduced`` is not a result of ``update``.
          ValueError: the reducer's new states are not nested as its first ones.
        """
        if not isinstance(reduced, Reduced):
            raise TypeError(
                f"reduced must be a result of update(grads); got {reduced!r:.80}."
            )
        pairs = [
            pair
            for m, n in enumerate(reduced.places)
            if (memory := self._memories.get(str(n))) is not None
            for pair in memory.pairs([own[m] for own in reduced.states])
        ]
        if not pairs:
            return []

        def assign() -> tf.Tensor:
            done = [own.assign(value, read_value=False) for own, value in pairs]
            with tf.control_dependencies([own for own in done if own is not None]):
                return tf.constant(True)

        if if_ is True:
            return [assign()]
        condition = reduced.is_finite if if_ is None else if_
        return [tf.cond(condition, assign, lambda: tf.constant(False))]

    def of(self, variables: Sequence[Any]) -> Callable[..., list[list[Any]]]:
        """Returns the reducer for gradients of some variables.

        Args:
          variables: [M] of tower 0's, in any order; the other variables have no
            gradient in such a step.

        Returns:
          A reducer of [K][M] gradients, which takes ``if_`` as a call does.

        Raises:
          TypeError: something that is not a list of variables.
          ValueError: a variable that is not among tower 0's.
        """
        check_list(variables=variables, of="variables", empty=True)
        known = {id(own): n for n, own in enumerate(self._towers.variables[0])}
        wanted = tf_variables(variables)
        if others := [plain_name(own) for own in wanted if id(own) not in known]:
            raise ValueError(f"variables must be among tower 0's; got also {others}.")
        return _Part(self, tuple(known[id(own)] for own in wanted))

    def reset(self) -> None:
        """Resets the memory to its initial values, outside of session graphs."""
        firsts = self._first_states()
        for n, memory in self._memories.items():
            for variable, value in memory.pairs([own[int(n)] for own in firsts]):
                variable.assign(value)

    def build(self) -> None:
        """Makes its variables now, including those for sparse gradients."""
        self._make([n for n in range(self.num_variables) if n not in self._made])

    def save_own_variables(self, store: MutableMapping[str, Any]) -> None:
        """Stores the memory as arrays, outside of session graphs.

        Args:
          store: gets [K, ...] arrays by name.

        Raises:
          TypeError: ``store`` is not a dictionary.
        """
        check_kind(MutableMapping, "a dictionary", store=store)
        for n, memory in self._memories.items():
            for name, leaf in memory.stacked().items():
                store[f"{n}/{name}"] = leaf.numpy()

    def load_own_variables(
        self,
        store: MutableMapping[str, Any],
        *,
        total: int | None = None,
        first: int = 0,
    ) -> None:
        """Loads arrays that ``save_own_variables`` stored, outside of session graphs.

        Args:
          store: from any number of towers; their memory is divided, or starts from zero
            with a line in the log.
          total: the number of memories that it is divided among; None for K.
          first: the number of tower 0's memory, after those of other processes.

        Raises:
          TypeError: an argument of another type.
          ValueError: fewer than K memories from ``first`` on.
        """
        check_kind(MutableMapping, "a dictionary", store=store)
        count = len(self._towers.variables)
        check_whole_number(first=first, at_least=0)
        if total is not None:
            check_whole_number(total=total, at_least=first + count)
        places = sorted({int(name.partition("/")[0]) for name in store})
        self._make([n for n in places if n not in self._made])
        for n in places:
            prefix = f"{n}/"
            own = {
                name.removeprefix(prefix): tf.constant(array)
                for name, array in store.items()
                if name.startswith(prefix)
            }
            self._memories[str(n)].restore(own, total=total, first=first)

    def describe(self, *, ranks: int | None = None) -> str:
        """Describes what a tower sends per step, as last traced.

        Tensors whose size is known only at run time are counted, not measured.

        Args:
          ranks: None, or a number of ranks: how much each would send to the others by
            TensorFlow's collectives, and how much without compression; with 600 bytes
            for each message.

        Raises:
          TypeError: ``ranks`` is not a whole number.
          ValueError: ``ranks`` is below 1.
        """
        if ranks is not None:
            check_whole_number(ranks=ranks, at_least=1)
        return self._sent.describe(ranks)

    def _count(self, grads: TowerTensors, add: Any) -> tuple[Sent, RankGroup | None]:
        """Returns the count of a step, and the group if its ranks exchange parts."""
        group: Any = self._group if add is None and len(grads) == 1 else None
        cuts = hasattr(group, "all_to_all")
        sent = Sent(grads[0], num_towers=len(grads), cuts=cuts)
        return sent, group if cuts and group.size >= FEWEST_IN_PARTS else None

    def _log_once(self) -> None:
        ranks = 1 if self._group is None else self._group.size
        if ranks > 1 and not self._has_logged:
            self._has_logged = True
            _LOG.info("A rank sends %s in a step.", self.describe(ranks=ranks))

    def _states(self, places: Sequence[int]) -> States:
        if new := [n for n in places if n not in self._made]:
            with tf.init_scope():
                self._make(new)
        memories = [self._memories.get(str(n)) for n in places]
        return [
            [() if own is None else own.read(k) for own in memories]
            for k in range(len(self._towers.variables))
        ]

    def _first_states(self) -> list[Sequence[Any]]:
        firsts = self._towers.call(self._reducer.init)
        if not all(isinstance(own, list | tuple) for own in firsts):
            raise TypeError(
                "init must return a list with one state per variable, () for none; got "
                f"{firsts[0]!r:.80}."
            )
        if others := [len(own) for own in firsts if len(own) != self.num_variables]:
            raise ValueError(
                "init must return one state per variable, () for none: "
                f"{self.num_variables}; got {others[0]}."
            )
        return firsts

    def _make(self, places: Sequence[int]) -> None:
        def make(k: int, n: int, value: Any) -> tf.Variable:
            return tf.compat.v1.Variable(
                value,
                trainable=False,
                name=f"{self._scope}/tower{k}/{n}",
                use_resource=True,
            )

        firsts = self._first_states()
        if builds_session_graph() and not self._made:
            SavedCount.add(self._scope, len(firsts))
        self._made |= set(places)
        for n in places:
            if tf.nest.flatten(firsts[0][n]):
                nests = []
                for k, (own, device) in enumerate(
                    zip(firsts, self._towers.devices, strict=True)
                ):
                    with tf.device(device or None):
                        named = partial(make, k, n)
                        nests.append(tf.nest.map_structure(named, own[n]))
                # A checkpoint that waits for this one restores it here.
                self._memories[str(n)] = Kept(self._reducer, nests, self._tell)


@dataclass(frozen=True, eq=False)
class _Towers:
    """The towers' variables, held so that checkpoints do not track them."""

    variables: Sequence[Sequence[tf.Variable]]
    devices: Sequence[str]

    @classmethod
    def read(
        cls, variables: Sequence[Sequence[Any]], devices: Sequence[str] | None
    ) -> "_Towers":
        check_nested(variables=variables, of="variables")
        towers = [tf_variables(own) for own in variables]
        if not towers or len({len(own) for own in towers}) > 1:
            raise ValueError(
                "variables must be one list of variables per tower, all of one length; "
                f"got lists of lengths {[len(own) for own in towers]}."
            )
        if devices is None:
            return cls(towers, [own[0].device if own else "" for own in towers])
        return cls(towers, check_devices(devices, num_towers=len(towers)))

    def call(self, init: Any) -> list[Sequence[Any]]:
        """Calls a function with each tower's variables, on its device."""
        results = []
        for own, device in zip(self.variables, self.devices, strict=True):
            with tf.device(device or None):
                results.append(init(own))
        return results

    def places(self, grads: TowerTensors) -> list[int]:
        """Returns the places of the variables that have a gradient."""
        check_nested(grads=grads, of="gradients")
        wanted = [len(own) for own in self.variables]
        if [len(tower) for tower in grads] != wanted:
            raise ValueError(
                f"grads must hold, for each tower, one gradient per variable: lists of "
                f"lengths {wanted}; got {[len(tower) for tower in grads]}."
            )
        columns = zip(*grads, strict=True)
        return [n for n, own in enumerate(columns) if any(g is not None for g in own)]

    def shaped(
        self, grads: TowerTensors, places: Sequence[int]
    ) -> list[list[tf.Tensor]]:
        """Gives gradients the static shapes of their variables."""
        shapes = [self.variables[0][n].shape for n in places]
        if others := [
            f"{n} ({own.shape}, its variable {shape})"
            for n, own, shape in zip(places, grads[0], shapes, strict=True)
            if not own.shape.is_compatible_with(shape)
        ]:
            raise ValueError(
                "grads must be in their variables' shapes; got others at positions "
                f"{', '.join(others)}. Do not pass this reducer packs."
            )
        return [
            [
                own if own.shape.is_fully_defined() else _with_shape(own, shape)
                for own, shape in zip(tower, shapes, strict=True)
            ]
            for tower in grads
        ]


@dataclass(frozen=True, eq=False)
class _Part:
    """A holder's reducer of gradients of some of its variables."""

    state: ReducerState
    places: tuple[int, ...]
    takes_shares = True

    def __call__(self, grads: TowerTensors, *, if_: Any = True) -> list[list[Any]]:
        """Reduces, and updates the memory."""
        every = range(self.state.num_variables)
        rows = [dict(zip(self.places, own, strict=True)) for own in grads]
        sums = self.state([[own.get(n) for n in every] for own in rows], if_=if_)
        return [[own[n] for n in self.places] for own in sums]


def with_memory(
    reducer: Any, variables: Sequence[Sequence[Any]], devices: Sequence[str]
) -> Any:
    """Returns a holder for a reducer with memory; any other reducer as it is.

    ``variables`` are [K][N]; a reducer without memory may be None.
    """
    if not is_stateful(reducer) or isinstance(reducer, ReducerState):
        return reducer
    return ReducerState(reducer, variables, devices=devices)


def _sum_over(devices: Sequence[str], group: RankGroup | None) -> Reducer:
    """Returns the sum over towers and, of a group, over its ranks."""
    add = all_reduce(devices)
    if group is None:
        return add

    def add_over_ranks(rows: TowerTensors) -> list[list[Any]]:
        sums = rows[0] if len(rows) == 1 else add(rows)[0]
        totals = group.sum(sums)
        return [totals for _ in rows]

    return add_over_ranks


def _with_shape(grad: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    with tf.device(grad.device):
        return tf.ensure_shape(grad, shape)


def _identity(total: Any) -> Any:
    return None if total is None else tf.identity(total)
