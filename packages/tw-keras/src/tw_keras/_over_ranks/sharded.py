"""Optimizers whose state is in shards, each on one tower of one rank.

The compiled optimizer is the one that applies, with slots of this rank's shards alone.
For files it becomes, while they are written or read, the plain optimizer of whole
variables, which rank 0 has gathered from all ranks or has loaded.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from tw_builders.internal import (
    RankShards,
    as_whole,
    check_holds_none,
    gather,
    make_whole,
    scatter,
    shared_state,
    take,
    with_inner,
)
from tw_core import Tower
from tw_core.internal import all_gather, reduce_scatter, tf_variable
from tw_core.ranks import RankGroup
from tw_keras._over_ranks.in_steps import InSteps
from tw_keras._over_ranks.sharded_sums import ShardedSums

_log = logging.getLogger(__name__)


class ApartGroup:
    """A group whose exchanges are functions that are not inlined, in a step."""

    def __init__(self, in_steps: InSteps) -> None:
        self._in_steps, self._group = in_steps, in_steps.group
        self.rank, self.size = in_steps.group.rank, in_steps.group.size

    def sum(self, tensors: Sequence[Any], *, names: Sequence[str] = ()) -> list[Any]:
        """Adds dense tensors over the ranks."""

        def run(*own: Any) -> list[Any]:
            return self._group.sum(own, names=names)

        return self._run(str(names), run, tensors)

    def reduce_scatter(self, parts: Sequence[Any], *, name: str) -> Any:
        """Adds each rank's part over the ranks."""

        def run(*parts: Any) -> list[Any]:
            return [reduce_scatter(self._group, parts, name=name)]

        return self._run(name, run, parts)[0]

    def all_gather(self, own: Any, lengths: Sequence[int], *, name: str) -> list[Any]:
        """Gives all ranks what each has."""

        def run(own: Any) -> list[Any]:
            return all_gather(self._group, own, lengths, name=name)

        return self._run(name, run, [own])

    def broadcast(self, variables: Sequence[Any]) -> None:
        """Gives all ranks the values of rank 0's variables."""
        self._group.broadcast(variables)

    def bounded(self, function: Any) -> Any:
        """Makes a function raise errors that name lost ranks."""
        return self._group.bounded(function)

    def tell(self, what: str) -> None:
        """Notes on rank 0 that something is done."""
        self._group.tell(what)

    def wait_for(self, what: str) -> None:
        """Waits until rank 0 has announced an event."""
        self._group.wait_for(what)

    def _run(
        self, name: str, run: Callable[..., list[Any]], tensors: Sequence[Any]
    ) -> list[Any]:
        if tf.executing_eagerly():
            return list(run(*tensors))
        specs = [tf.TensorSpec(own.shape, own.dtype) for own in tensors]
        return self._in_steps.apart(name, run, tensors, specs)


