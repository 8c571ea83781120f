"""Programs that train a softmax regression on handwritten digits, of either mode.

It regresses on the pixels and on fixed random features of them. So it stays convex, and
has variables of 640, 10 and 17,000 elements: two are packed on the way, one is not.

The optimizer is an argument: TensorFlow's, or tw-ampopt's around it. It computes the
gradients (so that it can scale the loss) and applies what a builder has reduced.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tw_builders
import tw_core
import tw_reduce
from tw_core.flat_variables import FlatModel, flatten, pack_gradients
from tw_core.testing import CPUS

v1 = tf.compat.v1
BATCH = 128
FLAT_BELOW = 4096  # bytes: kernel and bias are fewer
SHAPES = {"kernel": [64, 10], "bias": [10], "wide": [1700, 10]}


class Digits(NamedTuple):
    """Images [rows, 64] float32 from 0 to 1, and labels [rows] int64."""

    images: np.ndarray
    labels: np.ndarray


@cache
def digits() -> tuple[Digits, Digits]:
    """The training rows (1,437) and the test rows (360)."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    whole = Digits(np.float32(images[order] / 16), labels[order].astype(np.int64))
    first, second = zip(*(np.split(part, [1437]) for part in whole), strict=True)
    return Digits(*first), Digits(*second)


def batch(step: int) -> Digits:
    train, _ = digits()
    rows = np.random.default_rng(step).integers(0, len(train.images), BATCH)
    return Digits(train.images[rows], train.labels[rows])


@cache
def projection() -> np.ndarray:
    """What makes features of pixels; small, as Adam moves all of them at once."""
    random = np.random.default_rng(0)
    return np.float32(random.normal(0, 1 / SHAPES["wide"][0], (64, SHAPES["wide"][0])))


def accuracy(kernel: np.ndarray, bias: np.ndarray, wide: np.ndarray) -> float:
    """The share of the test rows that are right, in NumPy."""
    images, labels = digits()[1]
    features = np.maximum(images @ projection(), 0)
    logits = images @ kernel + features @ wide + bias
    return float(np.mean(np.argmax(logits, 1) == labels))


def cross_entropy(variables: Sequence[Any], images: Any, labels: Any) -> tf.Tensor:
    kernel, bias, wide = variables
    features = tf.nn.relu(images @ projection())
    logits = images @ kernel + features @ wide + bias
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    )


def get_weights() -> list[Any]:
    """The variables by ``get_variable``."""
    zeros = tf.zeros_initializer()
    with v1.variable_scope("digits"):
        return [
            v1.get_variable(name, shape, initializer=zeros)
            for name, shape in SHAPES.items()
        ]


class Weights(tf.Module):
    """The variables as a module."""

    def __init__(self, tower: tw_core.Tower | None = None) -> None:
        super().__init__()
        self.all = [tf.Variable(tf.zeros(s), name=name) for name, s in SHAPES.items()]

    def __call__(self, images: Any, labels: Any) -> tf.Tensor:
        return cross_entropy(self.all, images, labels)


def make_model(is_flat: bool, tower: tw_core.Tower) -> Weights | FlatModel[Weights]:
    """Makes a model, its small variables in a flat one or not."""
    return flatten(Weights, below_bytes=FLAT_BELOW) if is_flat else Weights()


class Program(NamedTuple):
    """A program that was built.

    step(images, labels) trains on a batch; read(tensors) gives their arrays.
    variables are [copies][3]; optimizers one a copy, or one for all, which update
    trained, [copies][N]: the variables, or flat ones and those that are not in them.
    """

    step: Callable[..., None]
    read: Callable[[Any], Any]
    variables: list[list[Any]]
    optimizers: list[Any]
    trained: list[list[Any]]


# How towers train, which is the first argument of a program.
WAYS = ("replicated", "parameter server", "sharded")
FLAT_WAYS = tuple(f"flat {way}" for way in WAYS)


