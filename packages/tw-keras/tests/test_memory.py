"""A reducer with memory in ``fit``: saved beside the model, and given back."""

import io
import logging
from functools import partial
from inspect import getattr_static

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS

import tw_reduce
from tw_core.devices import canonical_device
from tw_core.ranks import RankGroup
from tw_keras import TowerModel
from tw_keras._files import _checksum
from tw_keras._over_ranks.exchanges import Exchanges
from tw_reduce import compression

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(30, 40)).astype("float32")
Y = RANDOM.normal(size=(30, 64)).astype("float32")
TOP = compression.error_feedback(compression.top_k(0.02))


def make():
    keras.utils.set_random_seed(1)
    hidden = keras.layers.Dense(128, "tanh")
    return keras.Sequential([keras.Input([40]), hidden, keras.layers.Dense(64)])


def made(reducer, num_towers=2, **options):
    model = TowerModel(make, CPUS[:num_towers], reducer=reducer)
    model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    return model


def fit(model, epochs, *callbacks, **options):
    rows = {"batch_size": 10, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, epochs=epochs, callbacks=list(callbacks), **rows, **options)


def errors_of(model):
    """Returns the towers' errors of each variable, added up."""
    (holder,), found = model.reducer_states, {}
    holder.save_own_variables(found)
    return {name: own.sum(0) for name, own in found.items() if own.ndim == 3}


@pytest.mark.slow
def test_saved_memory_is_divided_between_other_towers(tmp_path, caplog):
    model = made(TOP)
    fit(model, 1)
    model.save(tmp_path / "m.keras")
    assert keras.models.load_model(tmp_path / "m.keras").count_params()
    wanted = errors_of(model)
    assert max(np.abs(own).max() for own in wanted.values()) > 1e-3
    for num_towers in (1, 3):
        other = made(TOP, num_towers)
        other.load_weights(tmp_path / "m.keras")
        fit(other, 1, steps_per_epoch=1)
        other.load_weights(tmp_path / "m.keras")
        for name, own in errors_of(other).items():
            np.testing.assert_allclose(own, wanted[name], rtol=1e-6, atol=1e-7)
    (tmp_path / "m.keras.reducer.npz").unlink()
    with caplog.at_level(logging.WARNING):
        other.load_weights(tmp_path / "m.keras")
    assert [line for line in caplog.messages if "starts from zero" in line]
    assert not any(own.any() for own in errors_of(other).values())


@pytest.mark.slow(by_day=True)
def test_memory_outlives_compile_with_its_optimizer_alone(caplog):
    whole, again = made(TOP), made(TOP)
    for model in (whole, again):
        fit(model, 1)
    again.compile(again.optimizer, "mse", metrics=["mae"])
    assert not [line for line in caplog.messages if "memory" in line]
    for model in (whole, again):
        fit(model, 1)
    np.testing.assert_equal(again.get_weights(), whole.get_weights())
    again.compile(keras.optimizers.SGD(0.1), "mse")
    assert [line for line in caplog.messages if "compile replaced Adam" in line]


@pytest.mark.slow(by_day=["Checkpoint"])
@pytest.mark.parametrize("way", ["load_model", "Checkpoint"])
def test_new_memory_of_an_optimizer_with_updates_is_logged(tmp_path, caplog, way):
    model = made(TOP)
    fit(model, 1, steps_per_epoch=1)
    if way == "load_model":
        model.save(tmp_path / "m.keras")
        load = keras.models.load_model
        other = TowerModel(lambda: load(tmp_path / "m.keras"), CPUS[:2], reducer=TOP)
    else:
        path = tf.train.Checkpoint(model=model).save(tmp_path / "c")
        other = made(TOP)
        tf.train.Checkpoint(model=other).restore(path)
        other.copy_to_replicas()
    assert not [line for line in caplog.messages if "memory" in line]
    fit(other, 1, steps_per_epoch=1)
    assert [line for line in caplog.messages if "has made 1 updates" in line]


