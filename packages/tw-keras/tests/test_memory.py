"""A reducer with memory in ``fit``: saved beside the model, and given back."""

import io
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from tower_models import CPUS

from tw_core.devices import canonical_device
from tw_keras import TowerModel
from tw_keras._files import _checksum
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


def test_what_has_no_memory_of_all_towers_is_refused():
    with pytest.raises(ValueError, match="use run_eagerly=False"):
        fit(made(TOP, run_eagerly=True), 1)
    with pytest.raises(ValueError, match="variables='replicated'"):
        TowerModel(make, CPUS[:2], reducer=TOP, variables="sharded")
