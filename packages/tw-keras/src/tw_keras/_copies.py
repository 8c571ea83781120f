"""The copies of a model: made, built, compiled, and kept equal."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_core import Tower, copy_to_replicas
from tw_core.internal import copy_values, follow_variables, host_of, tf_variable
from tw_keras import _building, _checks
from tw_keras._over_ranks.agreement import take_of_rank_0
from tw_keras._over_ranks.ranks import Ranks
from tw_keras._over_ranks.sharded import ShardedStates
from tw_keras._update.memory import Memory
from tw_keras._update.over_towers import WrappedOptimizer, wrapped
from tw_keras._update.row import Row, Setting
from tw_reduce import Reducer, all_reduce

_log = logging.getLogger(__name__)
Weigh = Callable[[Any, Any, Any], Any]
_SEED_STEP = 0x9E3779B9  # odd and large, so that layers' seeds stay apart


class Copies:
    """The copies of a model, the first of which is saved."""

    def __init__(
        self,
        make_model: Callable[[], Any],
        towers: Sequence[Tower],
        variables: str,
        *,
        reducer: Reducer | None,
        weigh: Weigh | None,
        adds: bool,
        inline: bool | None,
        ranks: Ranks | None,
    ) -> None:
        """Calls ``make_model`` for every tower, or once where they share variables.

        The arguments are those of ``TowerModel``; ``adds``: losses are sums over rows,
        whatever ``compile`` says.
        """
        self.towers, self.variables = towers, variables
        self.weigh, self.adds, self.inline, self.ranks = weigh, adds, inline, ranks
        self.may_fall_back = False  # to steps without XLA
        self.assigned: list[Any] = []  # tower 0's variables that train, by a step
        self.states_by_row: Sequence[Sequence[Any]] = ()  # [K], each tower's own
        self._copied: list[list[int]] = []  # ids of the variables, as last copied
        self._is_built = False
        self._built_for = set[str]()  # names of steps
        others = self.ranks_in_steps
        exchanges = None if others is None else others.exchanges
        self.memory = Memory(
            *(reducer, towers if others is None else towers[:1], self.of_towers),
            trained_of=lambda n, own: self.row(n, own).trained,
            add_of=self._add_of,
            group=None if ranks is None else ranks.group,
        )
        if ranks is not None and ranks.alone is not None:
            ranks.alone.find = self._averaged
            ranks.alone.find_state = self._averaged_state
        self.sharded = ShardedStates(exchanges, towers)
        has_shards = variables == "sharded" and exchanges and exchanges.group.size > 1
        with tf.init_scope(), tf.device("/cpu:0"):
            at_once = tf.Variable(True, trainable=False)
        self.setting = Setting(
            towers=towers,
            variables=variables,
            of_towers=self.of_towers,
            # For callbacks that read optimizers between batches.
            at_once=at_once,
            reducer=None if self.memory else reducer,
            memory=self.memory or None,
            exchanges=exchanges,
            shards=self.sharded if has_shards else None,
        )
        self._rows: dict[int, Row] = {}  # by optimizer
        made = [_make(make_model, device) for device in self._homes()]
        # [K]; one model K times where towers share variables
        self.models = made * (len(towers) // len(made))
        if self.outer is not None:  # so that it is saved with tower 0
            setattr(self.main, _checks.OUTER, self.outer)
        if all(model.built for model in self.models):
            self.make_equal()

    def _homes(self) -> list[str]:
        """Returns the devices of the distinct models' variables."""
        devices = [tower.device for tower in self.towers]
        is_shared = self.variables == "parameter_server"
        return [host_of(devices[0])] if is_shared else devices

    @property
    def ranks_in_steps(self) -> Ranks | None:
        """The other ranks, if training steps exchange anything with them."""
        is_alone = self.ranks is None or self.ranks.alone is not None
        return None if is_alone else self.ranks

    @property
    def outer(self) -> Any:
        """The optimizer that applies the ranks' averages, or None."""
        alone = None if self.ranks is None else self.ranks.alone
        return None if alone is None else alone.settings.outer

    @property
    def main(self) -> Any:
        """Tower 0's model."""
        return self.models[0]

    @property
    def distinct(self) -> list[Any]:
        """The models, each once."""
        return list(dict.fromkeys(self.models))

    @property
    def is_plain(self) -> bool:
        """Whether a lone tower trains exactly as its plain model would."""
        is_alone = len(self.towers) == 1 and self.ranks is None
        return (
            is_alone
            and self.setting.reducer is None
            and not self.memory
            and self.variables != "parameter_server"  # maybe on another device
            and not any(isinstance(own, WrappedOptimizer) for own in self.optimizers)
        )

    def compiles(self, asked: bool | str) -> bool:
        """Returns whether XLA compiles steps; "auto": as Keras does, for GPUs."""
        kind_of = tf.DeviceSpec.from_string
        are_gpus = "GPU" in [kind_of(own.device).device_type for own in self.towers]
        # XLA cannot assign variables on another device.
        if asked == "auto" and not (are_gpus and self.variables != "parameter_server"):
            return False
        others = [own for own in _checks.layers_of(self.main) if not own.supports_jit]
        if asked and others:
            names = ", ".join(own.name for own in others)
            _log.warning(
                "TowerModel: steps run without XLA, which cannot compile %s; "
                "compile(jit_compile=False) silences this",
                names,
            )
            return False
        # Keras itself does not where operations must be deterministic.
        return bool(self.main._resolve_auto_jit_compile() if asked == "auto" else asked)

    @property
    def optimizers(self) -> list[Any]:
        """Tower 0's optimizers, which update all towers."""
        return _checks.optimizers_of(self.main)

    def of_towers(self, variables: Sequence[Any]) -> list[list[Any]]:
        """Returns [K] lists: each tower's counterparts of tower 0's ``variables``."""
        columns = zip(*[model.variables for model in self.models], strict=True)
        own = {id(column[0]): column for column in columns}
        if any(id(v) not in own for v in variables):
            own |= {id(c[0]): c for c in zip(*self.unlisted(), strict=True)}
        shared = len(self.towers)
        found = [own.get(id(v), (v,) * shared) for v in variables]
        return [[column[k] for column in found] for k in range(shared)]

    def compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compiles every copy, all with tower 0's optimizers."""
        self._freeze_alike()
        self._rows.clear()
        self._built_for.clear()
        given = tf.nest.map_structure(wrapped, (args, options))
        for model, tower in zip(self.distinct, self.towers, strict=False):
            with tf.device(tower.device):
                model.compile(*given[0], **given[1])
        kind: Any = type(self.main)
        is_plain = kind.compute_loss is keras.Model.compute_loss
        if is_plain and not _building.has_own_step(self.main):
            # Other steps may call a compiled loss themselves, and average.
            _checks.check_losses(_checks.reductions_of(self.main))
        self.adopt_optimizers()

    def adopt_optimizers(self) -> None:
        """Makes all towers use tower 0's optimizers."""
        optimizers = self.optimizers
        for model in self.distinct[1:]:
            _share_optimizers(self.main, model)
        reduces = self.setting.reducer is not None and self.ranks_in_steps is None
        reduces = reduces or bool(self.memory)
        _checks.check_optimizers(
            *(optimizers, self.variables),
            num_towers=len(self.towers),
            reduces=reduces,
        )
        if self.setting.shards is not None:
            self.sharded.keep(optimizers)
        self.memory.keep(optimizers)

    @contextmanager
    def without_wrapped(self) -> Iterator[None]:
        """Detaches an optimizer over towers while tower 0 is saved."""
        main = self.main
        optimizer = getattr(main, "optimizer", None)
        if not isinstance(optimizer, WrappedOptimizer):
            yield
            return
        main.optimizer, main.compiled = None, False
        try:
            yield
        finally:
            main.optimizer, main.compiled = optimizer, True

    def synchronized(self, *, trains: bool) -> list[str]:
        """Names the synchronised layers; none if a single tower has all rows."""
        others = self.ranks_in_steps if trains else None
        ranks = 1 if others is None else others.group.size
        is_one = len(self.towers) * ranks == 1
        return [] if is_one else _checks.synchronized_layers_of(self.main)

    def check_eager(self) -> None:
        """Refuses eager steps of layers synchronised over ranks: they have no sums."""
        others = self.ranks_in_steps
        is_one = others is None or others.group.size == 1
        synchronized = [] if is_one else self.synchronized(trains=True)
        if synchronized:
            raise ValueError(
                f"TowerModel: {', '.join(synchronized)} are synchronised over ranks, "
                "which needs run_eagerly=False; or make them with synchronized=False."
            )

    def make_equal(self) -> None:
        """Checks that the copies match, and copies tower 0's values to all."""
        if not all(model.built for model in self.models):
            return
        self._is_built = True
        self._follow_states_of_rows()
        if self.variables == "parameter_server":
            return
        if len(self.towers) > 1:
            _checks.check_adapted(self.distinct)
            self._copy_variables()
            self._give_own_seeds()
        for n, optimizer in enumerate(self.optimizers):
            row, is_main = self.row(n, optimizer), optimizer is self._optimizer
            if optimizer.built and is_main:
                row.build(self.main.trainable_variables)
            row.place.make_equal()

    @property
    def _optimizer(self) -> Any:
        """That of ``compile``, which updates all of the model; or None."""
        return getattr(self.main, "optimizer", None)

    def row(self, number: int, optimizer: Any) -> Row:
        """Returns the stages of the updates by the n-th optimizer."""
        if id(optimizer) not in self._rows:
            self._rows[id(optimizer)] = Row(number, optimizer, self.setting)
        return self._rows[id(optimizer)]

    def build_optimizer(self) -> None:
        """Creates the state of the optimizer of ``compile``, placed for updates."""
        number = self.optimizers.index(self._optimizer)
        self.row(number, self._optimizer).build(self.main.trainable_variables)

    def finalizing(self) -> AbstractContextManager[None]:
        """Scope in which Keras finalizes the values of shards."""
        return self.sharded.finalizing(self._optimizer)

    @property
    def has_parts(self) -> bool:
        """Whether ranks have parts of the state that rank 0 saves."""
        return bool(self.memory) or self.setting.shards is not None

    def gather(self) -> None:
        """Gives rank 0 the state of which ranks have parts; all ranks call it."""
        self.sharded.gather()
        self.memory.gather(self.optimizers)

    def forget_gathered(self) -> None:
        """Discards gathered state, which the steps that follow change."""
        self.sharded.forget_whole()
        self.memory.forget_gathered()

    def _add_of(self, number: int) -> Reducer:
        """Returns the sum that a reducer with memory uses for the n-th optimizer."""
        exchanges = self.setting.exchanges
        if exchanges is None:
            return all_reduce([tower.device for tower in self.towers])
        what = f"sums of a reducer, update {number}"
        return lambda rows: [exchanges.sum(what, rows[0])]

    def settle(self, *, over_ranks: bool) -> None:
        """Moves accumulated gradients to where they are saved."""
        if self.setting.exchanges is not None:
            self.setting.exchanges.count_anew()
        for row in self._rows.values():
            row.settle(over_ranks=over_ranks)

    def _averaged(self) -> list[list[Any]]:
        """Returns [K][N] variables that ranks average; [1][N] if towers share them."""
        lists = self.of_towers(self.kept_equal())
        return lists[:1] if self.variables == "parameter_server" else lists

    def _averaged_state(self) -> list[list[Any]]:
        """Returns [K][M] variables of the optimizers; [1][M] if towers share them."""
        states = []
        for n, own in enumerate(self.optimizers):
            if own.built and not isinstance(own, WrappedOptimizer):
                states.append(self.row(n, own).place.states or [own])
        return [
            [v for state in of_tower for v in state.variables]
            for of_tower in zip(*states, strict=True)
        ]

    def build_outer(self) -> None:
        """Creates the outer optimizer's state, before files are loaded into it."""
        alone = None if self.ranks is None else self.ranks.alone
        if alone is not None and self.outer and self._is_built and alone.follows:
            with tf.device(self.towers[0].device):
                follow_variables(self.outer, self._averaged()[0])

    def unlisted(self) -> list[list[Any]]:
        """Returns [K] lists of state not listed by Keras, without per-row states."""
        every = []
        for model in self.models:
            of_rows = set(map(id, _building.states_of_rows(model)))
            found = _building.unlisted_of(model)
            every.append([v for v in found if id(v) not in of_rows])
        return every

    def kept_equal(self) -> list[Any]:
        """Lists tower 0's variables whose copies are equal after every step."""
        more = [v for v in self._unlisted_state() if v.trainable]
        return [*self.main.trainable_variables, *more]

    def shared_state(self) -> list[Any]:
        """Lists shared variables, which tower 0 assigns; not states of generators."""
        if self.variables != "parameter_server":
            return []
        every = (*self.main.variables, *self.unlisted()[0])
        return [v for v in every if not _building.is_random(v)]

    def beside_models(self) -> list[tuple[Any, ...]]:
        """Returns [K] tuples of objects, apart from its model, that a tower may use."""
        of_rows = [row.place.states for row in self._rows.values()]
        states = [own for own in of_rows if len(own) == len(self.towers)]
        seeds, unlisted = _building.global_seeds(), self.unlisted()
        return [
            ([own[k] for own in states], seeds, unlisted[k], self.states_by_row[k])
            for k in range(len(self.towers))
        ]

    def _unlisted_state(self) -> list[Any]:
        return [v for v in self.unlisted()[0] if not _building.is_random(v)]

    def _copy_variables(self) -> None:
        """Copies tower 0's variables, except seeds and shared constants."""
        lists = [
            [v for v in (*model.variables, *more) if not _building.is_random(v)]
            for model, more in zip(self.models, self.unlisted(), strict=True)
        ]
        constant = {
            id(column[0])
            for column in zip(*lists, strict=False)
            if not column[0].trainable and all(v is column[0] for v in column)
        }
        lists = [[v for v in own if id(v) not in constant] for own in lists]
        ids = [list(map(id, own)) for own in lists]
        copy = copy_values if ids == self._copied else copy_to_replicas  # which checks
        copy(lists)
        self._copied = ids

    def take_from_rank_0(self, number: int = 0) -> int:
        """Gives this rank's towers rank 0's values, including the optimizers'.

        Returns rank 0's ``number``.
        """
        if self.ranks is None or not self._is_built:
            return number
        group = self.ranks.group
        own = getattr(self.main, "optimizer", None)
        is_built = own is not None and own.built
        seeds, loaded = _building.global_seeds(), int(self.sharded.has_loaded)
        has_built, loaded, number = take_of_rank_0(
            group, int(is_built), loaded, number, seeds=seeds
        )
        if has_built and not is_built:
            self.build_optimizer()
        self.build_outer()
        if loaded:
            self.sharded.scatter_loaded()
        variables = [*self.main.variables, *self._unlisted_state()]
        variables += [] if self.outer is None else self.outer.variables
        for n, optimizer in enumerate(self.optimizers):
            variables += self.row(n, optimizer).place.of_rank_0(group)
        had_begun = self.ranks.has_begun
        self.ranks.begin(list({id(v): v for v in variables}.values()))
        self.make_equal()
        if not had_begun:
            self.sharded.begin_anew()
        return number

    def take_state_of_ranks(self) -> None:
        """Makes non-trainable state equal on all towers of all ranks."""
        # Without frozen weights, which do not change, and without metrics.
        layers = _checks.layers_of(self.main)
        state = [v for layer in layers for v in layer._non_trainable_variables]
        state += [v for v in self._unlisted_state() if not v.trainable]
        if self.ranks is not None:
            synchronized = self.ranks_in_steps is not None
            synchronized &= bool(_checks.synchronized_layers_of(self.main))
            self.ranks.take_state(state, of_last=synchronized)
            # A rank whose data has ended has not received these.
            eager = getattr(self.main, "run_eagerly", False)
            eager = eager and self.ranks_in_steps is not None
            assigned = self.kept_equal() if eager else self.assigned
            self.ranks.take_state(assigned, of_last=True)
        if state or self.assigned:
            self.make_equal()

    def _freeze_alike(self) -> None:
        """Sets ``trainable`` in every copy as in tower 0's."""
        for model in self.distinct[1:]:
            layers = zip(*map(_checks.layers_of, (model, self.main)), strict=False)
            weights = zip(model.weights, self.main.weights, strict=False)
            for own, main in [*layers, *weights]:  # outer layers before inner ones
                if own.trainable != main.trainable:
                    own.trainable = main.trainable

    def _follow_states_of_rows(self) -> None:
        """Resets per-row states in all towers if they are reset in tower 0."""
        every = [_building.states_of_rows(model) for model in self.models]
        if self.variables == "parameter_server" and every[0]:
            if len(self.states_by_row) != len(self.towers):
                own = [_like(every[0], tower) for tower in self.towers[1:]]
                self.states_by_row = [every[0], *own]
            every = [list(own) for own in self.states_by_row]
        self.states_by_row = every
        for first, *others in zip(*every, strict=True):
            if not np.any(tf_variable(first).numpy()):
                for own in others:
                    own.assign(tf.zeros_like(tf_variable(own)))

    def _give_own_seeds(self) -> None:
        """Gives every tower its own random seeds, derived from tower 0's.

        Otherwise dropout would zero the same positions in all towers' parts.
        """
        seeds = [_building.seeds_of(model) for model in self.models]
        for k, of_tower in enumerate(seeds[1:], start=1):
            for own, main in zip(of_tower, seeds[0], strict=True):
                own.assign(tf.add(main.value, [k * _SEED_STEP, 0]))

    def prepare(self, data: Any, method: str) -> bool:
        """Creates the first batch's variables from its specs, before a step is traced.

        A function that creates variables is traced twice. Returns whether there are
        new ones.
        """
        is_new = self.build(data, method)
        self.build_outer()
        main, own = self.main, getattr(self.main, "optimizer", None)
        if own is None or own.built or not main.trainable_variables:
            return is_new
        if not _building.has_own_step(main):
            self.build_optimizer()
        return is_new

    def build(self, data: Any, method: str) -> bool:
        """Creates a step's variables, outside of the step; returns whether any are new.

        A later step may call layers that the first has not.
        """
        lacks_layers = not self._is_built or (
            method not in self._built_for and bool(_building.unbuilt_of(self.main))
        )
        lacks_metrics = method != "predict_step" and not (
            self._is_built and _building.has_metrics_built(self.main, data)
        )
        if not (lacks_layers or lacks_metrics):
            return False
        with tf.init_scope():
            for model, tower, home in zip(
                self.distinct, self.towers, self._homes(), strict=False
            ):
                with tf.device(home), naming(tower):
                    if lacks_layers:
                        _building.build_layers(data, model, method)
            main, own = self.main, self.towers[0]
            if lacks_metrics and not _building.has_metrics_built(main, data):
                with tf.device(own.device), naming(own):
                    _building.build_metrics(data, main, method)
            self._built_for.add(method)
            if lacks_layers:
                self.make_equal()
        return lacks_layers


@contextmanager
def naming(tower: Tower) -> Iterator[None]:
    """Adds a note that names the tower to errors raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(in {tower.name} of {tower.total}, on {tower.device})")
        raise


def _like(states: Sequence[Any], tower: Tower) -> list[tf.Variable]:
    with tf.device(tower.device):
        zeros = [tf.zeros_like(tf_variable(own)) for own in states]
        return [tf.Variable(own, trainable=False) for own in zeros]


def _make(make_model: Callable[[], Any], device: str) -> Any:
    with tf.device(device):
        model = make_model()
    if not isinstance(model, keras.Model):
        raise TypeError(
            "TowerModel: make_model must return a keras.Model; got "
            f"{type(model).__name__}."
        )
    return model


def _share_optimizers(main: Any, model: Any) -> None:
    for name, value in list(vars(main).items()):
        if isinstance(value, keras.optimizers.Optimizer):
            setattr(model, name, value)