@pytest.mark.slow(by_day=["2"])
@pytest.mark.parametrize("num_towers", [1, 2])
def test_memory_of_sums_does_not_depend_on_callbacks(num_towers):
    found = []
    idle = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    for callbacks in ([], [idle]):
        model = TowerModel(make, CPUS[:num_towers], reducer=TOP)
        adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
        model.compile(adam, "mse")
        fit(model, 2, *callbacks)  # Three batches: sums are left as an epoch ends.
        assert max(np.abs(own).max() for own in errors_of(model).values()) > 1e-3
        found.append(model.get_weights())
    np.testing.assert_equal(*found)


@pytest.mark.parametrize("variables", ["replicated", "sharded"])
def test_an_eager_step_sends_what_all_towers_remember(variables):
    def half(tensor):  # linear: how rows are cut makes no difference
        return [tensor / 2], tf.identity

    weights = []
    for run_eagerly in (False, True):
        feedback = compression.error_feedback(half, min_elements=1)
        model = TowerModel(make, CPUS[:2], reducer=feedback, variables=variables)
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=run_eagerly)
        fit(model, 2)
        weights.append(model.get_weights())
    for traced, eager in zip(*weights, strict=True):
        np.testing.assert_allclose(eager, traced, rtol=1e-5, atol=1e-6)


def test_an_optimizer_around_another_reduces_as_any():
    class Halving(keras.optimizers.Optimizer):
        """Halves gradients; not one that scales losses, in spite of its attribute."""

        def __init__(self, inner):
            super().__init__(learning_rate=0.0)
            self.inner_optimizer = inner

        def build(self, variables):
            super().build(variables)
            self.inner_optimizer.build(variables)

        @property
        def variables(self):
            return self._variables + self.inner_optimizer.variables

        def apply(self, grads, trainable_variables=None):
            halves = [0.5 * grad for grad in grads]
            self.inner_optimizer.apply(halves, trainable_variables)

    all_sent = compression.error_feedback(compression.top_k(1.0), min_elements=2)
    own = partial(tw_reduce.sum_balanced, devices=CPUS[:2])
    losses = []
    for reducer in (None, own, all_sent):
        model = TowerModel(make, CPUS[:2], reducer=reducer)
        model.compile(Halving(keras.optimizers.SGD(0.1)), "mse")
        losses.append(fit(model, 2).history["loss"])
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-5)


