"""``tf.summary`` in layers and steps writes once per step, as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS

from tw_keras import TowerModel

X = np.arange(24.0, dtype="float32").reshape(12, 2)


class Writing(keras.layers.Layer):
    def call(self, x):
        tf.summary.scalar("first", x[0, 0])
        return x


class Model(keras.Model):
    """Writes with the default writer, and with one of its own every second step."""

    def __init__(self, writer):
        super().__init__()
        self.inner = keras.Sequential([keras.Input([2]), Writing()])
        self.inner.add(keras.layers.Dense(1))
        self.writer = [writer]
        self.built = True

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        count = self.optimizer.iterations
        logs = super().train_step(data)
        with (
            self.writer[0].as_default(step=count),
            tf.summary.record_if(tf.equal(count % 2, 0)),
        ):
            tf.summary.scalar("own", logs["loss"])
        return logs


def events(folder):
    """Returns (step, tag, value) of what was written, the losses without values."""
    found = []
    for path in sorted(folder.glob("*.v2")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for own in event.summary.value:
                tag = own.tag.rpartition("/")[2]  # without numbers of layers
                value = float(tf.make_ndarray(own.tensor)) if tag == "first" else None
                found.append((event.step, tag, value))
    return sorted(found)


def written(make_model, folder, **options):
    """Trains, and returns what was written."""
    keras.utils.set_random_seed(1)
    steps = tf.Variable(0, dtype=tf.int64)
    on_batch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.assign_add(1)
    )
    mine, theirs = (tf.summary.create_file_writer(str(folder / n)) for n in "ab")
    model = make_model(lambda: Model(mine))
    model.compile("sgd", "mse", **options)
    with theirs.as_default(step=steps):
        model.fit(
            X,
            X[:, :1],
            batch_size=4,
            epochs=2,
            verbose=0,
            shuffle=False,
            callbacks=[on_batch],
        )
    mine.close()
    theirs.close()
    return events(folder / "a"), events(folder / "b")


@pytest.mark.parametrize(
    "options", [{}, {"run_eagerly": True}], ids=["traced", "eagerly"]
)
def test_a_summary_is_written_once_per_step(options, tmp_path):
    one = written(lambda make: make(), tmp_path / "one", **options)
    assert [len(own) for own in one] == [3, 6]

    def over_towers(make):
        return TowerModel(make, CPUS[:3])

    assert written(over_towers, tmp_path / "many", **options) == one
