"""Runs the programs of ``docs/examples/keras`` and compares them with plain Keras.

``python -m programs.keras_gallery`` prints the tables of ``docs/tutorials/gallery.md``.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

if __name__ == "__main__":  # Help and wrong options do not wait for TensorFlow.
    argparse.ArgumentParser(description=__doc__).parse_args()

import keras
import numpy as np

FOLDER = Path(__file__).parents[2] / "docs" / "examples" / "keras"
TOWERS = (1, 2, 3, 4)
SEEDS = range(5)
# In the short form each program sees a full batch and a small one: with four towers
# some parts are empty.
DETERMINISTIC = {
    "digits": {"rows": 43, "epochs": 2},
    "transformer": {"rows": 52, "epochs": 2},
    "vae": {"rows": 34, "epochs": 2},
    "contrastive": {"rows": 67, "epochs": 2},
    "gan": {"rows": 34, "epochs": 2},
    "recurrent": {"rows": 53, "epochs": 2},
    "regression": {"rows": 43, "epochs": 2},
    "fine_tuning": {"rows": 68, "epochs": 2},
    "segmentation": {"rows": 34, "epochs": 2},
}
# With dropout or float16.
RANDOM = {
    "text": {"rows": 128, "epochs": 3},
    "mixed_precision": {"rows": 128, "epochs": 3},
}
# Towers send approximations.
COMPRESSED = {"send_less": {"rows": 128, "epochs": 2}}
PROGRAMS = (*DETERMINISTIC, *RANDOM, *COMPRESSED)


@contextmanager
def programs(dtype: str = "float32") -> Iterator[None]:
    """Has programs be imported, and compute in ``dtype``."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    sys.path.insert(0, str(FOLDER))
    try:
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        yield
    finally:
        sys.path.remove(str(FOLDER))
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


def train(name, towers, dtype="float32", **settings):
    """Returns the history over towers, or with ``towers=None`` that of plain Keras."""
    return train_model(name, towers, dtype, **settings)[0]


def train_model(name, towers, dtype="float32", **settings):
    """Returns the history as ``train`` does, and the trained weights, in one row."""
    with programs(dtype), fitted_models() as models:
        program = importlib.import_module(name)
        if towers is not None:
            history = program.main(towers, **settings)
        else:
            gallery = importlib.import_module("gallery")
            history = gallery.plain_main(FOLDER / f"{name}.py")(**settings)
    return history, np.concatenate([w.ravel() for w in models[-1].get_weights()])


@contextmanager
def fitted_models():
    """Lists the models whose ``fit`` is called, which the programs do not return."""
    models, fit = [], keras.Model.fit

    def listed(model, *args, **kwargs):
        models.append(model)
        return fit(model, *args, **kwargs)

    with mock.patch.object(keras.Model, "fit", listed):
        yield models


def losses(history):
    """[losses][epochs] of a history, those of validation included."""
    return np.array([own for name, own in history.items() if name.endswith("loss")])


def difference(many, one):
    """Returns the largest relative difference between the losses of two histories."""
    assert many.keys() == one.keys()
    return float(np.max(np.abs(losses(many) / losses(one) - 1)))


def distance(many, one):
    """Returns the norm of the difference of weights over the norm of ``one``."""
    return float(np.linalg.norm(many - one) / np.linalg.norm(one))


def last_losses(name, towers, **settings):
    """[seeds] the last loss of training."""
    seeds = [train(name, towers, seed=seed, **settings) for seed in SEEDS]
    return np.array([history["loss"][-1] for history in seeds])


def main():
    numbers = " | ".join(f"K = {k}" for k in TOWERS)
    print(f"| program | {numbers} | K = {TOWERS[-1]}, float32 | weights |")
    print("|---" * (len(TOWERS) + 3) + "|")
    for name in DETERMINISTIC:
        print("| " + " | ".join([f"`{name}.py`", *compare(name)]) + " |", flush=True)
    print(f"| program | one device | {numbers} |")
    print("|---" * (len(TOWERS) + 2) + "|")
    for name in RANDOM:
        one = last_losses(name, None)
        own = [f"{last_losses(name, k).mean():.4f}" for k in TOWERS]
        spread = f"{one.min():.4f} to {one.max():.4f}"
        print("| " + " | ".join([f"`{name}.py`", spread, *own]) + " |", flush=True)


def compare(name):
    """Returns a row: differences of losses for each K, and the largest of weights."""
    one, weights = train_model(name, None, "float64")
    many = [train_model(name, k, "float64") for k in TOWERS]
    losses_differ = [difference(history, one) for history, _ in many]
    single = difference(train(name, TOWERS[-1]), train(name, None))
    weights_differ = max(distance(trained, weights) for _, trained in many)
    row = (*losses_differ, single, weights_differ)
    return [f"{value:.0e}" for value in row]


if __name__ == "__main__":
    from tw_core.testing import start_logical_cpus

    start_logical_cpus()
    main()