def written(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def compressed(arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays, bomb=np.zeros(1 << 26, np.float32))
    return file.getvalue()


def without(arrays, *names):
    return written({name: own for name, own in arrays.items() if name not in names})


def changed(arrays, change):
    """Changes an array, and the checksum too, as another program might have."""
    name = next(iter(arrays))
    own = {name: change(arrays[name])} if callable(change) else change
    arrays = {**arrays, **own}
    of_content = {n: a for n, a in arrays.items() if n not in ("weights", "content")}
    return written({**arrays, "content": np.array(_checksum(of_content))})


DAMAGES = {
    "is empty": lambda arrays: b"",
    "is cut": lambda arrays: written(arrays)[:-999],
    "has a changed byte": lambda arrays: written(arrays).replace(
        b"\0" * 8, b"\1" * 8, 9
    ),
    "is foreign": lambda arrays: b"no archive" * 99,
    "is an archive of something else": lambda arrays: written({"a": np.ones(3)}),
    "lacks an array": lambda arrays: without(arrays, next(iter(arrays))),
    "lacks a checksum": lambda arrays: without(arrays, "content"),
    "is large once unpacked": compressed,
    "has pickles": lambda arrays: changed(
        {**arrays, "0/a": np.array([{}], object)}, {"0/b": np.ones(1)}
    ),
    "has a wrong shape": lambda arrays: changed(arrays, lambda own: own[..., :1]),
    "has a wrong dtype": lambda arrays: changed(arrays, lambda own: own.astype("f8")),
    "has another array": lambda arrays: changed(arrays, {"0/0/extra": np.ones([2, 1])}),
    "has a name of another kind": lambda arrays: changed(arrays, {"a": np.ones(1)}),
    "has NaN": lambda arrays: changed(arrays, lambda own: own * np.float32("nan")),
    "is of another reducer": None,
}


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    """Returns a trained model, its file, and that of its memory with its arrays."""
    path = tmp_path_factory.mktemp("memory") / "m.weights.h5"
    model = made(TOP)
    fit(model, 1)
    model.save_weights(path)
    companion = path.with_name(f"{path.name}.reducer.npz")
    arrays = dict(np.load(companion))
    return model, path, companion, arrays


@pytest.mark.slow
@pytest.mark.parametrize("is_new", [False, True], ids=["trained", "new"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_memory_costs_a_warning_and_nothing_else(
    remembering, tmp_path, caplog, damage, is_new
):
    model, path, companion, arrays = remembering
    fill = DAMAGES[damage]
    companion.write_bytes(written(arrays) if fill is None else fill(arrays))
    other = made(TOP if fill else compression.power_sgd(rank=2))
    if not is_new:
        fit(other, 1, steps_per_epoch=1)
    other.optimizer.build(other.trainable_variables)
    with caplog.at_level(logging.WARNING):
        other.load_weights(path)
        np.testing.assert_equal(other.get_weights(), model.towers[0].get_weights())
        fit(other, 1, steps_per_epoch=1)
    (line,) = (own for own in caplog.messages if "starts from zero" in own)
    assert str(companion) in line
    assert np.isfinite(
        np.concatenate([own.ravel() for own in errors_of(other).values()])
    ).all()


@pytest.mark.parametrize("steps", [None, 2], ids=["plain", "accumulates"])
def test_no_matrix_leaves_its_tower(steps):
    power, graphs = compression.power_sgd(rank=2), set()

    class Noting:
        def init(self, variables):
            return power.init(variables)

        def update(self, grads, states, add):
            graphs.add(tf.compat.v1.get_default_graph())
            return power.update(grads, states, add)

    model = TowerModel(make, CPUS[:2], reducer=Noting())
    adam = keras.optimizers.Adam(0.01, gradient_accumulation_steps=steps)
    model.compile(adam, "mse")
    fit(model, 1, steps_per_epoch=1)
    ops = [op for graph in graphs for op in graph.get_operations()]
    large = [
        (tensor.name, canonical_device(tensor.device), canonical_device(op.device))
        for op in ops
        if op.type != "If"  # whose tensors stay where they are
        for tensor in op.inputs
        if (tensor.shape.num_elements() or 0) >= 40 * 128
    ]
    assert {to for _, _, to in large} == set(map(canonical_device, CPUS[:2]))
    assert [own for own in large if own[1] != own[2]] == []


def test_a_lone_tower_sends_and_remembers_too():
    model = made(TOP, 1)
    assert model.reducer_states == []
    fit(model, 1)
    assert max(np.abs(own).max() for own in errors_of(model).values()) > 1e-3


@pytest.mark.slow
def test_a_reducer_that_looks_at_variables_gets_them_unscaled():
    seen = []

    def largest_norm(grads):
        seen.append([tuple(grad.shape) for grad in grads[0]])
        best = []
        for column in zip(*grads, strict=True):
            norms = tf.stack([tf.norm(tf.minimum(grad, 1.0)) for grad in column])
            best.append(tf.gather(tf.stack(column), tf.argmax(norms)))
        return [list(best) for _ in grads]

    weights = []
    for optimizer in (
        keras.optimizers.SGD(0.1),
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2**10),
    ):
        model = TowerModel(make, CPUS[:2], reducer=largest_norm)
        model.compile(optimizer, "mse")
        fit(model, 1)
        weights.append(model.get_weights())
    assert set(map(str, seen)) == {str([(40, 128), (128,), (128, 64), (64,)])}
    for own, scaled in zip(*weights, strict=True):
        np.testing.assert_allclose(scaled, own, rtol=1e-6, atol=1e-7)


class Alone:
    """A group of one that exchanges nothing."""

    rank, size = 0, 1

    def sum(self, tensors, *, names=()):
        return list(tensors)

    broadcast = bounded = tell = wait_for = sum


@pytest.mark.parametrize("swaps", [False, True])
def test_the_group_of_a_step_has_what_its_group_has(swaps):
    class Swapping(Alone):
        all_to_all = Alone.sum

    group = Swapping() if swaps else Alone()
    made = Exchanges(group, shares_data=False).group_of("sums")
    for name in ("rank", "size", "sum", "broadcast", "bounded", "tell", "wait_for"):
        # As Python 3.12 asks whether an object has the methods of a protocol.
        getattr_static(made, name)
    assert isinstance(made, RankGroup)
    assert hasattr(made, "all_to_all") == swaps