def session_program(
    way: str,
    make_optimizer: Callable[[list[Any]], Any],
    num_towers: int = 2,
    *,
    reducer: Any = "gpu",
    rows: int = BATCH,
) -> Program:
    """Builds it with a builder's class, in a graph with a session."""
    devices, made = list(CPUS[:num_towers]), []
    flat = {"flat_below_bytes": FLAT_BELOW} if way in FLAT_WAYS else {}
    way = way.removeprefix("flat ")
    with tf.Graph().as_default():
        images = v1.placeholder(tf.float32, [rows, 64])
        labels = v1.placeholder(tf.int64, [rows])
        shards = [tf.split(part, num_towers) for part in (images, labels)]

        def tower() -> list[tuple[Any, Any]]:
            k = tw_core.get_current_tower_context().index
            weights = get_weights()
            if way == "replicated" or not made:
                made.append(make_optimizer(weights))
            loss = cross_entropy(weights, shards[0][k], shards[1][k])
            return made[-1].compute_gradients(loss, weights)

        if way == "replicated":
            builder = tw_builders.SyncMultiGPUReplicatedBuilder(
                devices, True, reducer, **flat
            )
        elif way == "sharded":
            builder = tw_builders.SyncMultiGPUShardedBuilder(devices, True, **flat)
        else:
            builder = tw_builders.SyncMultiGPUParameterServerBuilder(
                devices, "cpu", **flat
            )
        pairs = builder.call_for_each_tower(tower)
        ops = builder.build(pairs, iter(made).__next__)
        train_op, *after = ops if isinstance(ops, tuple) else (ops,)
        session = v1.Session(config=tw_core.session_config())
        init = [v1.global_variables_initializer(), v1.local_variables_initializer()]
        session.run(init)
        session.run([op for op in after if op is not None])
        copies = pairs[:1] if way == "parameter server" else pairs
        variables = [[v for _, v in own] for own in copies]
        trained = [[v for _, v in pack_gradients(own)] for own in copies]
    step = session.make_callable(train_op, [images, labels])
    return Program(step, session.run, variables, made, trained)


def function_program(
    way: str,
    make_optimizer: Callable[[list[Any]], Any],
    num_towers: int = 2,
    *,
    reducer: Any = None,
    rows: int = BATCH,
) -> Program:
    """Builds it with the builders' functions, in a ``tf.function``."""
    devices, is_flat = list(CPUS[:num_towers]), way in FLAT_WAYS
    way = way.removeprefix("flat ")
    towers = tw_core.towers(devices)
    copies = towers[:1] if way == "parameter server" else towers
    models = tw_core.replicate(copies, partial(make_model, is_flat))
    variables = [list(model.trainable_variables) for model in models]
    if way == "sharded":
        owned = tw_builders.owned_variables(towers, variables)
        make = partial(make_optimizer, owned)
        optimizers = [tw_builders.make_sharded_optimizer(towers, make, variables)[0]]
    else:
        optimizers = [make_optimizer(own) for own in variables]
    reduce = tw_reduce.mean(reducer or partial(tw_reduce.sum_balanced, devices=devices))

    def tower_pairs(tower: tw_core.Tower, images: Any, labels: Any) -> Any:
        weights = variables[tower.index % len(variables)]
        loss = models[tower.index % len(models)](images, labels)
        optimizer = optimizers[tower.index % len(optimizers)]
        return optimizer.compute_gradients(loss, weights)

    @tf.function(autograph=False)
    def step(images: Any, labels: Any) -> None:
        shards = tf.split(images, num_towers), tf.split(labels, num_towers)
        pairs = tw_core.map_towers(tower_pairs, towers, *shards)
        grads, _ = tw_core.split_grad_list(pairs)
        if way == "replicated":
            reduced = reduce(grads)
            tw_builders.apply_gradients(towers, reduced, variables, optimizers)
        elif way == "sharded":
            tw_builders.apply_sharded_gradients(towers, grads, variables, *optimizers)
        else:
            tw_builders.apply_shared_gradients(pairs, optimizers[0])

    def read(tensors: Any) -> Any:
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), tensors)

    plain = [(model.model if is_flat else model).all for model in models]
    return Program(step, read, plain, optimizers, variables)


PROGRAMS = {"session": session_program, "function": function_program}
