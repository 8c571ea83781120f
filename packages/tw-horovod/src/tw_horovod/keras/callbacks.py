"""Callbacks for ``model.fit``."""

import warnings
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tw_core.internal import check_whole_number, is_variable
from tw_horovod._gradients.keras_optimizers import (
    Distributed,
    build,
    find_variables,
    refuse_loss_scale_around,
)
from tw_horovod._keras import IS_KERAS_2, keras
from tw_horovod._operations import ops
from tw_horovod._operations.objects import broadcast_object
from tw_horovod._operations.variables import broadcast_variables
from tw_horovod._state.group import find_group
from tw_horovod._state.queries import rank, size
from tw_ranks import check_same


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sends one rank's model and optimizer to all ranks before the first batch.

    It does so after every callback's ``on_train_begin``, as other callbacks may restore
    there; after the first batch if the root's model is not built by then. If only the
    root's model is built, because it was loaded, the others are built for the same
    shapes. Random states differ by rank, as after ``broadcast_variables``. The model no
    longer compiles its steps with XLA, which does not support these collectives.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Any = None
    ) -> None:
        """Sets the root.

        Args:
          root_rank: the rank whose values are sent.
          device: changes nothing.
          local_variables: one or several of the model's, which each rank keeps.

        Raises:
          ValueError: an item is not a variable.
        """
        super().__init__()
        find_group()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._local: dict[int, Any] = {}
        local = [] if local_variables is None else local_variables
        for variable in local if isinstance(local, list | tuple) else [local]:
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable as it is on each rank.

        Raises:
          ValueError: it is not a variable.
        """
        if not is_variable(var):
            raise ValueError(
                "BroadcastGlobalVariablesCallback: local_variables must be variables; "
                f"got {var!r}."
            )
        self._local[id(var)] = var

    def set_model(self, model: Any) -> None:
        """Takes the model, before its steps are traced."""
        super().set_model(model)
        if find_group().size > 1:
            model.jit_compile = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets an earlier training; warns if gradients will not be reduced.

        Raises:
          ValueError: under Keras 3, a loss scale is around the distributed optimizer.
        """
        self.broadcast_done = False
        optimizer = self.model.optimizer
        is_scaled = isinstance(getattr(optimizer, "inner_optimizer", None), Distributed)
        if is_scaled and not IS_KERAS_2:
            refuse_loss_scale_around()
        is_of_keras = type(optimizer).__module__.startswith(("keras.", "tf_keras."))
        has_own_step = type(self.model).train_step is not keras.Model.train_step
        reduces = _find_state(optimizer) or not is_of_keras or has_own_step
        if size() > 1 and not reduces:
            warnings.warn(
                f"BroadcastGlobalVariablesCallback: {type(optimizer).__name__!r} does "
                "not reduce gradients, so ranks will diverge. Keras gives models that "
                "it clones, copies or loads such an optimizer: compile the model again "
                "with hvd.DistributedOptimizer, or load it with hvd.load_model.",
                stacklevel=2,
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Broadcasts before the first epoch, unless the model is not built yet."""
        if self.broadcast_done:
            return
        known = self.model.get_build_config() if self.model.built else None
        known = broadcast_object(known, self.root_rank)
        if known and not self.model.built:  # The root has loaded its model.
            self.model.build_from_config(known)
        if not self.model.built:
            return
        build(self.model.optimizer, self.model.trainable_variables)
        self._broadcast()

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first batch if the model was not built before."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self.broadcast_done:
            return
        variables = [*self.model.variables, *find_variables(self.model.optimizer)]
        shared = {id(v): v for v in variables if id(v) not in self._local}
        broadcast_variables(list(shared.values()), root_rank=self.root_rank)
        self.broadcast_done = True


class CheckWeightsCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends ``fit`` when ranks have diverged: their weights differ in any bit.

    Not in Horovod. It compares checksums of the trainable variables, except those that
    the optimizer keeps local to each rank.
    """

    def __init__(self, every: int = 100) -> None:
        """Sets the interval.

        Args:
          every: batches between checks, 1 or more; the same on all ranks.

        Raises:
          ValueError: ``every`` is below 1.
          TypeError: ``every`` is not an integer.
        """
        super().__init__()
        find_group()
        self.every = check_whole_number(every=every, at_least=1)
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Checks the weights if a check is due.

        Raises:
          RuntimeError: ranks have diverged; they and the first variable are named.
        """
        self._batches += 1
        if self._batches % self.every == 0:
            state = _find_state(self.model.optimizer)
            local = {} if state is None else state.local
            shared = [v for v in self.model.trainable_variables if id(v) not in local]
            check_same(shared, group=find_group())


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages metrics over all ranks at the end of every epoch.

    List it before callbacks that read metrics.
    """

    def __init__(self, device: str = "") -> None:
        """Requires ``init`` to have been called.

        Args:
          device: changes nothing.
        """
        super().__init__()
        find_group()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the means into ``logs``."""
        if logs:
            names = sorted(logs)
            values = tf.constant([float(logs[name]) for name in names], tf.float64)
            label = f"metrics {', '.join(names)}"
            means = ops.allreduce(values, name=label).numpy().tolist()
            logs.update(zip(names, means, strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr`` times a multiplier, in some epochs."""

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        """Sets the schedule.

        Args:
          initial_lr: the rate that is multiplied.
          multiplier: a function m(epoch), or a base b for
            m(epoch) = b ** (epoch - start_epoch).
          start_epoch: the first epoch.
          end_epoch: the epoch after the last; None for no last one.
          staircase: whether the rate changes at the start of every epoch; otherwise at
            the start of every batch, with fractional epochs.
          momentum_correction: whether the velocities of SGD and RMSprop, which contain
            past learning rates, are multiplied by new rate / old rate.
          steps_per_epoch: batches per epoch; None for the number that ``fit`` knows.

        Raises:
          ValueError: no initial rate.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError(f"{type(self).__name__}: initial_lr must be a number.")
        self.initial_lr, self.staircase = initial_lr, staircase
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        """Determines the number of batches per epoch.

        Raises:
          ValueError: ``fit`` does not know it.
        """
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = self.params.get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: fit does not know how many batches make an "
                "epoch; pass steps_per_epoch."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        self.current_epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate."""
        epoch = self.current_epoch
        is_over = self.end_epoch is not None and epoch >= self.end_epoch
        if epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            self._set_rate(epoch + batch / self.steps_per_epoch)  # type: ignore[operator]
        elif batch == 0:
            self._set_rate(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the rate into ``logs``, as "lr"."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)

    def _set_rate(self, epoch: float) -> None:
        optimizer = self.model.optimizer
        old = float(optimizer.learning_rate)
        new = self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = new
        if not self.momentum_correction or not old or new == old:
            return
        # Horovod multiplies the momentum by new / old for one batch. In Keras 3, the
        # momentum is a constant of the traced step, so the velocities are multiplied.
        for velocity in _find_velocities(optimizer, self.model):
            velocity.assign(velocity * (new / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr`` divided by the number of ranks."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """Sets the target rate.

        Args:
          initial_lr: the rate at the end.
          warmup_epochs: number of epochs until then.
          momentum_correction: as in ``LearningRateScheduleCallback``.
          steps_per_epoch: as in ``LearningRateScheduleCallback``.
          verbose: whether rank 0 prints a line when the rate is reached.

        Raises:
          ValueError: no initial rate.
        """
        ranks = size()

        def multiplier(epoch: float) -> float:
            # An epoch ends with its last batch, not with the first of the next.
            done = (epoch + 1.0 / self.steps_per_epoch) / warmup_epochs  # type: ignore[operator]
            return (1.0 + done * (ranks - 1)) / ranks

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Puts the rate into ``logs``, and prints it at the end."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and epoch + 1 == self.end_epoch:
            reached = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the learning rate has reached {reached:g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the best model so far to ``filepath``, which is set before ``fit``.

    As in Horovod, whose Spark estimators set the path. List it on rank 0 alone.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        """Takes the arguments of Keras's ``ModelCheckpoint``, except the path.

        Args:
          monitor: as in ``ModelCheckpoint``; so are all others.
          verbose: 0 is silent, 1 prints a line per save.
          save_weights_only: whether to save weights, or the whole model.
          mode: ``"min"``, ``"max"`` or ``"auto"``: the best ``monitor``.
          save_freq: ``"epoch"``, or a number of batches.
        """
        super().__init__(
            f"best{'.weights.h5' if save_weights_only else '.keras'}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Requires the path.

        Raises:
          ValueError: there is none.
        """
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint: filepath is not set; set it before fit, or use "
                "keras.callbacks.ModelCheckpoint(path, save_best_only=True)."
            )
        super().on_train_begin(logs)


def _find_state(optimizer: Any) -> Any:
    """Returns the state of the distributed optimizer, which a loss scale may wrap."""
    known = (optimizer, getattr(optimizer, "inner_optimizer", None))
    return next((one._passes for one in known if isinstance(one, Distributed)), None)


def _find_velocities(optimizer: Any, model: Any) -> list[Any]:
    """Returns the variables in which SGD or RMSprop keep past steps."""
    if not model.built:  # Of Keras 2, it has no list of variables.
        return []
    own = getattr(optimizer, "inner_optimizer", optimizer)
    if hasattr(own, "get_slot_names"):  # of keras.optimizers.legacy
        has_momentum = "momentum" in own.get_slot_names()
        variables = model.trainable_variables if has_momentum else []
        return [own.get_slot(variable, "momentum") for variable in variables]
    if isinstance(own, keras.optimizers.SGD):
        return list(getattr(own, "momentums", None) or [])
    if isinstance(own, keras.optimizers.RMSprop):
        return list(getattr(own, "_momentums", None) or [])
    return []
