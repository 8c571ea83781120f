"""Optimizers whose state is in shards, each on one tower of one rank.

The compiled optimizer applies updates, with slots of this rank's shards alone. While
files are written or read, it becomes the plain optimizer of whole variables, which rank
0 has gathered from all ranks or loaded.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    take,
    with_inner,
)
from tw_core import Tower
from tw_core.internal import tf_variable
from tw_keras._keras_compat import counter_of, replaced
from tw_keras._over_ranks.exchanges import Exchanges, StepGroup
from tw_keras._update.states import Save

_log = logging.getLogger(__name__)


class ShardedStates:
    """The shards of a model's optimizers."""

    def __init__(self, exchanges: Exchanges | None, towers: Sequence[Tower]) -> None:
        """Starts without an optimizer; without ``exchanges`` it gets none."""
        self._group: Any = None if exchanges is None else StepGroup(exchanges)
        self._towers = towers
        self._known: dict[int, RankShards] = {}
        self._wholes: dict[int, Any] = {}  # of rank 0: gathered or loaded
        self.has_loaded = False  # state that other ranks lack

    def keep(self, optimizers: Sequence[Any]) -> None:
        """Forgets all other optimizers; refuses those that hold several others."""
        known = {id(own): self._known.get(id(own)) for own in optimizers}
        self._known = {key: own for key, own in known.items() if own is not None}
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
            if int(counter_of(with_inner(shards.optimizer)[-1])) == 0:
                shards.begin_anew()

    def gather(self) -> None:
        """Gives rank 0 the whole state; all ranks call it."""
        self.forget_gathered()
        for key, shards in self._known.items():
            whole = gather(shards)
            if whole is not None:
                self._wholes[key] = whole

    def forget_gathered(self) -> None:
        """Frees the whole state on rank 0, unless it is still to be scattered."""
        if not self.has_loaded:
            self._wholes.clear()

    def scatter_loaded(self) -> None:
        """Gives all ranks the state that rank 0 loaded; all ranks call it."""
        for key, shards in self._known.items():
            scatter(shards, self._wholes.get(key))
        self.has_loaded = False
        self.forget_gathered()

    @contextmanager
    def saving(self, save: Save) -> Iterator[None]:
        """Makes optimizers whole, on rank 0, while a file is written."""
        known = self._known.values()
        missing = [o for o in known if id(o.optimizer) not in self._wholes]
        if missing and save.has_failed:
            _log.warning(
                "TowerModel: the state of %s is not saved: other ranks have parts of "
                "it, and fit or evaluate failed",
                type(missing[0].optimizer).__name__,
            )
        elif missing and save.fits:
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
    def loading(self, path: Any, model: Any) -> Iterator[None]:
        """Makes optimizers whole while a file is read, then takes their shards."""
        wholes = [(own, make_whole(own)) for own in self._known.values()]
        with ExitStack() as stack:
            for shards, whole in wholes:
                tf_variable(counter_of(with_inner(whole)[-1])).assign(_NOT_READ)
                stack.enter_context(as_whole(shards.optimizer, whole))
            yield
        for shards, whole in wholes:
            if int(counter_of(with_inner(whole)[-1])) != _NOT_READ:
                self._load(shards, whole)

    def _load(self, shards: RankShards, whole: Any) -> None:
        take(shards, whole)
        if self._group.rank == 0:
            self._wholes[id(shards.optimizer)] = whole
            self.has_loaded = True

    def finalizing(self, optimizer: Any) -> AbstractContextManager[None]:
        """Makes Keras finalize shards' values, such as averages, and sends them."""

        def of_shards(plain: Callable[[Any], None]) -> Callable[[Any], None]:
            def finalize(variables: Any) -> None:
                shards = self._known.get(id(optimizer))
                plain(variables) if shards is None else shards.finalize(plain)

            return finalize

        is_keras = isinstance(optimizer, keras.optimizers.Optimizer)
        if self._group is None or not is_keras:
            return nullcontext()
        return replaced(optimizer, "finalize_variable_values", of_shards)


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
