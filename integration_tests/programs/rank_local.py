"""What ranks do in ``test_local_steps``, and the same on one device, step by step."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from programs.rank_batches import own_batches
from programs.rank_training import X, dense, made
from tw_keras import LocalSteps, TowerModel

optimizers = keras.optimizers
EPOCHS = 2


def linear() -> keras.Model:
    return keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: optimizers.SGD(0.1),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: optimizers.Adam(0.02, epsilon=1e-3),
}


def outer(kind: str) -> Any:
    if kind == "":
        return None
    return optimizers.SGD(0.7, momentum=0.9, nesterov=kind == "nesterov")


def train(
    group: Any,
    of_ranks: Sequence[Sequence[int]],
    steps: int,
    how: tuple[str, str, str],  # optimizer, state, outer optimizer
    towers: int = 1,
    is_known: bool = True,
) -> Any:
    """Trains on batches of these rows, by rank; returns weights and what trains them.

    After each epoch: weights; then the optimizer's variables, and the outer's.
    """
    optimizer, state, kind = how
    local = LocalSteps(steps, outer(kind), state)
    model = made(group, linear, towers, local_steps=local)
    model.compile(OPTIMIZERS[optimizer](), "mse")
    data, seen = own_batches(group, of_ranks, is_known=is_known), []
    at_end = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: seen.append(model.get_weights())
    )
    first = made(None, linear, 1).get_weights()
    history = model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[at_end]).history
    ends = [tower.get_weights() for tower in model.towers]
    outers = [] if local.outer is None else local.outer.variables
    state = [own.numpy() for own in (*model.optimizer.variables, *outers)]
    return seen, state, ends, history["loss"], first


def simulate(
    first: Sequence[np.ndarray],
    of_ranks: Sequence[Sequence[int]],
    steps: int,
    how: tuple[str, str, str],
) -> Any:
    """Does what ``train`` does, for all ranks; returns weights, state and losses.

    Keras trains a model for each rank; what they average is computed in NumPy.
    """
    optimizer, state, kind = how
    ends = iter(np.cumsum([n for own in of_ranks for n in own]))
    batches = [
        [X[end - n : end] for n, end in zip(own, ends, strict=False)]
        for own in of_ranks
    ]
    models, outer_optimizer = [linear() for _ in of_ranks], outer(kind)
    for model in models:
        model.set_weights(first)
        model.compile(OPTIMIZERS[optimizer](), "mse", run_eagerly=True)
        model.optimizer.build(model.trainable_variables)
    start = [tf.Variable(own) for own in first]
    after, losses, length = [], [], max(map(len, of_ranks))
    counted = np.zeros([2, len(models)])  # rows and steps since the last average
    for _ in range(EPOCHS):
        seen = 0.0
        for n in range(length):
            for r, of_rank in enumerate(batches):
                if n < len(of_rank):
                    x, rows = of_rank[n], len(of_rank[n])
                    models[r].reset_metrics()
                    seen += rows * models[r].train_on_batch(x, x[:, :1] * 0.5 + 0.1)
                    counted[:, r] += rows, 1
            is_last = n + 1 == length
            if (n + 1) % steps and not is_last:
                continue
            mean = _mean([model.get_weights() for model in models], counted[0])
            if outer_optimizer:
                apart = [own - new for own, new in zip(start, mean, strict=True)]
                outer_optimizer.apply(apart, start)
                mean = [own.numpy() for own in start]
            for own, new in zip(start, mean, strict=True):
                own.assign(new)
            states = [[v.numpy() for v in one.optimizer.variables] for one in models]
            joined = _mean(states, counted[0])
            joined[0] = states[np.argmax(counted[1])][0]  # iterations
            for model in models:
                model.set_weights(mean)
                if state == "averaged" or is_last:
                    for own, new in zip(model.optimizer.variables, joined, strict=True):
                        own.assign(new)
            counted[:] = 0.0
        after.append(mean)
        losses.append(seen / sum(map(sum, of_ranks)))
    every = [*models[0].optimizer.variables]
    every += outer_optimizer.variables if outer_optimizer else []
    return after, [own.numpy() for own in every], losses


def _mean(lists: Any, weights: Sequence[float]) -> list[np.ndarray]:
    return [
        sum(own * weight for own, weight in zip(column, weights, strict=True))
        / sum(weights)
        for column in zip(*lists, strict=True)
    ]


def stopped(group: Any, rank: int) -> Any:
    """Stops on one rank in its second step; returns updates, and the last weights."""
    model = made(group, linear, 2, local_steps=2)
    model.compile(optimizers.SGD(0.1), "mse")

    def stop(batch: int, logs: Any = None) -> None:
        if batch == 1 and group.rank == rank:
            model.stop_training = True

    own = [keras.callbacks.LambdaCallback(on_train_batch_end=stop)]
    rows = X[group.rank * 4 : group.rank * 4 + 32]
    model.fit(rows, rows[:, :1], 4, 3, verbose=0, shuffle=False, callbacks=own)
    return int(model.optimizer.iterations), model.get_weights()


class Fails(keras.callbacks.Callback):
    """Ends ``fit`` by an error after two epochs and a half."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.history.epoch == [0, 1] and batch == 4:
            raise RuntimeError("interrupted")


