"""The copies of a model: made, built, compiled, kept equal, and run side by side."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tw_builders._owners import owned
from tw_builders._parts import cut, on_devices
from tw_builders.tower_model import _batches
from tw_builders.tower_model._checks import (
    adds,
    check_adapted,
    check_eager,
    check_losses,
    check_one,
    check_optimizers,
    check_xla,
    divides_by_weights,
    layers_of,
    synchronized_layers_of,
)
from tw_builders.tower_model._lockstep import naming, run_in_lockstep
from tw_builders.tower_model._meetings import (
    Meetings,
    is_seed,
    optimizers_of,
    state_of,
)
from tw_builders.tower_model._updates import APPLY, FlatTraining, OptimizerStates
from tw_builders.tower_model._wrapped import WrappedOptimizer, wrapped
from tw_core import Tower, copy_to_replicas
from tw_core.devices import host_of
from tw_core.optimizers import create_slots
from tw_core.synchronized import (
    call_towers_once,
    joined_towers,
    synchronized_layers,
)
from tw_reduce import Reducer

Weigh = Callable[[Any, Any, Any], Any]
_SEED_STEP = 0x9E3779B9  # odd and large, so that layers' seeds stay apart


@dataclass
class Copies:
    """The copies of a model, of which the first is saved."""

    towers: Sequence[Tower]
    models: Sequence[Any]  # [K]; one model K times where towers share variables
    variables: str  # "replicated", "sharded" or "parameter_server"
    reducer: Reducer
    weigh: Weigh | None  # the ``weights`` of ``TowerModel``
    traces_once: bool = True
    inline: bool | None = None
    flat: FlatTraining | None = None
    compiled_by_xla: bool = False  # each tower's step, part by part
    _is_built: bool = False

    def __post_init__(self) -> None:
        self.states = OptimizerStates(self.towers)

    @classmethod
    def make(
        cls,
        make_model: Callable[[], Any],
        towers: Sequence[Tower],
        variables: str,
        *,
        flat_below_bytes: int,
        reducer: Reducer,
        weigh: Weigh | None,
        traces_once: bool,
        inline: bool | None,
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
            *(towers, models, variables, reducer, weigh, traces_once, inline, flat)
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

    def compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compiles every copy, all with tower 0's optimizers."""
        self._freeze_alike()
        self.states = OptimizerStates(self.towers)  # frees those of older optimizers
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
        check_optimizers(optimizers, self.variables)
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

    def check_compiled(self, *, run_eagerly: bool, by_xla: bool) -> None:
        """Refuses options of ``compile`` that do not work over towers."""
        if run_eagerly and len(self.towers) > 1:
            check_eager(synchronized_layers_of(self.main))
        if by_xla:
            check_xla(self.variables, traces_once=self.traces_once)

    def make_equal(self) -> None:
        """Checks that the copies match, and gives all of them tower 0's values."""
        if not all(model.built for model in self.models):
            return
        self._is_built = True
        if self.variables == "parameter_server":
            return
        check_adapted(self.distinct)
        if self.flat is not None:
            self.flat.make_equal()
        else:
            self._copy_variables()
        self._give_own_seeds()
        if self.variables == "replicated":
            self._make_optimizers_equal()
        elif self.flat is None:
            optimizer = getattr(self.main, "optimizer", None)
            if optimizer is not None:
                with tf.device(self.towers[0].device):
                    trained = [list(m.trainable_variables) for m in self.models]
                    create_slots(optimizer, owned(trained))

    def _copy_variables(self) -> None:
        """Copies what towers have of their own; seeds differ, and constants may not."""
        lists = [
            [v for v in model.variables if not is_seed(v)] for model in self.models
        ]
        constant = {
            id(column[0])
            for column in zip(*lists, strict=False)
            if not column[0].trainable and all(v is column[0] for v in column)
        }
        copy_to_replicas([[v for v in own if id(v) not in constant] for own in lists])

    def step(self, method: str, data: Any) -> Any:
        """Runs one step of every copy on its part of a batch; returns merged logs."""
        sizes, parts = self._cut(data, metrics=True)
        added = adds(self.main)
        weights = None if added else self._weights(parts, sizes)
        synchronized = synchronized_layers_of(self.main) if len(self.towers) > 1 else ()
        meetings = Meetings(
            self.towers,
            [self.main] if self._is_traced_once() else self.models,
            APPLY[self.variables],
            weights=weights,
            average=not added,
            reducer=self.reducer,
            states=self.states.of,
            synchronized=synchronized,
            applier=None if self.flat is None else self.flat.optimizer,
        )
        with meetings.held(), self.flat.training() if self.flat else nullcontext():
            logs = self._run(method, parts, meetings.combine)
        if added and self.main.losses:
            raise ValueError(
                "TowerModel: a loss that is added over rows cannot be told from the "
                "regularizers' losses, which every tower has; use the reduction "
                "'sum_over_batch_size', or no regularizers."
            )
        return meetings.logs(logs)

    def predict(self, data: Any) -> Any:
        """Returns every copy's predictions for its part, in the batch's order."""
        _, parts = self._cut(data, metrics=False)
        return _batches.join(self._run("predict_step", parts, _no_meeting))

    def _cut(self, data: Any, *, metrics: bool) -> tuple[Any, list[Any]]:
        """Cuts a batch into the towers' parts, and builds the models by the first."""
        data = _batches.tensors(data)
        sizes = _batches.checked_sizes(data, len(self.towers))
        parts = on_devices(cut(data, sizes), self.towers)
        self._build(data, metrics=metrics)
        return sizes, parts

    def _freeze_alike(self) -> None:
        """Sets ``trainable`` in every copy as in tower 0's."""
        for model in self.distinct[1:]:
            layers = zip(layers_of(model), layers_of(self.main), strict=False)
            weights = zip(model.weights, self.main.weights, strict=False)
            for own, main in [*layers, *weights]:  # a layer before those inside it
                if own.trainable != main.trainable:
                    own.trainable = main.trainable

    def _give_own_seeds(self) -> None:
        """Gives every tower its own random seeds, derived from tower 0's.

        Otherwise dropout would zero the same positions in all towers' parts.
        """
        for k, model in enumerate(self.models):
            for own, main in zip(_seeds_of(model), _seeds_of(self.main), strict=True):
                if k > 0:
                    own.assign(tf.add(main.value, [k * _SEED_STEP, 0]))

    def _is_traced_once(self) -> bool:
        return self.traces_once and not tf.executing_eagerly()

    def _run(
        self,
        method: str,
        parts: Sequence[Any],
        combine: Callable[[Any, list[Any]], Sequence[Any]],
    ) -> list[Any]:
        """Runs a step of every copy: traced once, or side by side."""
        if self._is_traced_once():
            return self._run_once(method, parts, combine)
        fns = [
            partial(getattr(model, method), part)
            for model, part in zip(self.models, parts, strict=True)
        ]
        # Sums over towers need a graph; `compile` refuses eager layers that need them.
        may_sum = not tf.executing_eagerly()
        with joined_towers(len(self.towers)) as joined:
            scopes = [_scopes(joined if may_sum else None, k) for k in range(len(fns))]
            return run_in_lockstep(fns, self.towers, combine, scopes=scopes)

    def _run_once(
        self,
        method: str,
        parts: Sequence[Any],
        combine: Callable[[Any, list[Any]], Sequence[Any]],
    ) -> list[Any]:
        def step(part: Any, model: Any, *_: Any) -> Any:
            with tf.variable_creator_scope(_refuse_new_variable), synchronized_layers():
                return getattr(model, method)(part)

        flats = [()] * len(parts) if self.flat is None else self.flat.flats
        states = [self.states.known(own) for own in optimizers_of(self.main)]
        seeds = _global_seeds()
        items = [
            (
                part,
                model,
                flat,
                [own[k] for own in states if own],
                seeds,
                _generators(model),
            )
            for k, (part, model, flat) in enumerate(
                zip(parts, self.models, flats, strict=True)
            )
        ]
        is_shared = self.variables == "parameter_server"
        return call_towers_once(
            step,
            items,
            [tower.scope for tower in self.towers],
            combine=combine,
            written_once=state_of(self.main) if is_shared else (),
            inline=self.inline,
            jit_compile=self.compiled_by_xla and method == "train_step",
        )

    def _weights(self, parts: Sequence[Any], sizes: Sequence[Any]) -> Any:
        weights = [
            self._weight(part, size, tower)
            for part, size, tower in zip(parts, sizes, self.towers, strict=True)
        ]
        is_equal = isinstance(weights[0], int) and len(set(weights)) == 1
        return None if is_equal else weights

    def _weight(self, part: Any, size: Any, tower: Tower) -> Any:
        if self.weigh is None and not divides_by_weights(self.main):
            return size
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
        with tf.device(tower.device):
            if self.weigh is not None:
                return self.weigh(x, y, sample_weight)
            if sample_weight is None:
                return size
            return tf.add_n(
                [tf.reduce_sum(own) for own in tf.nest.flatten(sample_weight)]
            )

    def prepare(self, data: Any) -> None:
        """Creates what the first batch would, from its specs, before a step is traced.

        A function that makes variables is traced twice.
        """
        self._build(data, metrics=True)
        main, own = self.main, getattr(self.main, "optimizer", None)
        has_own_step = type(main).train_step is not keras.Model.train_step
        if own is None or own.built or has_own_step or not main.trainable_variables:
            return
        if self.variables == "replicated" and self.flat is None:
            self.states.of(own, main.trainable_variables)
        elif self.variables == "parameter_server":
            create_slots(own, main.trainable_variables)

    def _build(self, data: Any, *, metrics: bool) -> None:
        """Creates the variables of the first batch, outside the step being traced."""
        lacks_metrics = metrics and not _has_metrics_built(self.main, data)
        if self._is_built and not lacks_metrics:
            return
        batch = _batches.any_rows(data)
        with tf.init_scope():
            for model, tower in zip(self.distinct, self.towers, strict=False):
                with tf.device(tower.device), naming(tower):
                    _build_variables(batch, model)
                    # Where one trace serves all, only tower 0's are used.
                    side_by_side = model.run_eagerly or not self.traces_once
                    if lacks_metrics and (tower.is_main or side_by_side):
                        _build_metrics(batch, model)
            if not self._is_built:
                for model in self.models:
                    model.built = True
                self.make_equal()

    def _make_optimizers_equal(self) -> None:
        optimizers = optimizers_of(self.main)
        for own in optimizers:
            if isinstance(own, WrappedOptimizer):
                own.copy_to_replicas()
            elif own.built and own is getattr(self.main, "optimizer", None):
                self.states.of(own, self.main.trainable_variables)
        if self.flat is not None and self.flat.optimizer is not None:
            optimizers = [self.flat.optimizer]
        self.states.make_equal(optimizers)


