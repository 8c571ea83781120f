"""``TowerModel``: a Keras model with a copy in every tower."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, Never, overload

import keras
import numpy as np
import tensorflow as tf

from tw_core import Tower
from tw_core import towers as make_towers
from tw_core.internal import check_flag, check_function, check_kind
from tw_core.ranks import RankGroup
from tw_keras import _checks, _following
from tw_keras._as_tower_0 import AsTower0
from tw_keras._copies.building import global_seeds
from tw_keras._copies.copies import Copies, Weigh
from tw_keras._files import written_beside
from tw_keras._keras_compat import (
    accumulates,
    back_up_at_once,
    dataset_of,
    end_iteration,
    note_end,
)
from tw_keras._lost_errors import naming_what_failed, or_without_xla
from tw_keras._over_ranks.agreement import settings_of
from tw_keras._over_ranks.forgotten import warn_if_forgotten
from tw_keras._over_ranks.local_steps import LocalSteps, read_local_steps
from tw_keras._over_ranks.ranks import Ranks
from tw_keras._steps import Steps
from tw_keras._update.states import Save
from tw_reduce import Reducer, ReducerState, StatefulReducer
from tw_reduce.internal import is_stateful
from tw_reduce.reducers import check_adds


class TowerModel(AsTower0):
    """Trains copies of a Keras model on several devices as one model.

    ``compile``, ``fit``, ``evaluate``, ``predict`` and callbacks are Keras's. Each
    batch is cut into the towers' parts, every tower runs the ``train_step`` of its
    copy, overridden or not, and the towers' gradients are reduced before an optimizer
    applies them. Metrics see the whole batch.

    The trained model is ``model.towers[0]``, an ordinary Keras model; ``save``,
    ``summary`` and the like act on it. Its non-trainable state, such as moving
    averages, is tower 0's.

    >>> import keras
    >>> import numpy as np
    >>> def make_model():
    ...     return keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    >>> model = TowerModel(make_model, ["/cpu:0"] * 2)
    >>> model.compile(keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    >>> history = model.fit(np.ones([8, 3]), np.ones([8, 1]), verbose=0)
    >>> sorted(history.history), model.towers[0].count_params()
    (['loss', 'mae'], 4)
    """

    _evaluates = False  # Keras's fit evaluates between epochs.
    _fits = _stops = _has_failed = False
    _batch_method = "train_step"  # of the last call of train_on_batch and the like
    _saves = False  # Whether a callback of rank 0 may, as an epoch ends.
    _test_batches: Any = None

    def __init__(
        self,
        make_model: Callable[[], keras.Model],
        devices: Sequence[int | str | Tower] | int | None = None,
        *,
        variables: Literal["replicated", "sharded", "parameter_server"] = "replicated",
        reducer: Reducer | StatefulReducer | None = None,
        weights: Weigh | None = None,
        loss_reduction: Literal["sum"] | None = None,
        inline: bool | None = None,
        group: RankGroup | None = None,
        data: Literal["own", "shared"] = "own",
        uneven: Literal["wait", "stop"] = "wait",
        local_steps: int | LocalSteps | None = None,
        wire_dtype: Literal["float16", "bfloat16"] | None = None,
        name: str | None = None,
    ) -> None:
        """Makes the copies, each on its tower's device.

        Args:
          make_model: returns a new Keras model, with the same structure in each call.
            The first batch may create its variables.
          devices: None for all GPUs that TensorFlow sees; a number for the first ones;
            a list of ints (GPU numbers) and device strings; or the result of
            ``tw_core.towers``.
          variables: ``"replicated"``: every tower has all variables and optimizer
            state; ``"sharded"``: every tower has all variables; one tower updates each,
            and the others copy it (with a ``group``, one tower of one rank; several may
            each update rows of a large variable); ``"parameter_server"``: all towers
            share one model, whose variables are on the host.
          reducer: adds gradients over towers; also called for one tower. One with
            memory, as in ``tw_reduce.compression``, compresses the gradients that
            towers send to each other or, with a ``group``, that ranks send after adding
            their towers' gradients. None for ``tw_reduce.all_reduce``, or where
            variables are not replicated, a sum where each is updated; a lone tower
            needs none.
          weights: takes a tower's ``x``, ``y`` and ``sample_weight`` and returns the
            weight of its mean loss, a scalar: for a mean over tokens, the number of
            tokens. None for the number of rows; losses that ``compile`` divides by the
            sum of their ``sample_weight`` are weighted by that sum.
          loss_reduction: ``"sum"`` if the differentiated loss is a sum over rows, as in
            a ``train_step`` that differentiates one loss per row: the towers' gradients
            are added, not averaged; with several towers or ranks, of one optimizer.
            What the step logs may be a sum or a mean over rows. None to use the
            reductions of the losses of ``compile``.
          inline: whether the towers' calls of the traced step are inlined, which runs
            small steps faster and starts large ones more slowly; None to decide by the
            number of operations. (A step is traced for tower 0 alone, and called for
            every tower with its own variables.)
          group: the processes that train together, from ``tw_ranks.join``: they train
            as one device on all their batches, with one history. None for this process
            alone.
          data: with ``group``: ``"own"``: every rank is given its own batches;
            ``"shared"``: all ranks are given the same batches, and each takes its rows
            of them.
          uneven: with ``group`` and ``data="own"``: ``"wait"``: an epoch ends when the
            last rank has run out of batches; ``"stop"``: when the first rank has.
          local_steps: with ``group``: how many steps each rank runs alone before all
            ranks average their weights, or ``LocalSteps``, which may have an outer
            optimizer. None: ranks exchange gradients in every step.
          wire_dtype: with ``group``: ``"float16"`` or ``"bfloat16"``, in which ranks
            send gradients; they are added in float32, and sums are rounded again. Above
            65,504 a gradient is infinite in float16. None: at least float32.
          name: the model's name.

        Raises:
          ValueError: unknown ``variables``, ``loss_reduction``, ``data``, ``uneven`` or
            ``wire_dtype``; ``data="shared"``, ``uneven="stop"``, ``local_steps`` or
            ``wire_dtype`` without a ``group``; ``wire_dtype`` with sharded variables,
            local steps or a reducer with memory; a reducer that averages; no device, or
            fewer GPUs than asked for; copies that share variables or differ; or a call
            inside the scope of a ``tf.distribute`` strategy.
          TypeError: ``make_model`` is not a function, needs arguments, or does not
            return a Keras model.
          RuntimeError: in a graph or a ``tf.function``.
        """
        if isinstance(make_model, keras.Model):
            raise TypeError(
                "TowerModel: make_model must be a function that returns a new model "
                f"for each tower; got the model {make_model.name!r}."
            )
        check_function(make_model=make_model)
        _checks.check_needs_nothing(make_model)
        _checks.check_choices(
            variables=(variables, ("replicated", "sharded", "parameter_server")),
            loss_reduction=(loss_reduction, ("sum", None)),
            data=(data, ("own", "shared")),
            uneven=(uneven, ("wait", "stop")),
            wire_dtype=(wire_dtype, ("float16", "bfloat16", None)),
        )
        if inline is not None:
            check_flag(inline=inline)
        _checks.check_outside()
        super().__init__(name=name)
        towers = make_towers(devices)
        if reducer is not None:
            reducer = check_adds(reducer=reducer)
        if weights is not None:
            check_function(weights=weights)
        if wire_dtype is not None:
            _checks.check_sends_gradients(
                local_steps=local_steps is not None,
                sharded_variables=variables == "sharded",
                reducer_with_memory=is_stateful(reducer),
            )
        ranks = _ranks_of(group, data, uneven, local_steps, wire_dtype)
        # Keras would track, save and count models in a list, but not those in here.
        self._copies = Copies(
            make_model,
            towers,
            variables,
            reducer=reducer,
            weigh=weights,
            adds=loss_reduction == "sum",
            inline=inline,
            ranks=ranks,
        )
        self._steps = Steps(self._copies)
        self.jit_compile = False  # XLA compiles towers, never all of them together
        if getattr(self._copies.main, "compiled", False):  # a model that was loaded
            self._copies.adopt_optimizers()
            super().compile(optimizer=self._copies.main.optimizer, jit_compile=False)

    @property
    def towers(self) -> list[Any]:
        """The K copies, the first of which is saved; one model K times if shared."""
        return list(self._copies.models.by_tower)

    @property
    def stop_training(self) -> bool:
        """Whether ``fit`` stops; with a ``group``, true once all ranks know."""
        ranks = self._ranks
        return self._stops if ranks is None else ranks.stops

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        ranks, self._stops = self._ranks, value
        if ranks is not None and value:
            ranks.ask_to_stop()
        elif ranks is not None:
            ranks.go_on()

    @property
    def _ranks(self) -> Ranks | None:
        copies = vars(self).get("_copies")  # Keras asks before the copies are made.
        return None if copies is None else copies.ranks

    @property
    def devices(self) -> list[str]:
        """The K towers' devices."""
        return [tower.device for tower in self._copies.towers]

    @property
    def reducer_states(self) -> list[ReducerState]:
        """The memory of a reducer that has one, for each optimizer that has applied."""
        return self._copies.memory.holders

    def copy_to_replicas(self) -> None:
        """Copies the values of tower 0, its optimizer's included, to all towers.

        ``fit``, ``evaluate`` and ``predict`` call it first, and methods of this class
        that load values call it last. Call it after changing ``towers[0]`` and before
        ``train_on_batch`` and the like.
        """
        self._copies.make_equal()

    @overload
    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        *,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | Literal["auto"] = "auto",
        auto_scale_loss: bool = True,
    ) -> None: ...

    @overload  # As a model's own ``compile`` takes them.
    def compile(
        self,
        *args: Any,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None: ...

    def compile(
        self,
        *args: Any,
        run_eagerly: bool = False,
        steps_per_execution: int = 1,
        jit_compile: bool | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        """Compiles every tower with its model's ``compile``, which may be overridden.

        Args:
          *args: optimizer, loss and so on, as the towers' ``compile`` takes them.
            One optimizer serves all towers, each with its own variables.
            An optimizer may be a ``tw_core.TowerOptimizerLike`` over the towers'
            variables, such as ``tw_ampopt.TowerOptimizer``, which scales losses and
            accumulates.
          run_eagerly: as in Keras: tower 0 runs its step on the whole batch, and the
            other towers copy its variables.
          steps_per_execution: as in Keras.
          jit_compile: whether XLA compiles each tower's step, between the sums over
            towers and the metrics; of one tower alone, the whole step. ``"auto"`` as
            Keras decides: if a tower is on a GPU and XLA can compile all layers. If
            XLA then fails, steps go on without it, except with a ``group``.
          **kwargs: like ``args``, by name.

        Raises:
          ValueError: losses whose reduction is ``"none"``; ``run_eagerly`` with layers
            synchronised over ranks; an unknown ``jit_compile``.
        """
        copies = self._copies
        if jit_compile not in ("auto", True, False, None):  # None is Keras's False.
            raise ValueError(
                f"jit_compile must be True, False or 'auto'; got {jit_compile!r}."
            )
        if run_eagerly:
            copies.check_eager()
        if copies.ranks is not None:
            copies.ranks.forget_steps()
        copies.compile(args, kwargs)
        for model in copies.models.distinct:
            model.run_eagerly, model.jit_compile = run_eagerly, False
        copies.setting.jit_compile = not run_eagerly and copies.compiles(jit_compile)
        copies.may_fall_back = jit_compile == "auto" and copies.ranks is None
        super().compile(
            optimizer=copies.main.optimizer,
            run_eagerly=run_eagerly,
            steps_per_execution=steps_per_execution,
            jit_compile=False,
            auto_scale_loss=False,
        )

    def train_step(self, data: Any) -> Any:
        """Runs every tower's ``train_step`` on its part of a batch."""
        return self._steps.step("train_step", data)

    def test_step(self, data: Any) -> Any:
        """Runs every tower's ``test_step`` on its part of a batch."""
        return self._steps.step("test_step", data)

    def predict_step(self, data: Any) -> Any:
        """Runs every tower's ``predict_step``; the rows are in the batch's order."""
        return self._steps.predict(data)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | Literal["auto"] = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        **newer: Never,
    ) -> keras.callbacks.History:
        """Trains as ``keras.Model.fit`` does, with its arguments, over all towers.

        Changes that callbacks make in tower 0 are copied to the other towers. With a
        ``group`` all ranks call it; rank 0 shows progress and runs Keras's callbacks
        that write files.
        """
        if self._ranks is None:
            warn_if_forgotten()
        self.copy_to_replicas()
        bound = _FIT.bind(  # An argument of a newer Keras passes through.
            *(self, x, y, batch_size, epochs, verbose, callbacks, validation_split),
            *(validation_data, shuffle, class_weight, sample_weight, initial_epoch),
            *(steps_per_epoch, validation_steps, validation_batch_size),
            *(validation_freq,),
            **newer,
        )
        ranks = self._ranks
        if ranks is not None:
            callbacks = callbacks or []
            if not ranks.is_first:
                bound.arguments["verbose"] = 0
            ranks.num_calls += 1
            if ranks.alone is not None:
                _following.check_saves(callbacks)
                ranks.alone.check_calls(self.steps_per_execution)
            ranks.average_rest()
            stops = _following.may_stop(callbacks)
            settings = settings_of(self, bound.arguments)
            if self._copies.setting.shards is not None:
                _following.check_callbacks(callbacks)
                settings["towers"] = len(self._copies.towers)
            ranks.begin_fit(settings, may_stop=stops)
            # Rank 0 saves the state of which ranks have parts.
            may_save = ranks.is_first and _following.may_save(callbacks)
            self._saves = bool(self._copies.states) and ranks.is_any(may_save)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            if ranks is not None:
                callbacks.append(_following.follower(self._copies, callbacks.callbacks))
        elif callbacks or ranks is not None:
            callbacks = [*tf.nest.flatten(callbacks)]
            callbacks = _following.of_this_rank(callbacks, ranks)
            if ranks is not None:
                back_up_at_once(callbacks)
            _following.show_tower_0(callbacks, self._copies.main)
            bound.arguments["callbacks"] = [
                *callbacks,
                _following.follower(self._copies, callbacks),
            ]
        self._fits = True
        try:
            with (
                self._noting_failure(),
                self._accumulating(callbacks),
                self._copies.sharded.finalizing(self._copies.optimizer),
            ):
                history = super().fit(*bound.args[1:], **bound.kwargs)
        finally:
            end_iteration(self._copies.train_batches)
            self._fits, self._copies.train_batches = False, None
        self.copy_to_replicas()  # Averages replace weights when training ends.
        return history

    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | Literal["auto"] = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **newer: Never,
    ) -> Any:
        """Evaluates as ``keras.Model.evaluate`` does, over all towers.

        With a ``group`` all ranks call it, and get results over all ranks' rows.
        """
        self.copy_to_replicas()
        bound = _EVALUATE.bind(
            *(self, x, y, batch_size, verbose, sample_weight, steps, callbacks),
            return_dict,
            **newer,
        )
        ranks = self._ranks
        self._follow(bound.arguments)
        if ranks is not None:
            ranks.num_calls += 1
            if not self._fits:
                ranks.average_rest()
            if not ranks.is_first:
                bound.arguments["verbose"] = 0
        self._evaluates = True
        try:
            with self._noting_failure():
                return super().evaluate(*bound.args[1:], **bound.kwargs)
        finally:
            end_iteration(self._test_batches)
            self._evaluates, self._test_batches = False, None

    @contextmanager
    def _accumulating(self, callbacks: Any) -> Iterator[None]:
        """Lets towers accumulate gradients, unless callbacks may read optimizers."""
        copies = self._copies
        # A reducer's memory depends on how often it is used, which no callback changes.
        at_once = not copies.memory and _following.look_between_batches(callbacks)
        over_towers = [o for o in copies.optimizers if getattr(o, "accumulates", False)]
        if self._ranks is not None and (
            over_towers or any(map(accumulates, copies.optimizers))
        ):
            at_once = self._ranks.is_any(at_once)
        copies.setting.at_once.assign(at_once)
        try:
            yield
        finally:
            copies.setting.at_once.assign(True)
            # After an epoch nothing is left; after an error ranks are out of step.
            copies.settle(over_ranks=False)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        self._has_failed = False
        try:
            with naming_what_failed(self._steps):
                yield
        except BaseException:
            self._has_failed = True
            if self._ranks is not None and self._ranks.alone is not None:
                self._ranks.alone.drop()
            raise

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | Literal["auto"] = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        **newer: Never,
    ) -> Any:
        """Predicts as ``keras.Model.predict`` does, over all towers."""
        self.copy_to_replicas()
        bound = _PREDICT.bind(self, x, batch_size, verbose, steps, callbacks, **newer)
        self._follow(bound.arguments)
        with naming_what_failed(self._steps):
            return super().predict(*bound.args[1:], **bound.kwargs)

    def _follow(self, arguments: dict[str, Any]) -> None:
        """Copies tower 0 after the callbacks of a call outside of ``fit``."""
        callbacks = arguments.get("callbacks")
        if callbacks and not isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks = [*tf.nest.flatten(callbacks)]
            arguments["callbacks"] = [
                *callbacks,
                _following.follower(self._copies, callbacks),
            ]

    def predict_on_batch(self, x: Any) -> Any:
        """Predicts a batch, over all towers, as ``keras.Model.predict_on_batch``."""
        with naming_what_failed(self._steps):
            return super().predict_on_batch(x)

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function that trains; in a ``group`` its errors name lost ranks."""
        self._make("train_function", force)

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function that evaluates."""
        self._make("test_function", force)

    def make_predict_function(self, force: bool = False) -> None:
        """Makes the function that predicts."""
        self._make("predict_function", force)

    def _make(self, name: str, force: bool) -> None:
        before = vars(self).get(name)
        getattr(super(), f"make_{name}")(force)
        made, ranks = vars(self).get(name), self._ranks
        if made is None or made is before:
            return
        global_seeds()  # A step that makes them is traced twice.
        if ranks is not None and name == "train_function":
            made = ranks.running(made)
        if self._copies.setting.jit_compile:
            made = or_without_xla(made, name, self, self._steps)
        setattr(self, name, made)

    def _finish_epoch(self) -> None:
        dataset = dataset_of(self._copies.train_batches)
        ranks = self._ranks
        if ranks is not None and dataset is not None and not ranks.results.has_stepped:
            # A rank without any batch learns the exchanges of the others from a trace.
            specs, eagerly = dataset.element_spec, self.run_eagerly
            self._steps.trace_for_others(specs, run_eagerly=eagerly)
        self._steps.finish_epoch()
        self._copies.take_state_of_ranks()

    def reset_metrics(self) -> None:
        """Resets the metrics."""
        if self._ranks is not None:
            self._ranks.results.part_metrics()
        super().reset_metrics()

    def train_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Trains on a batch as ``keras.Model.train_on_batch`` does, over all towers.

        With a ``group`` all ranks call it, and get results over all ranks' rows.
        """
        self._copies.memory.forget_gathered()
        return self._on_batch("train_on_batch", "train_step", args, kwargs)

    def test_on_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates a batch as ``keras.Model.test_on_batch`` does, over all towers.

        With a ``group`` all ranks call it, and get results over all ranks' rows.
        """
        return self._on_batch("test_on_batch", "test_step", args, kwargs)

    def _on_batch(self, name: str, step: str, args: Any, kwargs: Any) -> Any:
        plain, self._batch_method = getattr(keras.Model, name), step

        def run(*args: Any, **kwargs: Any) -> Any:
            with naming_what_failed(self._steps):
                return plain(self, *args, **kwargs)

        if (ranks := self._ranks) is None:
            return run(*args, **kwargs)
        ranks.num_calls += 1
        bound = inspect.signature(plain).bind(self, *args, **kwargs)
        as_dict = bound.arguments.get("return_dict", False)
        bound.arguments["return_dict"] = True
        logs = self._merged_logs(ranks, step, run(*bound.args[1:], **bound.kwargs))
        logs = {key: np.asarray(value).tolist() for key, value in logs.items()}
        return logs if as_dict else self._flatten_metrics_in_order(logs)

    def _get_metrics_result_or_logs(self, logs: Any) -> Any:
        # Keras calls this at the end of an epoch, and of an evaluation.
        if not self._evaluates:
            if self._ranks is not None:
                self._finish_epoch()
            self._copies.settle(over_ranks=True)
            if self._saves:
                for state in self._copies.states:
                    state.gather()
        if self._ranks is not None:
            method = "test_step" if self._evaluates else "train_step"
            logs = self._merged_logs(self._ranks, method, logs)
        return super()._get_metrics_result_or_logs(logs)

    def _merged_logs(self, ranks: Ranks, method: str, logs: Any) -> Any:
        logs, shown = ranks.results.merge_logs(method, logs, self.get_metrics_result())
        ranks.results.merge_metrics(self.metrics)
        results = self.get_metrics_result()
        if not logs or set(logs) == set(results):
            return results
        return {**logs, **{name: results[name] for name in shown}}

    def set_weights(self, weights: Any) -> None:
        """Sets all towers' weights."""
        self._copies.main.set_weights(weights)
        self.copy_to_replicas()

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        """Loads a plain model's saved weights into all towers.

        The reducer's memory is loaded too, if it was saved beside them.
        """
        copies = self._copies
        filepath = args[0] if args else kwargs["filepath"]
        with ExitStack() as reading:
            for state in copies.states:
                reading.enter_context(state.loading(filepath, copies.main))
            copies.main.load_weights(*args, **kwargs)
        self.copy_to_replicas()

    def save_weights(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Saves tower 0's weights, as the plain model does.

        With a ``group``, rank 0 writes, and other ranks wait until the file exists,
        unless they are in ``fit``, or it ended with an error or Ctrl-C. Rank 0 waits
        for no rank, and may save alone, unless ranks have shards of the optimizer's
        state, which it then gathers.
        """
        self._save(self._copies.main.save_weights, filepath, *args, **kwargs)

    def save(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
        """Saves tower 0, an ordinary model; loading it does not need this package.

        An optimizer over towers, such as ``tw_ampopt.TowerOptimizer``, is not saved
        with it; save that with ``tf.train.Checkpoint``. With a ``group``, works as
        ``save_weights`` does. A reducer's memory is written to a file beside it.
        """
        self._save(self._copies.main.save, filepath, *args, **kwargs)

    def _save(self, write: Any, filepath: Any, *args: Any, **kwargs: Any) -> None:
        ranks, what = self._ranks, f"the save of {filepath}"
        if ranks is not None:  # Rank 0 may have saved alone before the last call.
            what += f" after {ranks.num_calls} calls of fit and the like"
        copies = self._copies
        if not (self._fits or self._has_failed):
            copies.sharded.gather()
        if ranks is not None and not ranks.is_first:
            # Rank 0 may be waiting for this rank, whose fit ended with an error.
            if not (self._fits or self._has_failed):
                ranks.group.wait_for(what)
            return
        overwrite = args[0] if args else kwargs.get("overwrite", True)
        with (
            written_beside(filepath, overwrite=overwrite) as path,
            ExitStack() as writing,
        ):
            save = Save(
                path=path,
                weights=copies.main.weights,
                fits=self._fits,
                has_failed=self._has_failed,
            )
            for state in copies.states:
                writing.enter_context(state.saving(save))
            with copies.without_wrapped():
                write(path, *args, **kwargs)
        if not self._fits:
            copies.sharded.forget_gathered()
        if ranks is not None and not self._fits:
            ranks.group.tell(what)

    def _maybe_symbolic_build(
        self, iterator: Any = None, data_batch: Any = None
    ) -> None:
        # Keras calls this before it traces a step.
        note_end(iterator)
        dataset = dataset_of(iterator)
        data = getattr(dataset, "element_spec", data_batch)
        method = "test_step" if self._evaluates else "train_step"
        method = self._batch_method if iterator is None else method
        ranks, trains = self._ranks, not self._evaluates
        if trains:
            self._copies.train_batches = iterator
        else:
            self._test_batches = iterator
        is_new = False
        if data is not None:
            is_new = self._copies.prepare(data, method)
            if ranks is not None and self._fits and trains and not self.run_eagerly:
                self._steps.trace_beforehand(data)
        takes = is_new or self._evaluates or (ranks is not None and not ranks.has_begun)
        if ranks is not None and takes and not self._fits:
            self._copies.take_from_rank_0()


def _ranks_of(
    group: RankGroup | None,
    data: str,
    uneven: str,
    local_steps: int | LocalSteps | None,
    wire_dtype: Any,
) -> Ranks | None:
    alone = read_local_steps(local_steps)
    if group is None:
        _checks.check_alone(
            data=(data, "own"),
            uneven=(uneven, "wait"),
            local_steps=(local_steps, None),
            wire_dtype=(wire_dtype, None),
        )
        return None
    check_kind(RankGroup, "from tw_ranks.join, or have its methods", group=group)
    return Ranks(
        group,
        shares_data=data == "shared",
        ends_first=uneven == "stop",
        local_steps=alone,
        wire_dtype=wire_dtype,
    )


_FIT = inspect.signature(keras.Model.fit)
_EVALUATE = inspect.signature(keras.Model.evaluate)
_PREDICT = inspect.signature(keras.Model.predict)
