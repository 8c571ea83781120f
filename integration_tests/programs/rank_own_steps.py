"""What ranks do in ``test_sharded_steps``: steps of one's own over ranks' towers."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness import keras_optimizers

from programs.rank_training import BATCH, WORDS, X, Y
from tw_builders import RankShardedOptimizer
from tw_core import Tower, copy_to_replicas, map_towers, replicate, towers
from tw_core.testing import CPUS

_SHARES = (5, 1, 2, 4)  # of a batch's rows, by tower over all ranks


def dense(_: Any = None) -> keras.Model:
    own = keras.layers
    hidden = own.Dense(9, "tanh")
    return keras.Sequential([keras.Input([4]), hidden, own.Dense(3), own.Dense(1)])


def words(_: Any = None) -> keras.Model:
    own = keras.layers
    table = own.Embedding(9, 4)
    return keras.Sequential([keras.Input([5]), table, own.Flatten(), own.Dense(1)])


def narrow(_: Any = None) -> keras.Model:
    own = keras.layers
    return keras.Sequential(
        [keras.Input([4]), own.Dense(9, "tanh", dtype="float16"), own.Dense(1)]
    )


MODELS = {"dense": (dense, X), "words": (words, WORDS), "narrow": (narrow, X)}


class Program:
    """Models of a rank's towers, and what trains them; one model without a group."""

    def __init__(
        self,
        group: Any,
        kind: str,
        optimizer: str,
        num_towers: int,
        *,
        weighs: bool = False,
        jit_compile: bool = False,
    ) -> None:
        make, self.x = MODELS[kind]
        self.group, self.weighs = group, weighs
        self.rank, self.size = (0, 1) if group is None else (group.rank, group.size)
        self.towers = towers(CPUS[:num_towers])
        self.models = replicate(self.towers, make)
        values = np.random.default_rng(2)
        for own in self.models[0].trainable_variables:
            own.assign(values.normal(size=own.shape, scale=0.4))
        copy_to_replicas([model.variables for model in self.models])
        self.plain = keras_optimizers.make(optimizer)
        if group is None:
            self.plain.build(self.models[0].trainable_variables)
        else:
            self.sharded = RankShardedOptimizer(
                self.towers, self.models, self.plain, group=group
            )

        def step(parts: Sequence[Any]) -> None:
            grads = map_towers(self._gradients, self.towers, self.models, *parts)
            weights = [tf.shape(rows)[0] for rows in parts[0]] if weighs else None
            if group is not None:
                options = {"weights": weights, "jit_compile": jit_compile}
                self.sharded.apply(grads, **options)
                return
            # Dense, as Keras squares sparse rows of one index one by one.
            own = map(tf.convert_to_tensor, grads[0])
            self.plain.apply_gradients(
                zip(own, self.models[0].trainable_variables, strict=True)
            )

        self.apply = step
        self.step = tf.function(step, autograph=False)
        if group is not None:
            self.step = group.bounded(self.step)

    def _gradients(self, tower: Tower, model: Any, x: Any, y: Any) -> list[Any]:
        scale = getattr(self.plain, "scale_loss", lambda loss: loss)
        with tf.GradientTape() as tape:
            errors = tf.cast(model(x, training=True), tf.float32) - y
            loss = scale(tf.reduce_mean(errors**2))
        return list(tape.gradient(loss, model.trainable_variables))

    def run(self, first: int, last: int, *, eagerly: bool = False) -> Any:
        """Makes steps, each on this rank's parts of a batch; returns the weights."""
        seats = self.size * len(self.towers)
        shares = _SHARES if self.weighs else (1,) * seats
        ends = np.cumsum(shares[:seats]) * BATCH // sum(shares[:seats])
        mine = slice(self.rank * len(self.towers), (self.rank + 1) * len(self.towers))
        for n in range(first, last):
            rows = slice(n * BATCH, (n + 1) * BATCH)
            parts = [
                [tf.constant(own) for own in np.split(array[rows], ends[:-1])[mine]]
                for array in (self.x, Y)
            ]
            (self.apply if eagerly else self.step)(parts)
        found = [model.get_weights() for model in self.models]
        for own in found:
            np.testing.assert_equal(own, found[0])
        return found[0]

    def checkpoint(self, optimizer: Any) -> tf.train.Checkpoint:
        return tf.train.Checkpoint(model=self.models[0], optimizer=optimizer)

    def save(self, path: str) -> None:
        """Saves on rank 0 what one device would."""
        optimizer = self.plain if self.group is None else self.sharded.gather()
        if self.rank == 0:
            self.checkpoint(optimizer).write(path)

    def restore(self, path: str) -> None:
        """Restores on rank 0, for all."""
        whole = self.plain if self.group is None else self.sharded.gather()
        if self.rank == 0:
            self.checkpoint(whole).read(path).assert_existing_objects_matched()
        if self.group is not None:
            self.group.broadcast(self.models[0].variables)
            copy_to_replicas([model.variables for model in self.models])
            self.sharded.scatter(whole)