def _generators(model: Any) -> list[tf.Variable]:
    """Lists the states of TensorFlow's generators, which Keras does not list."""
    held = [value for layer in layers_of(model) for value in vars(layer).values()]
    return [own.state for own in held if isinstance(own, tf.random.Generator)]


def _seeds_of(model: Any) -> list[Any]:
    """Lists the [2] states of a model's random generators: a seed and a counter."""
    return [v for v in model.variables if is_seed(v)]


def _global_seeds() -> Sequence[tf.Variable]:
    """Lists the state of the generator that ``keras.random`` uses without a seed.

    Makes it if needed, which a step may not do. Towers share it, and draw in turn.
    """
    with tf.init_scope():
        draw = tf.function(lambda: keras.random.uniform([]), autograph=False)
        return tuple(draw.get_concrete_function().variables)


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


def _has_metrics_built(model: Any, data: Any) -> bool:
    stateful = list(model.metrics)
    y = data[1] if isinstance(data, tuple) and len(data) in (2, 3) else None
    outputs = getattr(model, "outputs", None) or ()
    if not model.run_eagerly and max(len(outputs), len(tf.nest.flatten(y))) > 1:
        # The loss of several outputs has metrics of its own, one per output.
        stateful.append(getattr(model, "_compile_loss", None))
    return all(getattr(own, "built", True) for own in stateful)


