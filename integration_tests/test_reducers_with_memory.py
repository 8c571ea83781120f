"""A reducer with memory trains wherever one is taken as a model in NumPy does."""

import tempfile
from functools import cache

import keras
import numpy as np
import pytest
import tensorflow as tf
from programs.rank_memory_fits import SENT, largest

import tw_ampopt
import tw_builders
from tw_core import get_current_tower_context, map_towers, towers
from tw_core.testing import CPUS
from tw_keras import TowerModel
from tw_reduce import ReducerState, compression, mean
from tw_rlload import DeviceBatch, EpochFunction

STEPS, ROWS, RATE = 6, 3, 0.5  # rows of a tower
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(STEPS, 2 * ROWS, 80)).astype(np.float32)
Y = RANDOM.normal(size=(STEPS, 2 * ROWS, 64)).astype(np.float32)
START = RANDOM.normal(size=(80, 64)).astype(np.float32) / 9
REDUCER = compression.error_feedback(compression.top_k(count=SENT))
v1 = tf.compat.v1


class Work:
    """Towers, and the rows of their steps."""

    def __init__(self, num_towers):
        self.towers, self.devices = towers(CPUS[:num_towers]), CPUS[:num_towers]
        self.x, self.y = (own[:, : num_towers * ROWS] for own in (X, Y))
        self.steps = list(zip(self.x, self.y, strict=True))

    def on_each(self, make):
        made = []
        for tower in self.towers:
            with tf.device(tower.device):
                made.append(make())
        return made

    def make_variables(self):
        return self.on_each(lambda: [tf.Variable(START), tf.Variable(tf.zeros([64]))])

    def parts(self, values):
        return list(tf.split(values, len(self.towers)))

    def gradients(self, variables, x, y, scaled=lambda loss: loss):
        def of_tower(_, own, x, y):
            with tf.GradientTape() as tape:
                loss = scaled(loss_of(own, x, y))
            return tape.gradient(loss, own)

        rows = self.parts(x), self.parts(y)
        return map_towers(of_tower, self.towers, variables, *rows)


@cache
def wanted(num_towers):
    """Returns what w and b are after all steps."""
    w, b = START.astype(np.float64), np.zeros(64)
    errors = [np.zeros_like(w) for _ in range(num_towers)]
    for x, y in Work(num_towers).steps:
        away = 2 * (x @ w + b - y) / y.size
        sent = np.zeros_like(w)
        for k, error in enumerate(errors):
            own = slice(k * ROWS, (k + 1) * ROWS)
            full = x[own].T @ away[own] + error
            kept = largest(full)
            errors[k], sent = full - kept, sent + kept
        w, b = w - RATE * sent, b - RATE * away.sum(0)
    assert max(np.abs(error).max() for error in errors) > 1e-3
    return w, b


def loss_of(variables, x, y):
    w, b = variables
    return tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y))


def own_step(work, jit_compile):
    variables = work.make_variables()
    reduce = mean(ReducerState(REDUCER, variables))
    optimizers = work.on_each(lambda: keras.optimizers.SGD(RATE))

    @tf.function(autograph=False)
    def step(x, y):
        tw_builders.apply_gradients(
            *(
                work.towers,
                reduce(work.gradients(variables, x, y)),
                variables,
                optimizers,
            ),
            jit_compile=jit_compile,
        )

    for x, y in work.steps:
        step(x, y)
    return variables


def tower_optimizer(work, jit_compile, **options):
    variables = work.make_variables()
    optimizer = tw_ampopt.TowerOptimizer(
        variables,
        tf_optimizer=keras.optimizers.SGD,
        learning_rate=RATE,
        loss_scale=tw_ampopt.DynamicLossScale(),
        reducer=REDUCER,
        **options,
    )

    @tf.function(autograph=False)
    def step(x, y):
        grads = work.gradients(variables, x, y, optimizer.apply_loss_scaling)
        return optimizer.apply(grads, jit_compile=jit_compile)

    for n, (x, y) in enumerate(work.steps):
        if n == 2:  # It skips, and remembers what it did.
            assert not any(step(x * np.inf, y) for _ in range(1 + len(options)))
        for _ in range(1 + len(options)):  # Twice the same is the mean of both.
            updated = step(x, y)
        assert updated
    return variables


class Linear(keras.Model):
    def __init__(self):
        super().__init__()
        self.w = self.add_weight(shape=START.shape, name="w")
        self.b = self.add_weight(shape=[64], initializer="zeros", name="b")
        self.w.assign(START)
        self.built = True

    def call(self, x):
        return tf.matmul(x, self.w.value) + self.b.value


def tower_model(work, jit_compile, optimizer, times=1):
    model = TowerModel(Linear, work.towers, reducer=REDUCER)
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    rows = [
        np.repeat(own, times, 0).reshape(-1, own.shape[-1]) for own in (work.x, work.y)
    ]
    model.fit(*rows, batch_size=work.x.shape[1], shuffle=False, verbose=0)
    return [own.trainable_variables for own in model.towers]


