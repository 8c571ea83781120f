"""Optimizers whose state is in shards, each on one tower of one rank.

The compiled optimizer applies updates, with slots of this rank's shards alone. While
files are written or read, it becomes the plain optimizer of whole variables, which rank
0 has gathered from all ranks or loaded.
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
    """A group whose exchanges in a step are functions that are not inlined."""

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
        """Gives all ranks every rank's tensor."""

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
        """Announces an event on rank 0."""
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
        self.has_loaded = False  # state that other ranks lack
        self.gathers = False  # when an epoch of ``fit`` ends

    def keep(self, optimizers: Sequence[Any]) -> None:
        """Forgets all other optimizers; refuses those that hold several others."""
        known = {id(own): self._known.get(id(own)) for own in optimizers}
        self._known = {key: own for key, own in known.items() if own is not None}
        self.sums.forget()
        for own in optimizers:
            check_holds_none(own)

    def of(self, optimizer: Any, columns: Sequence[Sequence[Any]]) -> RankShards:
        """Returns an optimizer's shards; builds it for them if needed.

        ``columns``: the [K][N] copies. If it was built for whole variables, like a
        loaded one, shards take their parts of its state.
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
        """Restarts optimizers without updates from the variables' present values."""
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
        """Frees the whole state on rank 0, unless it is still to be scattered."""
        if not self.has_loaded:
            self._wholes.clear()

    def scatter_loaded(self) -> None:
        """Gives all ranks the state that rank 0 loaded; all ranks call it."""
        for key, shards in self._known.items():
            scatter(shards, self._wholes.get(key))
        self.has_loaded = False
        self.forget_whole()

    @contextmanager
    def writing(self, *, fits: bool, has_failed: bool) -> Iterator[None]:
        """Makes optimizers whole, on rank 0, while a file is written."""
        known = self._known.values()
        missing = [o for o in known if id(o.optimizer) not in self._wholes]
        if missing and has_failed:
            _log.warning(
                "TowerModel: the state of %s is not saved: other ranks have parts of "
                "it, and fit or evaluate failed",
                type(missing[0].optimizer).__name__,
            )
        elif missing and fits:
            raise RuntimeError(
                f"TowerModel: {type(missing[0].optimizer).__name__} has its state on "
                "all ranks; rank 0 gathers it at the end of an epoch; save in "
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
        """Makes optimizers whole while a file is read, then takes their shards."""
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
        """Makes Keras finalize shards' values, such as averages, and sends them."""
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
    """Resets an optimizer to unbuilt; returns another with its state."""
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
    """Refuses callbacks that need an optimizer's whole state, if ranks have parts."""
    for own in _flat(callbacks):
        if getattr(own, "save_freq", "epoch") != "epoch":
            raise ValueError(
                f"TowerModel: {type(own).__name__} saves between batches, when "
                "the optimizer's state is divided among ranks; with "
                "variables='sharded' and a group use save_freq='epoch'; got "
                f"{own.save_freq!r}."
            )
        if type(own).__name__ in ("SwapEMAWeights", "OrbaxCheckpoint"):
            raise ValueError(
                f"TowerModel: {type(own).__name__} reads the optimizer's variables "
                "itself, of which a rank has only a part; with variables='sharded' and "
                "a group use ModelCheckpoint, and ema_overwrite_frequency."
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