def _build_variables(batch: Any, model: Any) -> None:
    """Calls a model on symbols, unless it is built or only has a ``train_step``."""
    own_step = type(model).train_step is not keras.Model.train_step
    if model.built or (own_step and type(model).call is keras.Model.call):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(_symbols(batch))
    model(x)


def _build_metrics(batch: Any, model: Any) -> None:
    """Creates the state of a compiled model's losses and metrics."""
    optimizer, model.optimizer = model.optimizer, None  # its slots are placed elsewhere
    try:
        model._symbolic_build(data_batch=_symbols(batch))
    finally:
        model.optimizer = optimizer


def _symbols(batch: Any) -> Any:
    def symbol(spec: tf.TensorSpec | None) -> Any:
        return None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name)

    return tf.nest.map_structure(symbol, batch)


def _scopes(joined: Any, index: int) -> list[AbstractContextManager[Any]]:
    """Returns the contexts of a tower's thread."""
    own: list[AbstractContextManager[Any]] = [
        tf.variable_creator_scope(_refuse_new_variable)
    ]
    return own if joined is None else [*own, _synchronized(joined, index)]


@contextmanager
def _synchronized(joined: Any, index: int) -> Iterator[None]:
    with joined.tower(index), synchronized_layers():
        yield


def _refuse_new_variable(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
    del next_creator
    raise ValueError(
        f"TowerModel: the variable {kwargs.get('name')!r} was to be made in a step; "
        "make all variables in make_model, or in the layers' build."
    )


def _no_meeting(place: Any, brought: list[Any]) -> Sequence[Any]:
    raise RuntimeError(f"TowerModel: a predict_step came to {place} ({brought}).")
