"""Steps whose parts before and after the towers' sums XLA compiles."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_ampopt import DynamicLossScale, SimpleAdam, StaticLossScale, TowerOptimizer
from tw_core import LeastLoadedDeviceSetter, map_towers, towers
from tw_core.flat_variables import FlatVariables, pack_gradients
from tw_core.testing import CPUS

# Two in a pack, one above 16,384 elements, and a table.
SHAPES = [(3,), (4, 4), (129, 130), (6, 3)]
DYNAMIC = {"loss_scale": DynamicLossScale(growth_interval=2)}
CLIPPED = {**DYNAMIC, "clip_by_global_norm": 4.0}
IN_TWOS = {**DYNAMIC, "accumulation_steps": 2}
V1_ADAM = {"tf_optimizer": "tf.train.AdamOptimizer"}
KERAS_SGD = {"tf_optimizer": keras.optimizers.SGD, "momentum": 0.9}
RATE = {"learning_rate": lambda updates: 0.5 / tf.cast(updates + 1, tf.float32)}

# towers, whether they have weights, options.
CASES = {
    "keras": (2, False, {**CLIPPED, "tf_optimizer": keras.optimizers.Adam}),
    "alone": (1, False, {**CLIPPED, **KERAS_SGD}),
    "v1": (2, True, {**V1_ADAM, "loss_scale": StaticLossScale(6)}),
    "schedule": (3, False, {**V1_ADAM, **RATE}),
    "legacy": (2, False, {**DYNAMIC, "tf_optimizer": tf_keras.optimizers.legacy.Adam}),
    "simple": (2, True, {**CLIPPED, "tf_optimizer": SimpleAdam}),
    "groups": (4, True, {**IN_TWOS, **KERAS_SGD, "clip_by_global_norm": 4.0}),
    "alone in groups": (1, False, {**IN_TWOS, **V1_ADAM}),
    "dropping": (2, True, {**IN_TWOS, **V1_ADAM, "on_nonfinite": "drop_micro_batch"}),
    "halves": (2, False, {**DYNAMIC, **KERAS_SGD, "master_copies": True}),
}


class Run:
    """A ``TowerOptimizer`` with steps by gradients that are given."""

    def __init__(self, num_towers, weighs=False, options=None, dtype="float32"):
        self.lists = []
        for device in CPUS[:num_towers]:
            with tf.device(device):
                self.lists.append([tf.Variable(tf.ones(s, dtype)) for s in SHAPES])
        self.weighs = weighs
        self.optimizer = TowerOptimizer(self.lists, **{"learning_rate": 0.1, **options})
        self.step = tf.function(self._step, autograph=False)

    def _step(self, factors, weights, jit_compile):
        def grads(dtype, factor, scale):
            dense = [tf.cast(factor * n, dtype) * scale for n in (1, 2, -1)]
            own = [tf.fill(s, g) for s, g in zip(SHAPES, dense, strict=False)]
            rows = tf.fill([3, 3], dense[0])
            return [*own, tf.IndexedSlices(rows, tf.constant([1, 4, 1]), SHAPES[3])]

        dtype = self.lists[0][0].dtype
        scale = self.optimizer.apply_loss_scaling(tf.constant(1.0, dtype))
        given = [grads(dtype, factor, scale) for factor in tf.unstack(factors)]
        given[0][1] = None
        weights = tf.unstack(weights) if self.weighs else None
        return self.optimizer.apply(given, weights=weights, jit_compile=jit_compile)

    def take(self, steps, *, jit):
        """Takes steps, some of them compiled and two with a NaN in the last tower."""
        number, said = len(self.lists), []
        for n in steps:
            factors = np.linspace(0.5, 1.5, number, dtype="f") * (n + 1)
            factors[-1] = np.nan if n in (2, 5) else factors[-1]
            weights = np.arange(number, dtype="f") + (n % 2)
            said.append(bool(self.step(factors, tf.constant(weights), n in jit)))
        return said

    def state(self):
        found = [v.numpy() for own in self.lists for v in own]
        found += [v.numpy() for v in self.optimizer.variables()]
        return found + [v.numpy() for v in self.optimizer.statistics().values()]

    def checkpoint(self):
        return tf.train.Checkpoint(model=self.lists[0], optimizer=self.optimizer)


@pytest.mark.slow(by_day=["alone"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_steps_leave_the_state_of_uncompiled_ones(case, tmp_path):
    number, weighs, options = CASES[case]
    dtype = "float16" if case == "halves" else "float32"
    plain, compiled, resumed = (Run(number, weighs, options, dtype) for _ in range(3))
    said = plain.take(range(8), jit=())
    assert 0 < sum(said) < 8
    assert compiled.take(range(6), jit=(0, 1, 2, 4, 5)) == said[:6]
    resumed.checkpoint().restore(compiled.checkpoint().save(f"{tmp_path}/at"))
    resumed.optimizer.copy_to_replicas()
    for run, jit in ((compiled, (6, 7)), (resumed, ())):
        assert run.take((6, 7), jit=jit) == said[6:]
        # Norms are sums of thousands of squares, which XLA adds in another order.
        for got, want in zip(run.state(), plain.state(), strict=True):
            np.testing.assert_allclose(
                got, want, 5e-6 if want.size == 1 else 2e-6, 2e-6
            )


def compiled_calls(concrete):
    """Counts the calls of functions that XLA compiles, at any depth."""
    graph = concrete.graph.as_graph_def()
    compiled = {
        own.signature.name
        for own in graph.library.function
        if own.attr["_XlaMustCompile"].b
    }
    nodes = [*graph.node, *(n for own in graph.library.function for n in own.node_def)]
    return sum(n.attr["f"].func.name in compiled for n in nodes if "f" in n.attr)


@pytest.mark.parametrize(
    ("case", "calls"), [("keras", 2), ("alone", 1), ("groups", 8), ("v1", 4)]
)
def test_a_tower_has_a_function_on_either_side_of_the_sums(case, calls):
    number, weighs, options = CASES[case]
    run = Run(number, weighs, options)
    given = [tf.ones([number]), tf.ones([number])]
    assert compiled_calls(run.step.get_concrete_function(*given, True)) == calls
    assert not compiled_calls(run.step.get_concrete_function(*given, False))


def test_gradients_of_a_tower_on_a_gpu_are_compiled_with_the_scale_read_before(
    monkeypatch,
):
    run = Run(2, options={**DYNAMIC, **KERAS_SGD})
    monkeypatch.setattr(TowerOptimizer, "_devices", lambda self: {"/device:GPU:0"})

    def gradients(_, own):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v**2) for v in own])
            loss = run.optimizer.apply_loss_scaling(loss)
        return tape.gradient(loss, own)

    @tf.function(autograph=False)
    def step():
        grads = map_towers(
            *(gradients, towers(CPUS[:2]), run.lists), trace="once", jit_compile=True
        )
        return run.optimizer.apply(grads, jit_compile=True)

    assert bool(step())
    for v in (v for own in run.lists for v in own):
        np.testing.assert_allclose(v.numpy(), 0.8, 2e-6)


def test_flat_variables_are_updated_as_their_parts_are():
    def make():
        flat = FlatVariables()
        with flat.scope():
            [tf.Variable(tf.ones(shape)) for shape in SHAPES[:2]]
        return flat

    flats = [make() for _ in range(2)]
    optimizer = TowerOptimizer(
        [flat.variables for flat in flats], **{**DYNAMIC, **KERAS_SGD}
    )

    @tf.function(autograph=False)
    def step():
        scale = optimizer.apply_loss_scaling(tf.constant(1.0))
        grads = [
            [
                g
                for g, _ in pack_gradients(
                    [(tf.fill(v.shape, scale * (k + 1)), v) for v in flat.views]
                )
            ]
            for k, flat in enumerate(flats)
        ]
        return optimizer.apply(grads, jit_compile=True)

    assert bool(step())
    for flat in flats:
        for v in flat.views:
            np.testing.assert_allclose(v.numpy(), 1 - 0.001 * 1.5, 2e-6)


@pytest.mark.parametrize(
    ("dtype", "master_copies"), [(tf.float32, False), (tf.float16, True)]
)
def test_flat_variables_need_an_elementwise_optimizer(dtype, master_copies):
    flat = FlatVariables()
    with flat.scope():
        tf.Variable(tf.ones([3], dtype))
    options = {"tf_optimizer": "keras.optimizers.Lamb", "master_copies": master_copies}
    with pytest.raises(ValueError, match="Lamb is not known to update each element"):
        TowerOptimizer([flat.variables], **options)


def test_what_cannot_be_compiled_is_refused():
    run = Run(1, options=DYNAMIC)
    grads = [tf.ones(s) for s in SHAPES]
    with pytest.raises(RuntimeError, match=r"part of a tf.function; call apply inside"):
        run.optimizer.apply(grads, jit_compile=True)
    with pytest.raises(TypeError, match="jit_compile"):
        run.optimizer.apply(grads, jit_compile="auto")
    setter = LeastLoadedDeviceSetter(CPUS[0], list(CPUS[:2]))
    with tf.variable_creator_scope(setter.create):
        shared = [tf.Variable(tf.ones([3])) for _ in range(2)]
    optimizer = TowerOptimizer(shared, towers=towers(CPUS[:2]))
    step = tf.function(lambda g: optimizer.apply([g, g], jit_compile=True))
    with pytest.raises(
        ValueError, match=r"tower 0 are on \[.*CPU:0', '.*CPU:1'\].*Fals"
    ):
        step([tf.ones([3])] * 2)
    options = {"tf_optimizer": "tf.train.MomentumOptimizer", "momentum": 0.9}
    for number in (1, 2):
        with pytest.raises(ValueError, match=r"MomentumOptimizer updates .*SparseA"):
            Run(number, options=options).take([0], jit=[0])
