"""A reducer's memory for a model, in one holder per optimizer.

It is saved beside the model, whose own file equals the plain model's.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from tw_core import Tower
from tw_core.ranks import RankGroup
from tw_keras._files import Arrays, companion_of, read_memory, write_memory
from tw_keras._keras_compat import counter_of
from tw_keras._update.states import Save
from tw_reduce import ReducerState
from tw_reduce.internal import is_stateful

_log = logging.getLogger(__name__)


class Memory:
    """The holders of a reducer's memory, each for one optimizer's variables."""

    def __init__(
        self,
        reducer: Any,
        towers: Sequence[Tower],
        of_towers: Callable[[Sequence[Any]], Sequence[Sequence[Any]]],
        trained_of: Callable[[int, Any], Sequence[Any]],
        group_of: Callable[[int], RankGroup | None],
        group: RankGroup | None,
    ) -> None:
        """Takes the towers that have memory: one, if a rank's are added first.

        ``reducer``: None, or one without memory, where there is nothing to keep.

        ``of_towers`` returns [K] lists of the towers' counterparts of tower 0's
        variables; ``trained_of`` those of the n-th optimizer, and ``group_of`` the
        group of its exchanges.
        """
        self._reducer = reducer if is_stateful(reducer) else None
        self.towers, self._group = towers, group
        self._of_towers, self._trained_of = of_towers, trained_of
        self._group_of = group_of
        self._optimizers: Sequence[Any] = ()  # in their order
        self._made: dict[int, tuple[Any, ReducerState]] = {}  # keeps their ids
        self._loaded: dict[int, Arrays] = {}  # by optimizer, not applied yet
        self._of_ranks: dict[int, Arrays] = {}  # [R K, ...], at an epoch's end
        self._companion = ""  # the file that was loaded last
        self._has_warned = False  # of it
        self._has_read = False  # unknown to other ranks

    def __bool__(self) -> bool:
        """Returns whether there is a reducer with memory."""
        return self._reducer is not None

    def of(self, place: int, optimizer: Any) -> ReducerState:
        """Returns the holder for the n-th optimizer, which is built."""
        if id(optimizer) not in self._made:
            variables = self._of_towers(self._trained_of(place, optimizer))
            holder = ReducerState(
                self._reducer,
                variables[: len(self.towers)],
                group=self._group_of(place),
                devices=[tower.device for tower in self.towers],
            )
            self._made[id(optimizer)] = optimizer, holder
            with tf.init_scope():
                if loaded := self._loaded.pop(place, None):
                    self._give(holder, loaded)
                elif not self._has_warned:
                    _warn_if_resumed(optimizer)
        return self._made[id(optimizer)][1]

    def keep(self, optimizers: Sequence[Any]) -> None:
        """Forgets the holders of all other optimizers, as the model is compiled."""
        self._optimizers, known = optimizers, set(map(id, optimizers))
        lost = [key for key in self._made if key not in known]
        for key in lost:
            optimizer, _ = self._made.pop(key)
            _log.warning(
                "TowerModel: compile replaced %s, so the reducer's memory starts from "
                "zero; compile with model.optimizer to keep both.",
                type(optimizer).__name__,
            )
        self._of_ranks.clear()

    def forget_gathered(self) -> None:
        """Discards gathered memory, which the steps that follow change."""
        self._of_ranks.clear()

    @property
    def holders(self) -> list[ReducerState]:
        """The holders, in the order in which their optimizers applied first."""
        return [holder for _, holder in self._made.values()]

    @contextmanager
    def saving(self, save: Save) -> Iterator[None]:
        """Saves beside the file that is written."""
        yield
        arrays = {
            f"{n}/{name}": array
            for n, optimizer in enumerate(self._optimizers)
            for name, array in self._arrays(n, optimizer).items()
        }
        write_memory(save.path, arrays, save.weights)

    @contextmanager
    def loading(self, path: Any, model: Any) -> Iterator[None]:
        """Loads what was saved beside the file that is read; else resets to zero."""
        yield
        self._loaded, self._of_ranks, self._has_read = {}, {}, True
        self._companion, self._has_warned = companion_of(path), False
        arrays, fault = read_memory(path, model.weights)
        for name, array in arrays.items():
            place, _, own = name.partition("/")
            self._loaded.setdefault(int(place), {})[own] = array
        if fault or (self._made and not arrays):
            self._warn(fault or "there is no %s")
        for n, optimizer in enumerate(self._optimizers):
            if id(optimizer) not in self._made:
                continue
            holder = self._made[id(optimizer)][1]
            holder.reset()
            if self._group is None and n in self._loaded:
                self._give(holder, self._loaded.pop(n))

    def _warn(self, fault: str) -> None:
        self._has_warned = True
        _log.warning(
            f"TowerModel: {fault}: the reducer's memory starts from zero.",
            self._companion,
        )

    def _give(self, holder: ReducerState, loaded: Arrays) -> None:
        """Loads memory that was saved, if it fits."""
        holder.build()
        if self._fits(holder, loaded):
            holder.load_own_variables(loaded)

    def _fits(self, holder: ReducerState, loaded: Arrays) -> bool:
        """Returns whether memory is of a reducer like this; else warns, and resets."""
        own: Arrays = {}
        holder.save_own_variables(own)
        like = {name: (array.shape[1:], array.dtype) for name, array in own.items()}
        places = {name.partition("/")[0] for name in loaded}
        wanted = {n: it for n, it in like.items() if n.partition("/")[0] in places}
        found = {n: (array.shape[1:], array.dtype) for n, array in loaded.items()}
        if found != wanted:
            self._warn("%s is of another reducer or model")
            holder.reset()
        return found == wanted

    def take_of_rank_0(self) -> None:
        """Takes this rank's part of the memory rank 0 loaded; all ranks call it."""
        group = self._group
        if group is None or not self:
            return
        flags = [self._has_read, group.rank == 0 and bool(self._loaded)]
        [sums] = group.sum([tf.cast(flags, tf.float32)], names=["memory that was read"])
        has_read, has_loaded = (sums > 0).numpy()
        loaded, self._loaded, self._has_read = self._loaded, {}, False
        if not has_read:
            return
        if not has_loaded:  # Rank 0 has started from zero.
            for holder in self.holders:
                holder.reset()
            return
        for n, optimizer in enumerate(self._optimizers):
            if not optimizer.built:
                _log.warning(
                    "TowerModel: %s has no variables yet, so its reducer's "
                    "memory starts from zero; load after the model and its "
                    "optimizer are built.",
                    type(optimizer).__name__,
                )
                continue
            holder = self.of(n, optimizer)
            holder.build()
            if group.rank == 0 and not self._fits(holder, loaded.get(n, {})):
                loaded[n] = {}
            of_ranks = self._divided(holder, loaded.get(n, {}))
            count = len(self.towers)
            places_of_all = {"total": group.size * count, "first": group.rank * count}
            holder.load_own_variables(of_ranks, **places_of_all)

    def gather(self) -> None:
        """Gathers all ranks' memory on rank 0, to be saved; all ranks call it."""
        group = self._group
        if group is None or self._of_ranks:
            return
        for n, optimizer in enumerate(self._optimizers):
            if id(optimizer) in self._made:
                own: Arrays = {}
                self._made[id(optimizer)][1].save_own_variables(own)
                self._of_ranks[n] = self._summed(
                    {key: {group.rank: array} for key, array in own.items()}, own
                )

    def _divided(self, holder: ReducerState, loaded: Arrays) -> Arrays:
        """Divides rank 0's arrays; returns [R K, ...] arrays on all ranks."""
        group: Any = self._group
        own: Arrays = {}
        holder.save_own_variables(own)
        parts: dict[str, dict[int, Any]] = {key: {} for key in own}
        for rank in range(group.size) if group.rank == 0 else ():
            count = len(self.towers)
            holder.load_own_variables(
                loaded, total=group.size * count, first=rank * count
            )
            divided: Arrays = {}
            holder.save_own_variables(divided)
            for key, array in divided.items():
                parts[key][rank] = array
        return self._summed(parts, own)

    def _summed(self, parts: dict[str, dict[int, Any]], like: Arrays) -> Arrays:
        """Sums [R K, ...] arrays over ranks, each of which fills in its own parts."""
        group: Any = self._group
        wholes = []
        for key, own in like.items():
            count = len(own)
            whole = np.zeros([group.size * count, *own.shape[1:]], own.dtype)
            for rank, array in parts[key].items():
                whole[rank * count : (rank + 1) * count] = array
            wholes.append(tf.constant(whole))
        names = [f"memory {key}" for key in like]
        sums = group.sum(wholes, names=names) if wholes else []
        return {key: own.numpy() for key, own in zip(like, sums, strict=True)}

    def _arrays(self, place: int, optimizer: Any) -> Arrays:
        if place in self._of_ranks:
            return self._of_ranks[place]
        if id(optimizer) not in self._made:
            return self._loaded.get(place, {})
        own: Arrays = {}
        self._made[id(optimizer)][1].save_own_variables(own)
        ranks = 1 if self._group is None else self._group.size
        return {key: np.concatenate([array] * ranks) for key, array in own.items()}


def _warn_if_resumed(optimizer: Any) -> None:
    """Says that memory is new where its optimizer is not, as after a checkpoint."""
    updates = int(counter_of(optimizer))
    if updates > 0:
        _log.warning(
            "TowerModel: %s has made %d updates, but the reducer's memory starts from "
            "zero: only load_weights of the TowerModel reads it, from the file beside "
            "the model's.",
            *(type(optimizer).__name__, updates),
        )
