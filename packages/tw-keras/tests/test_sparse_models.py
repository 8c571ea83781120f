"""Models with sparse gradients, drawn at random, train over towers as on one device.

A table may be read so that a batch's gradient has each row once, so that it has a row
per lookup, and in several ways at once.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.casts import float64
from tower_models import CPUS

from tw_keras import TowerModel

layers, optimizers = keras.layers, keras.optimizers
ROWS, WORDS, WIDTH = 19, 6, 3  # two batches of 8, and one of 3
OPTIMIZERS = ["Adam", "Adagrad", "RMSprop", "Nadam", "Adamax", "Ftrl", "SGD"]


def weighed(table, bag, ids):
    del ids
    bag, _ = tf.sparse.fill_empty_rows(bag, 0)  # else a last row without words is lost
    words = tf.SparseTensor(bag.indices, bag.indices[:, 1], bag.dense_shape)
    return tf.nn.embedding_lookup_sparse(table, words, bag, combiner="mean")


def counted(table, bag, ids):
    del bag
    words = tf.RaggedTensor.from_tensor(ids)
    return tf.nn.embedding_lookup_sparse(table, words, None, combiner="sum")


def product(table, bag, ids):
    del ids
    return keras.ops.matmul(bag, table)


def looked_up(table, bag, ids):
    del bag
    return tf.reduce_sum(tf.gather(table, ids), axis=1)


def distinct(table, bag, ids):
    del bag
    words, places = tf.unique(tf.reshape(ids, [-1]))
    rows = tf.gather(tf.gather(table, words), places)
    return tf.reduce_mean(tf.reshape(rows, [-1, ids.shape[1], WIDTH]), axis=1)


def in_a_function(table, bag, ids):
    return tf.function(counted, autograph=False)(table, bag, ids)


READS = [weighed, counted, product, looked_up, distinct, in_a_function]


class Table(layers.Layer):
    def __init__(self, reads):
        super().__init__()
        self.reads = reads

    def build(self, *_):
        self.table = self.add_weight(shape=(WORDS, WIDTH), initializer="glorot_normal")

    def call(self, bag, ids):
        table = self.table.value
        return keras.ops.sum(
            keras.ops.stack([read(table, bag, ids) for read in self.reads]), axis=0
        )


def drawn(seed):
    """Returns a function that makes the model of a seed."""
    draw = np.random.default_rng(seed)
    first = READS[seed % len(READS)]
    tables = [[first, *draw.choice(READS, draw.integers(0, 3))]]
    if draw.random() < 0.5:
        tables.append(list(draw.choice(READS, draw.integers(1, 3))))
    plain = [draw.random() < 0.5 for _ in range(2)]

    def make():
        bag = keras.Input([WORDS], sparse=True)
        ids = keras.Input([4], dtype="int64")
        own = [Table(reads)(bag, ids) for reads in tables]
        if plain[0]:
            own.append(layers.Dense(WIDTH)(bag))
        if plain[1]:
            own.append(layers.GlobalAveragePooling1D()(layers.Embedding(6, WIDTH)(ids)))
        return keras.Model([bag, ids], layers.Dense(1)(layers.Concatenate()(own)))

    return make


def data_of(seed):
    draw = np.random.default_rng(seed)
    bag = draw.random([ROWS, WORDS]) * (draw.random([ROWS, WORDS]) > 0.6)
    x = tf.sparse.from_dense(bag), draw.integers(0, WORDS, [ROWS, 4])
    return tf.data.Dataset.from_tensor_slices((x, draw.random([ROWS, 1]))).batch(8)


def trained(make, seed, name, **options):
    keras.utils.set_random_seed(seed)
    model = TowerModel(make, **options) if options else make()
    model.compile(getattr(optimizers, name)(0.05), "mse")
    model.fit(data_of(seed), verbose=0)
    return model.get_weights()


VARIABLES = ["replicated", "sharded", "parameter_server"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*shuffle=True.*")
@pytest.mark.filterwarnings("ignore:Converting sparse IndexedSlices")
@pytest.mark.parametrize("seed", range(12))
def test_a_sparse_model_trains_as_on_one_device(seed):
    name, variables = OPTIMIZERS[seed % len(OPTIMIZERS)], VARIABLES[seed % 3]
    devices = CPUS[: 4 - seed // 2 % 3]
    with float64():
        want = trained(drawn(seed), seed, name)
        got = trained(drawn(seed), seed, name, devices=devices, variables=variables)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