def restarted(group: Any, folder: str) -> Any:
    """Trains undisturbed, and interrupted; returns both weights and momenta.

    Last is what the file of rank 0 has, and what validation gave.
    """
    x, found = X[group.rank * 20 : group.rank * 20 + 24], []
    for own in ([], [Fails()], []):
        outer = optimizers.SGD(0.7, momentum=0.9, nesterov=True)
        local = LocalSteps(4, outer)
        model = made(group, linear, 2, local_steps=local)
        model.compile(optimizers.Adam(0.02), "mse")
        backup = keras.callbacks.BackupAndRestore(folder)
        options = {"validation_data": (X, X[:, :1]), "shuffle": False, "verbose": 0}
        if own or found:
            options["callbacks"] = [backup, *own]
        try:
            history = model.fit(x, x[:, :1], 4, 4, **options)
        except RuntimeError:
            continue
        state = [*model.optimizer.variables, *outer.variables]
        found.append([model.get_weights(), [own.numpy() for own in state]])
    path = f"{folder}.{group.rank}.keras"
    model.towers[0].save(path)
    plain = keras.models.load_model(path)
    loss = plain.evaluate(X, X[:, :1], verbose=0)
    return found, plain.get_weights(), loss, history.history["val_loss"][-1]


def by_hand(group: Any) -> Any:
    """Trains on batches by hand, and evaluates; returns weights before and after."""
    model = made(group, linear, 2, local_steps=2)
    model.compile(optimizers.SGD(0.1), "mse")
    found = []
    for n in range(3):
        rows = X[n * 8 : n * 8 + 8][group.rank :: group.size]
        model.train_on_batch(rows, rows[:, :1])
        found.append(model.get_weights())
    model.evaluate(X, X[:, :1], verbose=0)
    return [*found, model.get_weights()]


