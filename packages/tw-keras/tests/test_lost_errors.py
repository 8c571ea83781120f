"""Where TensorFlow loses the error of a tower, the tower's part runs again."""

from inspect import signature

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS, layers

from tw_keras import TowerModel

LOST = ("RecvAsync is cancelled", "Function was cancelled before it was started")
X = np.arange(22).reshape(11, 2) % 5
BAD = X.copy()
BAD[9] = 99  # a row of tower 2 in the second batch, of 3 rows


@pytest.fixture(autouse=True)
def lost(request, monkeypatch):
    """Raises what TensorFlow raises where a race has it lose an operation's error."""
    message = getattr(request, "param", LOST[0])

    def losing(name, plain):
        def make(model, force=False):
            before = vars(model).get(f"{name}_function")
            plain(model, force)
            function = vars(model)[f"{name}_function"]
            if function is before:
                return

            def run(iterator):
                try:
                    return function(iterator)
                except tf.errors.InvalidArgumentError as error:
                    raise tf.errors.CancelledError(None, None, message) from error

            setattr(model, f"{name}_function", run)

        return make

    for name in ("train", "test", "predict"):
        method = f"make_{name}_function"
        plain = getattr(TowerModel, method)
        monkeypatch.setattr(TowerModel, method, losing(name, plain))
    return message


class FailsInGraphs(layers.Layer):
    def call(self, x):
        if not tf.executing_eagerly():
            tf.debugging.assert_less(x, 50)
        return x


class Words(layers.Embedding):
    def call(self, x):
        return tf.gather(self.embeddings, x)  # the line that fails


def made(rows=5, first=()):
    keras.utils.set_random_seed(0)
    norm = layers.BatchNormalization()
    words = Words(rows, 3)
    return keras.Sequential(
        [
            *(keras.Input([2], dtype="int32"), *first, words, norm),
            *(layers.Flatten(), layers.Dense(1)),
        ]
    )


def compiled(make=made, **options):
    model = TowerModel(make, CPUS[:3], **options)
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return model


def values_of(model):
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(own) for own in variables]


CALLS = {
    "fit": lambda m: m.fit(BAD, BAD[:, :1], batch_size=8, shuffle=False, verbose=0),
    "evaluate": lambda m: m.evaluate(BAD, BAD[:, :1], batch_size=8, verbose=0),
    "predict": lambda m: m.predict(BAD, batch_size=8, verbose=0),
    "train_on_batch": lambda m: m.train_on_batch(BAD[8:], BAD[8:, :1]),
    "test_on_batch": lambda m: m.test_on_batch(BAD[8:], BAD[8:, :1]),
    "predict_on_batch": lambda m: m.predict_on_batch(BAD[8:]),
}
CELLS = [
    ("fit", {"variables": "sharded"}, LOST[0]),
    ("fit", {"variables": "parameter_server"}, LOST[1]),
    *((name, {}, lost) for name, lost in zip(CALLS, 3 * LOST, strict=True)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "lost"), CELLS, indirect=["lost"])
def test_the_lost_error_of_a_tower_is_found_by_running_its_part_again(name, options):
    model = compiled(**options)
    model.fit(X[:8], X[:8, :1], batch_size=8, verbose=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not in") as caught:
        CALLS[name](model)
    said = "\n".join([str(caught.value), *caught.value.__notes__])
    tower = 1  # Of 3 rows each tower has one.
    assert f"(in tower{tower} of 3, on /cpu:{tower})" in said
    assert "Words.call()" in said and "ran again, one by one" in said
    lines = [str(entry.statement).strip() for entry in caught.traceback]
    assert "return tf.gather(self.embeddings, x)  # the line that fails" in lines


@pytest.mark.slow
def test_running_again_updates_nothing(monkeypatch):
    model, seen = compiled(), []
    plain = model._steps.run_again

    def run_again():
        seen.append(values_of(model))
        try:
            plain()
        finally:
            seen.append(values_of(model))

    monkeypatch.setattr(model._steps, "run_again", run_again)
    with pytest.raises(tf.errors.InvalidArgumentError):
        model.train_on_batch(BAD, BAD[:, :1])
    for before, after in zip(*seen, strict=True):
        np.testing.assert_array_equal(before, after)
    model.fit(X, X[:, :1], verbose=0)


@pytest.mark.slow(by_day=[LOST[1]])
@pytest.mark.parametrize("lost", LOST, indirect=True)
def test_what_does_not_fail_again_is_tensorflows_error_with_a_note(lost):
    model = compiled(lambda: made(100, [FailsInGraphs()]))
    with pytest.raises(tf.errors.CancelledError, match=lost) as caught:
        model.train_on_batch(BAD, BAD[:, :1])
    assert "one by one, without an error" in "\n".join(caught.value.__notes__)
    model.fit(X, X[:, :1], verbose=0)


@pytest.mark.skipif(
    "ragged" not in signature(keras.Input).parameters, reason="no ragged inputs"
)
@pytest.mark.filterwarnings("ignore:Layer 'means")
def test_a_ragged_input_with_a_mask_says_which_row_is_not_in_its_table():
    def make():
        words = layers.Embedding(5, 3, mask_zero=True)
        inputs = keras.Input([None], dtype="int32", ragged=True)
        return keras.Sequential([inputs, words, Means(), layers.Dense(1)])

    class Means(layers.Layer):
        def call(self, x):
            return tf.reduce_mean(x, axis=1)

    model = TowerModel(make, CPUS, inline=False)
    model.compile("sgd", "mse")
    rows = tf.RaggedTensor.from_row_lengths(BAD.ravel(), [2] * 11)
    for _ in range(3):  # A race decides which error TensorFlow raises.
        with pytest.raises(tf.errors.InvalidArgumentError, match="not in"):
            model.train_on_batch(rows, BAD[:, :1])