class ShardedStates:
    """The shards of a model's optimizers."""

    def __init__(self, in_steps: InSteps, towers: Sequence[Tower]) -> None:
        """Starts without an optimizer."""
        self._group: RankGroup = ApartGroup(in_steps)
        self._towers, self.sums = towers, ShardedSums(towers[0])
        self._known: dict[int, RankShards] = {}
        self._wholes: dict[int, Any] = {}  # of rank 0: gathered or loaded
        self.has_loaded = False  # what other ranks have not had
        self.gathers = False  # when an epoch of ``fit`` ends

    def keep(self, optimizers: Sequence[Any]) -> None:
        """Forgets all others; refuses those that hold several others."""
        known = {id(own): self._known.get(id(own)) for own in optimizers}
        self._known = {key: own for key, own in known.items() if own is not None}
        self.sums.forget()
        for own in optimizers:
            check_holds_none(own)

    def of(self, optimizer: Any, columns: Sequence[Sequence[Any]]) -> RankShards:
        """Returns an optimizer's shards; builds it for them if it is not.

        ``columns`` are the [K][N] copies to build it for. If it was built for whole
        variables, as one that was loaded, shards take their parts of its state.
        """
        if id(optimizer) not in self._known:
            with tf.init_scope():
                whole = _taken_apart(optimizer) if optimizer.built else None
                shards = RankShards(self._group, self._towers, columns, optimizer)
                self._known[id(optimizer)] = shards
                if whole is not None:
                    self._load(shards, whole)
        return self._known[id(optimizer)]

    def begin_anew(self) -> None:
        """Has optimizers that have not updated yet begin with the present values."""
        for shards in self._known.values():
            if int(with_inner(shards.optimizer)[-1]._iterations) == 0:
                shards.begin_anew()

    def state(self, optimizer: Any) -> list[Any]:
        """Lists the variables that are the same on all ranks."""
        return shared_state(optimizer) if optimizer.built else []

    def gather(self) -> None:
        """Gives rank 0 the whole state; all ranks call it."""
        self.forget_whole()
        for key, shards in self._known.items():
            whole = gather(shards)
            if whole is not None:
                self._wholes[key] = whole

    def forget_whole(self) -> None:
        """Frees what rank 0 has of other ranks, unless it is still to be given."""
        if not self.has_loaded:
            self._wholes.clear()

    def scatter_loaded(self) -> None:
        """Gives all ranks what rank 0 has loaded; all ranks call it."""
        for key, shards in self._known.items():
            scatter(shards, self._wholes.get(key))
        self.has_loaded = False
        self.forget_whole()

    @contextmanager
    def writing(self, *, fits: bool, has_failed: bool) -> Iterator[None]:
        """Has optimizers be the whole ones, on rank 0, while a file is written."""
        known = self._known.values()
        missing = [o for o in known if id(o.optimizer) not in self._wholes]
        if missing and has_failed:
            _log.warning(
                "TowerModel: saves no state of %s, of which other ranks have a part, "
                "as fit or evaluate has failed",
                type(missing[0].optimizer).__name__,
            )
        elif missing and fits:
            raise RuntimeError(
                f"TowerModel: {type(missing[0].optimizer).__name__} has its state on "
                "all ranks, which give it to rank 0 at the end of an epoch; save in "
                "on_epoch_end (save_freq='epoch'), not between batches."
            )
        with ExitStack() as stack:
            for shards in known:
                whole = self._wholes.get(id(shards.optimizer))
                if whole is None:  # which has no state yet
                    whole = type(shards.optimizer).from_config(
                        shards.optimizer.get_config()
                    )
                stack.enter_context(as_whole(shards.optimizer, whole))
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Has optimizers be whole ones while a file is read, and takes their parts."""
        wholes = [(own, make_whole(own)) for own in self._known.values()]
        with ExitStack() as stack:
            for shards, whole in wholes:
                tf_variable(with_inner(whole)[-1]._iterations).assign(_NOT_READ)
                stack.enter_context(as_whole(shards.optimizer, whole))
            yield
        for shards, whole in wholes:
            if int(with_inner(whole)[-1]._iterations) != _NOT_READ:
                self._load(shards, whole)

    def _load(self, shards: RankShards, whole: Any) -> None:
        take(shards, whole)
        if self._group.rank == 0:
            self._wholes[id(shards.optimizer)] = whole
            self.has_loaded = True

    @contextmanager
    def finalizing(self, optimizer: Any) -> Iterator[None]:
        """Has Keras finalize values, such as averages, of shards, and gives them."""
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            yield
            return
        plain = optimizer.finalize_variable_values

        def finalize(var_list: Any) -> None:
            shards = self._known.get(id(optimizer))
            if shards is None:
                plain(var_list)
                return
            shards.finalize(plain)

        optimizer.finalize_variable_values = finalize
        try:
            yield
        finally:
            del optimizer.finalize_variable_values


_NOT_READ = -1  # updates


def _taken_apart(optimizer: Any) -> Any:
    """Makes an optimizer as if it were not built; returns one with its state."""
    kind = type(optimizer)
    whole, fresh = object.__new__(kind), kind.from_config(optimizer.get_config())
    state = vars(optimizer)
    vars(whole).update(state)
    state.clear()
    state.update(vars(fresh))
    return whole


def _flat(callbacks: Any) -> list[Any]:
    every = tf.nest.flatten(getattr(callbacks, "callbacks", callbacks) or [])
    return [getattr(own, "callback", own) for own in every]  # those of rank 0 alone


def check_callbacks(callbacks: Any) -> None:
    """Refuses callbacks that need all of an optimizer's state where a rank has not."""
    for own in _flat(callbacks):
        if getattr(own, "save_freq", "epoch") != "epoch":
            raise ValueError(
                f"TowerModel: {type(own).__name__} saves between batches, where the "
                "optimizer's state is on all ranks; with variables='sharded' and a "
                f"group use save_freq='epoch'; got {own.save_freq!r}."
            )
        if type(own).__name__ in ("SwapEMAWeights", "OrbaxCheckpoint"):
            raise ValueError(
                f"TowerModel: {type(own).__name__} takes the optimizer's variables by "
                "itself, of which a rank has a part; with variables='sharded' and a "
                "group use ModelCheckpoint, and ema_overwrite_frequency."
            )


def may_save(callbacks: Any) -> bool:
    """Returns whether callbacks may save a model when an epoch ends."""
    own = keras.callbacks
    kinds = (own.ModelCheckpoint, own.BackupAndRestore, own.LambdaCallback)
    return any(
        isinstance(one, kinds)
        or not type(one).__module__.startswith(("keras.", "tw_keras."))
        for one in _flat(callbacks)
    )
