"""What ranks do with a reducer that has memory, and what NumPy makes of the same."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tw_core.testing import CPUS
from tw_keras import TowerModel
from tw_reduce import compression, partition

RANDOM = np.random.default_rng(0)
ROWS = [[8, 8, 4], [6, 6, 6, 6, 2]]  # of the batches of each rank
X = RANDOM.normal(size=(len(ROWS), 30, 40)).astype("float32")
Y = RANDOM.normal(size=(len(ROWS), 30, 64)).astype("float32")
SENT, EPOCHS, WHOLE = 200, 3, 7  # updates with whole gradients
TOP_K = compression.error_feedback(compression.top_k(count=SENT))
REDUCERS = {
    "top k": TOP_K,
    "whole first": compression.after(WHOLE, TOP_K),
    "by variable": partition(
        lambda info: "last" if info.shape[-1:] == (64,) else "first",
        {"first": None, "last": TOP_K},
    ),
    "power_sgd": compression.power_sgd(rank=2),
}


def make() -> keras.Model:
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(128, "tanh")
    return keras.Sequential([keras.Input([40]), hidden, keras.layers.Dense(64)])


def batches(rank: int) -> list[Any]:
    at = np.cumsum(ROWS[rank])[:-1]
    return list(zip(np.split(X[rank], at), np.split(Y[rank], at), strict=True))


class Fails(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise RuntimeError("interrupted")


class Notes(keras.callbacks.Callback):
    """Notes what is remembered as an epoch begins."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.found: dict[str, Any] = {}
        for holder in self.model.reducer_states:
            holder.save_own_variables(self.found)


def data_of(group: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_generator(
        lambda: batches(group.rank),
        output_signature=(tf.TensorSpec([None, 40]), tf.TensorSpec([None, 64])),
    )


def without_companion(group: Any, folder: str) -> Any:
    """Goes on from a backup that has lost its memory; returns what is remembered."""
    reducer, notes = REDUCERS["power_sgd"], Notes()
    model = TowerModel(make, CPUS[:1], reducer=reducer, group=group)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    for epochs in (1, 2):
        backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
        callbacks = [backup, notes]
        model.fit(data_of(group), epochs=epochs, verbose=0, callbacks=callbacks)
        for companion in Path(folder).glob("*.npz") if group.rank == 0 else ():
            companion.unlink()
    return notes.found


def fits(group: Any, name: str, towers: int, steps: int, folder: str) -> Any:
    """Trains on uneven batches, and again with an end in between; returns weights."""
    found = []
    for callbacks in ([], [Fails()], [None]):
        model = TowerModel(make, CPUS[:towers], reducer=REDUCERS[name], group=group)
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=steps or None)
        model.compile(adam, "mse")
        backup = keras.callbacks.BackupAndRestore(folder)
        own = [backup, *filter(None, callbacks)] if callbacks else []
        try:
            model.fit(data_of(group), epochs=EPOCHS, verbose=0, callbacks=own)
        except RuntimeError:
            continue
        found.append([own.get_weights() for own in model.towers])
    return found


def largest(full: np.ndarray) -> np.ndarray:
    kept = np.zeros(full.size, full.dtype)
    places = np.argsort(-np.abs(full).ravel(), kind="stable")[:SENT]
    kept[places] = full.ravel()[places]
    return kept.reshape(full.shape)


def on_one_device(name: str) -> list[np.ndarray]:
    """Returns weights of one model that gets what each rank sends of its share."""
    whole = WHOLE if name == "whole first" else 0
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    variables = [own.value for own in model.trainable_variables]
    errors = [[np.zeros(own.shape, "float32") for own in variables] for _ in ROWS]
    of_ranks = [batches(rank) for rank in range(len(ROWS))]
    for step in range(EPOCHS * max(map(len, ROWS))):
        n = step % max(map(len, ROWS))
        shares = [own[n] if n < len(own) else None for own in of_ranks]
        total = sum(len(own[0]) for own in shares if own)
        sent = [np.zeros(own.shape, "float32") for own in variables]
        for own, error in zip(shares, errors, strict=True):
            grads = [np.zeros(v.shape, "float32") for v in variables]
            if own:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(own[0]) - own[1]))
                grads = tape.gradient(loss, variables)
                grads = [np.asarray(g) * (len(own[0]) / total) for g in grads]
            for m, grad in enumerate(grads):
                is_whole = step < whole or (name == "by variable" and len(grad) == 40)
                if grad.ndim > 1 and not is_whole:
                    full = (grad + error[m]).astype("float32")
                    grad = largest(full)
                    error[m] = full - grad
                sent[m] += grad
        model.optimizer.apply(list(map(tf.constant, sent)), model.trainable_variables)
    return model.get_weights()