def unfrozen(group: Any, folder: str, towers: int) -> Any:
    """Unfreezes a layer between epochs, after a step by hand; returns all weights.

    After each phase, with the outer momenta; then the same computed step by step.
    """
    outer = optimizers.SGD(0.7, momentum=0.9)
    model = made(group, dense, towers, local_steps=LocalSteps(2, outer))
    own = Descent(made(None, dense, 1).get_weights())
    batches = X[: 4 * 5 * group.size].reshape(5, group.size, 4, 4)
    found, wanted = [], []
    for n, trained in [(2, 2), (4, 0), (2, 2), (2, 0)]:
        for tower in model.towers:
            tower.layers[0].trainable = trained == 0
        model.compile(optimizers.SGD(0.1), "mse")
        own.average()
        own.first = 0 if trained == 0 else 2
        rows = np.concatenate([batches[k, group.rank] for k in range(n)])
        model.fit(rows, rows[:, :1], 4, verbose=0, shuffle=False)
        for k in range(0, n, 2):
            own.steps(batches[k : k + 2])
            own.average()
        found.append([*model.get_weights(), *(v.numpy() for v in outer.variables[2:])])
        wanted.append([*own.weights, *own.momenta[own.first :]])
        path = f"{folder}/{group.rank}"
        tf.train.Checkpoint(model=model.towers[0]).write(path)
        model.towers[0].save(f"{path}.keras")
        model.train_on_batch(batches[4, group.rank], batches[4, group.rank][:, :1])
        own.steps(batches[4:])
    return found, wanted


class Descent:
    """Steps of all ranks from the same weights, and an outer optimizer in NumPy."""

    def __init__(self, weights: list[np.ndarray]) -> None:
        self.weights, self.first = weights, 0
        self.momenta = [np.zeros_like(own) for own in weights]
        self._model = dense()
        self._of_ranks: list[list[np.ndarray]] = []

    def steps(self, batches: np.ndarray) -> None:
        """Makes SGD's steps with batches of all ranks."""
        self._of_ranks = []
        self._model.layers[0].trainable = self.first == 0
        self._model.compile(optimizers.SGD(0.1), "mse")
        for rank in range(batches.shape[1]):
            self._model.set_weights(self.weights)
            for x in batches[:, rank]:
                self._model.train_on_batch(x, x[:, :1])
            self._of_ranks.append(self._model.get_weights())

    def average(self) -> None:
        """Applies the change of the mean weights, with momentum."""
        if not self._of_ranks:
            return
        means = [np.mean(own, axis=0) for own in zip(*self._of_ranks, strict=True)]
        for n in range(self.first, len(means)):
            away = self.weights[n] - means[n]
            self.momenta[n] = 0.9 * self.momenta[n] - 0.7 * away
            self.weights[n] = self.weights[n] + self.momenta[n]
        for n in range(self.first):
            self.momenta[n] = np.zeros_like(self.momenta[n])
        self._of_ranks = []


def averaged(group: Any, of_ranks: Sequence[int]) -> Any:
    """Counts steps by hand; returns when a rank averaged, and what."""
    from tw_builders import ModelAverager

    weights = [
        [tf.Variable([0.0]), tf.Variable(10 * group.rank + k, dtype=tf.uint32)]
        for k in range(2)
    ]
    state = [[tf.Variable([1.0]), tf.Variable(0, dtype=tf.int64)]]
    averager = ModelAverager(
        weights, group=group, steps=2, state=lambda: state, keeps_state=True
    )
    seen = []
    for n in range(of_ranks[group.rank]):
        for own in weights:
            own[0].assign_add([1.0 + group.rank])
        state[0][0].assign_add([1.0])
        state[0][1].assign_add(1)
        if averager.after_step(weight=1 + group.rank):
            seen.append((n, float(weights[1][0][0])))
    averager.finish()
    ends = [float(own[0][0]) for own in weights]
    seeds = [int(own[1]) for own in weights]
    return seen, ends, float(state[0][0][0]), int(state[0][1]), seeds


def refused(group: Any, what: str) -> None:
    """Does what local steps refuse."""
    options: dict[str, Any] = {"group": group, "local_steps": 4}
    if what == "no group":
        options["group"] = None
    elif what == "unlike" and group.rank == 1:
        options["local_steps"] = 2
    model = TowerModel(linear, ["/cpu:0"], **options)
    calls = 3 if what == "calls" else 1
    model.compile("sgd", "mse", steps_per_execution=calls)
    saves = [keras.callbacks.BackupAndRestore("backup", save_freq=3)]
    own = saves if what == "saves" else []
    model.fit(X, X[:, :1], 4, verbose=0, callbacks=own)