def scaling(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)


def epoch_function(work, jit_compile):
    models = work.on_each(Linear)
    specs = {"x": tf.TensorSpec([None, 80]), "y": tf.TensorSpec([None, 64])}
    batch = DeviceBatch(work.towers, specs, max_per_device_batch_size=ROWS)
    function = EpochFunction(
        batch,
        lambda model, inputs: loss_of(model.trainable_variables, **inputs),
        models,
        work.on_each(lambda: scaling(keras.optimizers.SGD(RATE))),
        reducer=REDUCER,
        jit_compile=jit_compile,
    )
    # A tower's rows lie together.
    rows = [
        own.reshape(STEPS, -1, ROWS, own.shape[-1])
        .swapaxes(0, 1)
        .reshape(-1, own.shape[-1])
        for own in (work.x, work.y)
    ]
    for offset in batch.load(rows).batch_offsets:
        function.optimize(offset)
    assert function.reducer_state.variables
    return [own.trainable_variables for own in models]


def in_session(work, build):
    """Trains in a session graph by the op that ``build`` makes of two placeholders."""
    with tf.Graph().as_default():
        x, y = (
            v1.placeholder("float32", work.x[0].shape),
            v1.placeholder("float32", work.y[0].shape),
        )
        op, after, variables = build(work, work.parts(x), work.parts(y))
        config = v1.ConfigProto(device_count={"CPU": len(CPUS)})
        with v1.Session(config=config) as session:
            session.run(
                [v1.global_variables_initializer(), v1.local_variables_initializer()]
            )
            session.run(after)
            saver = v1.train.Saver()
            for n, (own_x, own_y) in enumerate(work.steps):
                session.run(op, {x: own_x, y: own_y})
                if n == 3:  # What is remembered is saved, and given back.
                    path = saver.save(session, tempfile.mkdtemp() + "/all")
                    session.run(op, {x: own_x, y: own_y})
                    saver.restore(session, path)
                    session.run(after)
            return session.run(variables)


def make_in_graph():
    start = v1.initializers.constant(START)
    w = v1.get_variable("w", START.shape, initializer=start)
    return [w, v1.get_variable("b", [64], initializer=v1.initializers.zeros())]


def built_by_tensorpack(work, x, y):
    builder = tw_builders.SyncMultiGPUReplicatedBuilder(
        work.devices, average=True, mode=REDUCER
    )

    def tower_fn():
        k, variables = get_current_tower_context().index, make_in_graph()
        grads = tf.gradients(loss_of(variables, x[k], y[k]), variables)
        return list(zip(grads, variables, strict=True))

    pairs = builder.call_for_each_tower(tower_fn)
    op, after = builder.build(pairs, lambda: v1.train.GradientDescentOptimizer(RATE))
    after = after or tf.no_op()  # A single tower has nothing to copy.
    return op, after, [[variable for _, variable in own] for own in pairs]


def built_by_stylegan(work, x, y):
    optimizer = tw_ampopt.Optimizer(
        tf_optimizer="tf.train.GradientDescentOptimizer",
        learning_rate=RATE,
        use_loss_scaling=True,
        reducer=REDUCER,
    )
    every = []
    for k, tower in enumerate(work.towers):
        with tf.device(tower.device), v1.variable_scope(f"copy{k}"):
            every.append(make_in_graph())
            optimizer.register_gradients(loss_of(every[k], x[k], y[k]), every[k])
    return optimizer.apply_updates(), tf.no_op(), every


def assert_trained(every, wanted):
    for own in every:
        for variable, want in zip(own, wanted, strict=True):
            got = variable if isinstance(variable, np.ndarray) else variable.numpy()
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "train",
    [
        own_step,
        tower_optimizer,
        lambda *own: tower_optimizer(*own, accumulation_steps=2),
        lambda *own: tower_model(*own, keras.optimizers.SGD(RATE)),
        lambda *own: tower_model(*own, scaling(keras.optimizers.SGD(RATE))),
        lambda *own: tower_model(
            *own, keras.optimizers.SGD(RATE, gradient_accumulation_steps=2), times=2
        ),
        epoch_function,
    ],
    ids=[
        *("own step", "ampopt", "accumulates", "fit", "scales", "fit accumulates"),
        "rlload",
    ],
)
@pytest.mark.parametrize("num_towers", [1, 2])
def test_functions_train_as_a_model_in_numpy(num_towers, train, jit_compile):
    assert_trained(train(Work(num_towers), jit_compile), wanted(num_towers))


@pytest.mark.parametrize("build", [built_by_tensorpack, built_by_stylegan])
@pytest.mark.parametrize("num_towers", [1, 2])
def test_session_graphs_train_as_a_model_in_numpy(num_towers, build):
    assert_trained(in_session(Work(num_towers), build), wanted(num_towers))
