"""What ranks of several towers do: the siblings' steps, with sums between processes."""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

import tw_ampopt
import tw_core
import tw_ranks
import tw_reduce
import tw_rlload
from programs.digits_towers import PROGRAMS, Weights, batch, cross_entropy, digits
from tw_core.testing import CPUS

v1 = tf.compat.v1


def make_optimizer(mode: str, is_scaled: bool) -> Any:
    """Returns what makes Adam, or tw-ampopt's around it."""
    if not is_scaled:
        return lambda variables: v1.train.AdamOptimizer(0.05)
    options = {
        "tf_optimizer": v1.train.AdamOptimizer,
        "learning_rate": 0.05,
        "loss_scale": tw_ampopt.DynamicLossScale(),
    }
    if mode == "session":
        return lambda variables: tw_ampopt.Optimizer(**options)
    return lambda variables: tw_ampopt.TowerOptimizer(variables, **options)


def train_digits(
    group: Any, mode: str, towers: int, steps: int, is_scaled: bool, bad: tuple = ()
) -> tuple[list[list[np.ndarray]], list[dict[str, Any]]]:
    """Trains on this rank's rows of each batch; at steps in ``bad``, rank 1's are."""
    reducer = partial(
        tw_ranks.mean_of_ranks,
        group=group,
        sum_towers=partial(tw_reduce.sum_balanced, devices=CPUS[:towers]),
    )
    rows = len(batch(0).images) // group.size
    make = make_optimizer(mode, is_scaled)
    program = PROGRAMS[mode]("replicated", make, towers, reducer=reducer, rows=rows)
    for step in range(steps):
        images, labels = (part[group.rank :: group.size] for part in batch(step))
        if step in bad and group.rank == 1:
            images = images.copy()
            images[-1, 0] = np.inf
        program.step(images, labels)
    told = [program.read(o.statistics()) for o in program.optimizers if is_scaled]
    return program.read(program.variables), told


def train_epochs(group: Any, towers: int, epochs: int) -> list[list[np.ndarray]]:
    """Trains whole epochs in one call, on this rank's half of each minibatch."""
    ours = tw_core.towers(CPUS[:towers])
    specs = {
        "images": tf.TensorSpec([None, 64]),
        "labels": tf.TensorSpec([None], tf.int64),
    }
    rows = tw_rlload.DeviceBatch(ours, specs, max_per_device_batch_size=16)
    models = tw_core.replicate(ours, Weights)
    train = tw_rlload.EpochFunction(
        rows,
        lambda own, x: cross_entropy(own.all, x["images"], x["labels"]),
        models,
        [v1.train.AdamOptimizer(0.05) for _ in models],
        reducer=partial(tw_ranks.mean_of_ranks, group=group),
    )
    rows.load([part[group.rank : 1408 : group.size] for part in digits()[0]])
    train.run_epochs(epochs, "rows", seed=0)
    return [[v.numpy() for v in model.all] for model in models]