def trained(
    group: Any, kind: str, optimizer: str, num_towers: int, *settings: str
) -> Any:
    """Returns the weights after each step, and the bytes of this rank's state."""
    options = dict.fromkeys(settings, True)
    eagerly = options.pop("eagerly", False)
    program = Program(group, kind, optimizer, num_towers, **options)
    weights = [program.run(n, n + 1, eagerly=eagerly) for n in range(4)]
    if " use_ema" in optimizer:
        if group is None:
            program.plain.finalize_variable_values(
                program.models[0].trainable_variables
            )
        else:
            program.sharded.finalize()
        weights.append(program.run(0, 0))
    state = [np.asarray(tf.convert_to_tensor(v)) for v in program.plain.variables]
    return weights, sum(own.nbytes for own in state)


def restored(group: Any, optimizer: str, num_towers: int, path: str) -> Any:
    """Trains and saves, goes on, and once more as restored; returns both weights."""
    program = Program(group, "dense", optimizer, num_towers)
    program.run(0, 2)
    program.save(path)
    end = program.run(2, 4)
    other = Program(group, "dense", optimizer, num_towers)
    other.plain.learning_rate = 0.5  # which is restored, too
    other.run(3, 4)
    other.restore(path)
    return end, other.run(2, 4)


def continued(group: Any, optimizer: str, num_towers: int, path: str) -> Any:
    """Goes on from a file of another number of ranks and towers."""
    program = Program(group, "dense", optimizer, num_towers)
    program.restore(path)
    return program.run(2, 4)


def parting(group: Any, what: str) -> None:
    """Makes optimizers that differ between the ranks."""
    is_first = group.rank == 0
    count = 2 if is_first and what == "towers" else 1
    width = 3 if is_first and what == "shapes" else 2
    own = keras.optimizers.SGD if is_first and what == "optimizers" else None
    ours = towers(CPUS[:count])
    variables = []
    for tower in ours:
        with tf.device(tower.device):
            variables.append([tf.Variable(tf.zeros([width]))])
    optimizer = (own or keras.optimizers.Adam)(0.1)
    RankShardedOptimizer(ours, variables, optimizer, group=group)


def without_gradients(group: Any, *of_ranks: Sequence[str]) -> list[list[float]]:
    """Steps without the gradients that are named for this rank, of equal lengths."""
    weights = [tf.Variable(tf.zeros([6]), name=name) for name in "abc"]
    missing = of_ranks[group.rank]
    grads = [None if v.name[0] in missing else tf.ones([6]) for v in weights]
    sharded = RankShardedOptimizer(
        towers(CPUS[:1]), [weights], keras.optimizers.SGD(1.0), group=group
    )
    sharded.apply([grads], average=False)
    return [own.numpy().tolist() for own in weights]
