"""The copies of a model: made, built, compiled, and kept equal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_core import Tower, copy_to_replicas
from tw_core.devices import host_of
from tw_core.optimizers import create_slots
from tw_core.variables import tf_variable
from tw_keras import _batches
from tw_keras._accumulation import Accumulation
from tw_keras._building import (
    build_metrics,
    build_variables,
    global_seeds,
    has_metrics_built,
    is_random,
    seeds_of,
    states_of_rows,
    unlisted_of,
)
from tw_keras._checks import (
    check_adapted,
    check_eager,
    check_losses,
    check_one,
    check_optimizers,
    check_xla,
    layers_of,
    optimizers_of,
    synchronized_layers_of,
)
from tw_keras._over_ranks.agreement import numbers_of_rank_0, spread_seeds
from tw_keras._over_ranks.ranks import Ranks
from tw_keras._updates import FlatTraining, OptimizerStates, build_for_owners
from tw_keras._wrapped import WrappedOptimizer, wrapped
from tw_reduce import Reducer, all_reduce, sum_on_device

Weigh = Callable[[Any, Any, Any], Any]
_SEED_STEP = 0x9E3779B9  # odd and large, so that layers' seeds stay apart


@dataclass
class Copies:
    """The copies of a model, of which the first is saved."""

    towers: Sequence[Tower]
    models: Sequence[Any]  # [K]; one model K times where towers share variables
    variables: str  # "replicated", "sharded" or "parameter_server"
    reducer: Reducer | None  # as given
    weigh: Weigh | None  # the ``weights`` of ``TowerModel``
    adds: bool = False  # whether losses are sums over rows, whatever ``compile`` says
    inline: bool | None = None
    flat: FlatTraining | None = None
    compiled_by_xla: bool = False  # each tower's step, part by part
    ranks: Ranks | None = None  # the other processes
    # Tower 0's variables that train and that a step assigns.
    assigned: list[Any] = field(default_factory=list)
    states_by_row: Sequence[Sequence[Any]] = ()  # [K], each tower's own
    _is_built: bool = False

    def __post_init__(self) -> None:
        self.states = OptimizerStates(self.towers)
        self.accumulation = Accumulation(self.towers)
        devices = [tower.device for tower in self.towers]
        # Where ranks add them next, towers need no copies of their sums.
        adds = all_reduce(devices) if self.ranks is None else None
        self.add = self.reducer or adds or partial(sum_on_device, device=devices[0])

    @classmethod
    def make(
        cls,
        make_model: Callable[[], Any],
        towers: Sequence[Tower],
        variables: str,
        *,
        flat_below_bytes: int,
        reducer: Reducer | None,
        weigh: Weigh | None,
        adds: bool,
        inline: bool | None,
        ranks: Ranks | None,
    ) -> "Copies":
        """Calls ``make_model`` for every tower, or once where they share variables."""
        flat = None
        if flat_below_bytes:
            flat = FlatTraining(make_model, towers, flat_below_bytes)
            models = [_checked_model(model) for model in flat.models]
        elif variables == "parameter_server":
            host = host_of(towers[0].device)
            models = [_make(make_model, host)] * len(towers)
        else:
            models = [_make(make_model, tower.device) for tower in towers]
        made = cls(
            *(towers, models, variables, reducer, weigh, adds),
            *(inline, flat, False, ranks),
        )
        if all(model.built for model in models):
            made.make_equal()
        return made

    @property
    def main(self) -> Any:
        """Tower 0's model."""
        return self.models[0]

    @property
    def distinct(self) -> list[Any]:
        """The models, each once."""
        return list(dict.fromkeys(self.models))

    @property
    def appliers(self) -> list[Any]:
        """The optimizers that apply: tower 0's, or the one of flat variables."""
        if self.flat is not None and self.flat.optimizer is not None:
            return [self.flat.optimizer]
        return optimizers_of(self.main)

    def of_towers(self, variables: Sequence[Any]) -> list[list[Any]]:
        """Returns [K] lists: what each tower has for tower 0's ``variables``."""
        models = self.models if self.flat is None else self.flat.flats
        lists = [
            [*model.variables, *more]
            for model, more in zip(models, self.unlisted(), strict=True)
        ]
        columns = zip(*lists, strict=True)
        own = {id(column[0]): column for column in columns}
        shared = len(self.towers)
        found = [own.get(id(v), (v,) * shared) for v in variables]
        return [[column[k] for column in found] for k in range(shared)]

    def compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compiles every copy, all with tower 0's optimizers."""
        self._freeze_alike()
        self.states = OptimizerStates(self.towers)  # frees those of older optimizers
        self.accumulation.forget()
        given = tf.nest.map_structure(wrapped, (args, options))
        for model, tower in zip(self.distinct, self.towers, strict=False):
            with tf.device(tower.device):
                model.compile(*given[0], **given[1])
        check_losses(self.main)
        self.adopt_optimizers()

    def adopt_optimizers(self) -> None:
        """Takes tower 0's optimizers for all towers."""
        optimizers = optimizers_of(self.main)
        for model in self.distinct[1:]:
            _share_optimizers(self.main, model)
        reduces = self.reducer is not None and self.ranks is None
        check_optimizers(
            *(optimizers, self.variables),
            num_towers=len(self.towers),
            reduces=reduces,
        )
        if self.flat is not None:
            check_one(optimizers)
            self.flat.use(optimizers[0], sharded=self.variables == "sharded")

    @contextmanager
    def without_wrapped(self) -> Iterator[None]:
        """Removes an optimizer over towers from tower 0 while that is saved."""
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
        """Names the layers that are synchronised, when it trains over all ranks."""
        ranks = self.ranks.group.size if self.ranks is not None and trains else 1
        is_one = len(self.towers) * ranks == 1
        return [] if is_one else synchronized_layers_of(self.main)

    def check_compiled(self, *, run_eagerly: bool, by_xla: bool) -> None:
        """Refuses options of ``compile`` that do not work over towers."""
        if run_eagerly and self.ranks is not None and self.ranks.group.size > 1:
            check_eager(self.synchronized(trains=True))
        if by_xla:
            check_xla(self.variables)

    def make_equal(self) -> None:
        """Checks that the copies match, and gives all of them tower 0's values."""
        if not all(model.built for model in self.models):
            return
        self._is_built = True
        self._follow_states_of_rows()
        if self.variables == "parameter_server":
            return
        check_adapted(self.distinct)
        self._copy_variables()
        self._give_own_seeds()
        if self.variables == "replicated":
            self._make_optimizers_equal()
        elif self.flat is None:
            optimizer = getattr(self.main, "optimizer", None)
            if optimizer is not None and optimizer.built:
                self._build_for_owners(optimizer)

    def _build_for_owners(self, optimizer: Any) -> None:
        trained = [list(model.trainable_variables) for model in self.models]
        build_for_owners(optimizer, self.towers, trained)

    def settle(self, *, over_ranks: bool) -> None:
        """Gives Keras's accumulators what towers have added up, so that it is saved."""
        ranks = self.ranks if over_ranks else None
        sum_ranks = None if ranks is None else ranks.group.sum
        if self.accumulation.settle(sum_ranks) and self.variables == "replicated":
            self._make_optimizers_equal()

    def unlisted(self) -> list[list[Any]]:
        """Returns [K] lists of state that Keras does not list, without that of rows."""
        every = []
        for model in self.models:
            of_rows = set(map(id, states_of_rows(model)))
            every.append([v for v in unlisted_of(model) if id(v) not in of_rows])
        return every

    def kept_equal(self) -> list[Any]:
        """Lists tower 0's variables of which copies stay equal after every step."""
        model = self.main if self.flat is None else self.flat.flats[0]
        more = [v for v in self.unlisted()[0] if v.trainable and not is_random(v)]
        return [*model.trainable_variables, *more]

    def _copy_variables(self) -> None:
        """Copies what towers have of their own; seeds differ, and constants may not."""
        models = self.models if self.flat is None else self.flat.flats
        lists = [
            [v for v in (*model.variables, *more) if not is_random(v)]
            for model, more in zip(models, self.unlisted(), strict=True)
        ]
        constant = {
            id(column[0])
            for column in zip(*lists, strict=False)
            if not column[0].trainable and all(v is column[0] for v in column)
        }
        copy_to_replicas([[v for v in own if id(v) not in constant] for own in lists])

    def take_from_rank_0(self, number: int = 0) -> int:
        """Gives this rank's towers the values of rank 0, the optimizers' included.

        Returns rank 0's ``number``.
        """
        if self.ranks is None or not self._is_built:
            return number
        group = self.ranks.group
        own = getattr(self.main, "optimizer", None)
        is_built = own is not None and own.built
        has_built, number = numbers_of_rank_0(group, int(is_built), number)
        if has_built and not is_built:
            self.states.of(own, self.main.trainable_variables)
        model = self.main if self.flat is None else self.flat.flats[0]
        more = [v for v in self.unlisted()[0] if not is_random(v)]
        variables = [*model.variables, *more]
        for optimizer in self.appliers:
            if optimizer.built and not isinstance(optimizer, WrappedOptimizer):
                variables += optimizer.variables
        self.ranks.begin(list({id(v): v for v in variables}.values()))
        spread_seeds(group, global_seeds())
        self.make_equal()
        return number

    def take_state_of_ranks(self) -> None:
        """Gives all ranks' towers one state of those that do not train."""
        # Neither frozen weights, which do not change, nor metrics.
        layers = layers_of(self.main)
        state = [v for layer in layers for v in layer._non_trainable_variables]
        state += [v for v in self.unlisted()[0] if not (v.trainable or is_random(v))]
        if self.ranks is not None:
            synchronized = bool(synchronized_layers_of(self.main))
            self.ranks.take_state(state, of_last=synchronized)
            # A rank whose data has ended has not heard of these.
            eager = getattr(self.main, "run_eagerly", False)
            assigned = self.kept_equal() if eager else self.assigned
            self.ranks.take_state(assigned, of_last=True)
        if state or self.assigned:
            self.make_equal()

    def _freeze_alike(self) -> None:
        """Sets ``trainable`` in every copy as in tower 0's."""
        for model in self.distinct[1:]:
            layers = zip(layers_of(model), layers_of(self.main), strict=False)
            weights = zip(model.weights, self.main.weights, strict=False)
            for own, main in [*layers, *weights]:  # a layer before those inside it
                if own.trainable != main.trainable:
                    own.trainable = main.trainable

    def _follow_states_of_rows(self) -> None:
        """Resets states of rows in all towers where they are reset in tower 0."""
        every = [states_of_rows(model) for model in self.models]
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
        for k, model in enumerate(self.models):
            pairs = zip(seeds_of(model), seeds_of(self.main), strict=True)
            for own, main in pairs:
                if k > 0:
                    own.assign(tf.add(main.value, [k * _SEED_STEP, 0]))

    def prepare(self, data: Any) -> None:
        """Creates what the first batch would, from its specs, before a step is traced.

        A function that makes variables is traced twice.
        """
        self.build(data, metrics=True)
        main, own = self.main, getattr(self.main, "optimizer", None)
        has_own_step = type(main).train_step is not keras.Model.train_step
        if own is None or own.built or has_own_step or not main.trainable_variables:
            return
        if self.variables == "parameter_server":
            create_slots(own, main.trainable_variables)
        elif self.flat is None and self.variables == "sharded":
            self._build_for_owners(own)
        elif self.flat is None:
            self.states.of(own, main.trainable_variables)

    def build(self, data: Any, *, metrics: bool) -> None:
        """Creates the variables of the first batch, outside the step being traced."""
        lacks_metrics = metrics and not has_metrics_built(self.main, data)
        if self._is_built and not lacks_metrics:
            return
        batch = _batches.any_rows(data)
        with tf.init_scope():
            for model, tower in zip(self.distinct, self.towers, strict=False):
                with tf.device(tower.device), _naming(tower):
                    build_variables(batch, model)
                    if lacks_metrics and tower.is_main:  # whose metrics are used
                        build_metrics(batch, model)
            if not self._is_built:
                for model in self.models:
                    model.built = True
                self.make_equal()

    def _make_optimizers_equal(self) -> None:
        for own in self.appliers:
            if isinstance(own, WrappedOptimizer):
                own.copy_to_replicas()
            elif own.built and own is getattr(self.main, "optimizer", None):
                self.states.of(own, self.main.trainable_variables)
        self.states.make_equal(self.appliers)


@contextmanager
def _naming(tower: Tower) -> Iterator[None]:
    """Notes a tower in errors that are raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"(in {tower.name} of {tower.total}, on {tower.device})")
        raise


def _like(states: Sequence[Any], tower: Tower) -> list[tf.Variable]:
    with tf.device(tower.device):
        zeros = [tf.zeros_like(tf_variable(own)) for own in states]
        return [tf.Variable(own, trainable=False) for own in zeros]


def _make(make_model: Callable[[], Any], device: str) -> Any:
    with tf.device(device):
        return _checked_model(make_model())


def _checked_model(model: Any) -> Any:
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
