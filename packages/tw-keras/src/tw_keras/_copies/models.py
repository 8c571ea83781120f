"""The towers' models: made, built from a first batch, and kept equal."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_core import Tower, copy_to_replicas
from tw_core.internal import copy_values, host_of, tf_variable
from tw_keras._checks import check_adapted
from tw_keras._copies import building
from tw_keras._keras_compat import layers_of

_SEED_STEP = 0x9E3779B9  # odd and large, so that layers' seeds stay apart


class Models:
    """A model per tower, or one that all share; the first is saved.

    Their state is more than Keras lists of it: variables that layers hold elsewhere
    (``unlisted``), seeds, which differ between towers, and states of stateful recurrent
    layers, which belong to the rows of a tower.
    """

    def __init__(
        self, make_model: Callable[[], Any], towers: Sequence[Tower], *, is_shared: bool
    ) -> None:
        """Calls ``make_model`` for every tower, or once, for the first one's host."""
        self._towers, self._is_shared = towers, is_shared
        devices = [tower.device for tower in towers]
        self._homes = [host_of(devices[0])] if is_shared else devices
        made = [_make(make_model, device) for device in self._homes]
        # [K]; one model K times where towers share it
        self.by_tower = made * (len(towers) // len(made))
        self.distinct = list(dict.fromkeys(made))
        self.main = made[0]
        self.states_by_row: Sequence[Sequence[Any]] = ()  # [K], each tower's own
        self._copied: list[list[int]] = []  # ids of the variables, as last copied
        self.are_built = False
        self._built_for = set[str]()  # names of steps

    def counterparts(self, variables: Sequence[Any]) -> list[list[Any]]:
        """Returns [K] lists: each tower's counterparts of tower 0's ``variables``."""
        columns = zip(*[model.variables for model in self.by_tower], strict=True)
        known = {id(column[0]): column for column in columns}
        if any(id(v) not in known for v in variables):
            known |= {id(c[0]): c for c in zip(*self.unlisted(), strict=True)}
        total = len(self._towers)
        found = [known.get(id(v), (v,) * total) for v in variables]
        return [[column[k] for column in found] for k in range(total)]

    def unlisted(self) -> list[list[Any]]:
        """Returns [K] lists of state not listed by Keras, without per-row states."""
        every = []
        for model in self.by_tower:
            of_rows = set(map(id, building.states_of_rows(model)))
            found = building.unlisted_of(model)
            every.append([v for v in found if id(v) not in of_rows])
        return every

    def unlisted_state(self) -> list[Any]:
        """Lists tower 0's state not listed by Keras, also without random generators."""
        return [v for v in self.unlisted()[0] if not building.is_random(v)]

    def kept_equal(self) -> list[Any]:
        """Lists tower 0's variables whose copies are equal after every step."""
        more = [v for v in self.unlisted_state() if v.trainable]
        return [*self.main.trainable_variables, *more]

    def shared_state(self) -> list[Any]:
        """Lists shared variables, which tower 0 assigns; not states of generators."""
        if not self._is_shared:
            return []
        listed = [v for v in self.main.variables if not building.is_random(v)]
        return [*listed, *self.unlisted_state()]

    def make_equal(self) -> bool:
        """Checks that the models match, and copies tower 0's values to all.

        Returns False, without effect, before all are built.
        """
        if not all(model.built for model in self.by_tower):
            return False
        self.are_built = True
        self._follow_states_of_rows()
        if not self._is_shared and len(self._towers) > 1:
            check_adapted(self.distinct)
            self._copy_variables()
            self._give_own_seeds()
        return True

    def _follow_states_of_rows(self) -> None:
        """Resets per-row states in all towers if they are reset in tower 0."""
        every = [building.states_of_rows(model) for model in self.by_tower]
        if self._is_shared and every[0]:
            if len(self.states_by_row) != len(self._towers):
                more = [_zeros_like(every[0], tower) for tower in self._towers[1:]]
                self.states_by_row = [every[0], *more]
            every = [list(states) for states in self.states_by_row]
        self.states_by_row = every
        for first, *others in zip(*every, strict=True):
            if not np.any(tf_variable(first).numpy()):
                for state in others:
                    state.assign(tf.zeros_like(tf_variable(state)))

    def _copy_variables(self) -> None:
        """Copies tower 0's variables, except seeds and shared constants."""
        lists = [
            [v for v in (*model.variables, *more) if not building.is_random(v)]
            for model, more in zip(self.by_tower, self.unlisted(), strict=True)
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

    def _give_own_seeds(self) -> None:
        """Gives every tower its own random seeds, derived from tower 0's.

        Otherwise dropout would zero the same positions in all towers' parts.
        """
        seeds = [building.seeds_of(model) for model in self.by_tower]
        for k, of_tower in enumerate(seeds[1:], start=1):
            for seed, main in zip(of_tower, seeds[0], strict=True):
                seed.assign(tf.add(main.value, [k * _SEED_STEP, 0]))

    def compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compiles every model, with ``trainable`` as in tower 0's."""
        self._built_for.clear()
        for model in self.distinct[1:]:
            layers = zip(*map(layers_of, (model, self.main)), strict=False)
            weights = zip(model.weights, self.main.weights, strict=False)
            for other, main in [*layers, *weights]:  # outer layers before inner ones
                if other.trainable != main.trainable:
                    other.trainable = main.trainable
        for model, tower in zip(self.distinct, self._towers, strict=False):
            with tf.device(tower.device):
                model.compile(*args, **options)

    def build(self, data: Any, method: str) -> bool:
        """Creates a step's variables from its batch; returns whether layers are new.

        A later step may call layers that the first has not.
        """
        lacks_layers = not self.are_built or (
            method not in self._built_for and bool(building.unbuilt_of(self.main))
        )
        lacks_metrics = method != "predict_step" and not (
            self.are_built and building.has_metrics_built(self.main, data)
        )
        if not (lacks_layers or lacks_metrics):
            return False
        with tf.init_scope():
            if lacks_layers:
                places = zip(self.distinct, self._towers, self._homes, strict=False)
                for model, tower, home in places:
                    with tf.device(home), naming(tower):
                        building.build_layers(data, model, method)
            main, first = self.main, self._towers[0]
            if lacks_metrics and not building.has_metrics_built(main, data):
                with tf.device(first.device), naming(first):
                    building.build_metrics(data, main, method)
        self._built_for.add(method)
        return lacks_layers


@contextmanager
def naming(tower: Tower) -> Iterator[None]:
    """Adds a note that names the tower to errors raised inside."""
    try:
        yield
    except Exception as error:
        error.add_note(f"(in {tower.name} of {tower.total}, on {tower.device})")
        raise


def _zeros_like(states: Sequence[Any], tower: Tower) -> list[tf.Variable]:
    with tf.device(tower.device):
        zeros = [tf.zeros_like(tf_variable(state)) for state in states]
        return [tf.Variable(value, trainable=False) for value in zeros]


def _make(make_model: Callable[[], Any], device: str) -> Any:
    with tf.device(device):
        model = make_model()
    if not isinstance(model, keras.Model):
        raise TypeError(
            "TowerModel: make_model must return a keras.Model; got "
            f"{type(model).__name__}."
        )
    return model
