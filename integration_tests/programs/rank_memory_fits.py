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
ROWS = [[8, 8, 4], [6, 6, 6, 6, 2], [10, 10]]  # of the batches of each rank
X = RANDOM.normal(size=(len(ROWS), 30, 40)).astype("float32")
Y = RANDOM.normal(size=(len(ROWS), 30, 64)).astype("float32")
SENT, SHARE, EPOCHS, WHOLE = 200, 0.04, 3, 7  # updates with whole gradients
TOP_K = compression.error_feedback(compression.top_k(count=SENT))
REDUCERS = {
    "top k": TOP_K,
    "in parts": compression.error_feedback(compression.top_k(SHARE)),
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


def largest(full: np.ndarray, count: int = SENT) -> np.ndarray:
    kept = np.zeros(full.size, full.dtype)
    places = np.argsort(-np.abs(full).ravel(), kind="stable")[:count]
    kept[places] = full.ravel()[places]
    return kept.reshape(full.shape)


def sum_of_all(fulls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sum of what each of [R, ...] sends to all, and the errors."""
    sent = np.stack(list(map(largest, fulls)))
    return sent.sum(0), fulls - sent


def sum_of_parts(fulls: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the sums that owners of parts send to all, and the errors."""
    size, count = len(fulls), fulls[0].size
    padded = np.pad(fulls.reshape(size, -1), [(0, 0), (0, -count % size)])
    errors = padded.reshape(size, size, -1)
    sent = int(np.ceil(SHARE * errors.shape[2]))
    sums = []
    for owner in range(size):
        total = errors[owner, owner].copy()
        for rank in set(range(size)) - {owner}:
            part = largest(errors[rank, owner], sent)
            errors[rank, owner] -= part
            total += part
        sums.append(largest(total, sent))
        errors[owner, owner] = total - sums[-1]
    left = errors.reshape(size, -1)[:, :count].reshape(fulls.shape)
    return np.concatenate(sums)[:count].reshape(fulls[0].shape), left


def on_one_device(name: str) -> list[np.ndarray]:
    """Returns weights of one model that gets what each rank sends of its share."""
    whole = WHOLE if name == "whole first" else 0
    num_ranks, add = (3, sum_of_parts) if name == "in parts" else (2, sum_of_all)
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    variables = [own.value for own in model.trainable_variables]
    errors = [np.zeros([num_ranks, *own.shape], "float32") for own in variables]
    of_ranks = [batches(rank) for rank in range(num_ranks)]
    most = max(map(len, of_ranks))
    for step in range(EPOCHS * most):
        n = step % most
        shares = [own[n] if n < len(own) else None for own in of_ranks]
        total = sum(len(own[0]) for own in shares if own)
        grads = [np.zeros_like(own) for own in errors]
        for rank, own in enumerate(shares):
            if own:
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(model(own[0]) - own[1]))
                for m, grad in enumerate(tape.gradient(loss, variables)):
                    grads[m][rank] = grad * (len(own[0]) / total)
        sums = []
        for m, grad in enumerate(grads):
            is_first = name == "by variable" and grad.shape[1] == 40
            if grad.ndim > 2 and step >= whole and not is_first:
                reduced, errors[m] = add(grad + errors[m])
            else:
                reduced = grad.sum(0)
            sums.append(tf.constant(reduced))
        model.optimizer.apply(sums, model.trainable_variables)
    return model.get_weights()
