"""Trains a digit classifier over all processes that a launcher started.

    python fit.py
    tw-launch -n 2 -- python fit.py
    mpirun -n 2 python fit.py
    torchrun --nproc-per-node 2 fit.py
    srun -n 2 python fit.py

``fit.sbatch`` is a batch script of Slurm; ``trainjob.yaml`` and ``indexed-job.yaml``
are for Kubernetes, ``ray_fit.py`` is for Ray. The program is the same everywhere.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=64, help="rows over all processes")
parser.add_argument("--weights", help="NumPy file (.npz) that rank 0 writes")
if __name__ == "__main__":  # --help and wrong options need no TensorFlow.
    parser.parse_args()

import logging

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tw_ranks
from tw_core import use_logical_cpus
from tw_keras import TowerModel


def main(arguments: list[str] | None = None) -> None:
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    group = tw_ranks.join()  # Before TensorFlow is used.
    devices = own_gpus(group) or use_logical_cpus(1)
    model = TowerModel(make_model, devices, group=group, data="shared")
    share = train(model, options)["accuracy"][-1]
    print(f"rank {group.rank} of {group.size}: {100 * share:.1f} % right", flush=True)
    if options.weights and group.rank == 0:
        np.savez(options.weights, *model.get_weights())
    group.leave()


def own_gpus(group: tw_ranks.ProcessGroup) -> list[str]:
    """Divides a machine's GPUs among its ranks, unless the launcher did so."""
    gpus = tf.config.list_physical_devices("GPU")
    own = gpus[group.local_rank :: group.local_size] or gpus
    tf.config.set_visible_devices(own, "GPU")
    return [f"/gpu:{number}" for number in range(len(own))]


def make_model() -> keras.Model:
    keras.utils.set_random_seed(0)
    hidden = keras.layers.Dense(64, "relu")
    return keras.Sequential([keras.Input([64]), hidden, keras.layers.Dense(10)])


def train(model: keras.Model, options: argparse.Namespace) -> dict[str, list[float]]:
    images, labels = load_digits(return_X_y=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    history = model.fit(
        *((images / 16).astype("float32"), labels),
        batch_size=options.batch,
        epochs=options.epochs,
        shuffle=False,
        verbose=0,
    )
    return history.history


if __name__ == "__main__":
    main()
