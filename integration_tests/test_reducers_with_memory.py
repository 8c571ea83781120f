"""A reducer with memory trains wherever one is taken as a model in NumPy does."""

import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf

import tw_ampopt
import tw_builders
from tw_core import get_current_tower_context, map_towers, towers
from tw_core.testing import CPUS
from tw_keras import TowerModel
from tw_reduce import ReducerState, compression, mean
from tw_rlload import DeviceBatch, EpochFunction

K, STEPS, ROWS, RATE, SENT = 2, 6, 3, 0.5, 200
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(STEPS, K * ROWS, 80)).astype(np.float32)
Y = RANDOM.normal(size=(STEPS, K * ROWS, 64)).astype(np.float32)
START = RANDOM.normal(size=(80, 64)).astype(np.float32) / 9
REDUCER = compression.error_feedback(compression.top_k(count=SENT))
TOWERS = towers(CPUS[:K])
v1 = tf.compat.v1


def largest(full):
    kept = np.zeros(full.size, np.float32)
    places = np.argsort(-np.abs(full).ravel(), kind="stable")[:SENT]
    kept[places] = full.ravel()[places]
    return kept.reshape(full.shape)


@pytest.fixture(scope="module")
def wanted():
    """Returns what w and b are after all steps."""
    w, b = START.astype(np.float64), np.zeros(64)
    errors = [np.zeros_like(w) for _ in range(K)]
    for x, y in zip(X, Y, strict=True):
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


def on_each(make):
    made = []
    for tower in TOWERS:
        with tf.device(tower.device):
            made.append(make())
    return made


def make_variables():
    return on_each(lambda: [tf.Variable(START), tf.Variable(tf.zeros([64]))])


def loss_of(variables, x, y):
    w, b = variables
    return tf.reduce_mean(tf.square(tf.matmul(x, w) + b - y))


def parts(values):
    return list(tf.split(values, K))


def gradients(variables, x, y, scaled=lambda loss: loss):
    def of_tower(_, own, x, y):
        with tf.GradientTape() as tape:
            loss = scaled(loss_of(own, x, y))
        return tape.gradient(loss, own)

    return map_towers(of_tower, TOWERS, variables, parts(x), parts(y))


def own_step(jit_compile):
    variables = make_variables()
    reduce = mean(ReducerState(REDUCER, variables))
    optimizers = on_each(lambda: keras.optimizers.SGD(RATE))

    @tf.function(autograph=False)
    def step(x, y):
        tw_builders.apply_gradients(
            *(TOWERS, reduce(gradients(variables, x, y)), variables, optimizers),
            jit_compile=jit_compile,
        )

    for x, y in zip(X, Y, strict=True):
        step(x, y)
    return variables


def tower_optimizer(jit_compile, **options):
    variables = make_variables()
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
        grads = gradients(variables, x, y, optimizer.apply_loss_scaling)
        return optimizer.apply(grads, jit_compile=jit_compile)

    for n, (x, y) in enumerate(zip(X, Y, strict=True)):
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


def tower_model(jit_compile, optimizer, times=1):
    model = TowerModel(Linear, TOWERS, reducer=REDUCER)
    model.compile(optimizer, loss="mse", jit_compile=jit_compile)
    rows = [np.repeat(own, times, 0).reshape(-1, own.shape[-1]) for own in (X, Y)]
    model.fit(*rows, batch_size=K * ROWS, shuffle=False, verbose=0)
    return [own.trainable_variables for own in model.towers]


def scaling(inner):
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)


def epoch_function(jit_compile):
    models = on_each(Linear)
    specs = {"x": tf.TensorSpec([None, 80]), "y": tf.TensorSpec([None, 64])}
    batch = DeviceBatch(TOWERS, specs, max_per_device_batch_size=ROWS)
    function = EpochFunction(
        batch,
        lambda model, inputs: loss_of(model.trainable_variables, **inputs),
        models,
        on_each(lambda: scaling(keras.optimizers.SGD(RATE))),
        reducer=REDUCER,
        jit_compile=jit_compile,
    )
    # A tower's rows lie together.
    rows = [
        own.reshape(STEPS, K, ROWS, -1).swapaxes(0, 1).reshape(STEPS * K * ROWS, -1)
        for own in (X, Y)
    ]
    for offset in batch.load(rows).batch_offsets:
        function.optimize(offset)
    assert function.reducer_state.variables
    return [own.trainable_variables for own in models]


def in_session(build):
    """Trains in a session graph by the op that ``build`` makes of two placeholders."""
    with tf.Graph().as_default():
        x, y = (
            v1.placeholder("float32", X[0].shape),
            v1.placeholder("float32", Y[0].shape),
        )
        op, after, variables = build(parts(x), parts(y))
        config = v1.ConfigProto(device_count={"CPU": len(CPUS)})
        with v1.Session(config=config) as session:
            session.run(
                [v1.global_variables_initializer(), v1.local_variables_initializer()]
            )
            session.run(after)
            saver = v1.train.Saver()
            for n, (own_x, own_y) in enumerate(zip(X, Y, strict=True)):
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


def built_by_tensorpack(x, y):
    builder = tw_builders.SyncMultiGPUReplicatedBuilder(
        CPUS[:K], average=True, mode=REDUCER
    )

    def tower_fn():
        k, variables = get_current_tower_context().index, make_in_graph()
        grads = tf.gradients(loss_of(variables, x[k], y[k]), variables)
        return list(zip(grads, variables, strict=True))

    pairs = builder.call_for_each_tower(tower_fn)
    op, after = builder.build(pairs, lambda: v1.train.GradientDescentOptimizer(RATE))
    return op, after, [[variable for _, variable in own] for own in pairs]


def built_by_stylegan(x, y):
    optimizer = tw_ampopt.Optimizer(
        tf_optimizer="tf.train.GradientDescentOptimizer",
        learning_rate=RATE,
        use_loss_scaling=True,
        reducer=REDUCER,
    )
    every = []
    for k, tower in enumerate(TOWERS):
        with tf.device(tower.device), v1.variable_scope(f"copy{k}"):
            every.append(make_in_graph())
            optimizer.register_gradients(loss_of(every[k], x[k], y[k]), every[k])
    return optimizer.apply_updates(), tf.no_op(), every


def assert_trained(every, wanted):
    for own in every:
        for variable, want in zip(own, wanted, strict=True):
            got = variable if isinstance(variable, np.ndarray) else variable.numpy()
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "train",
    [
        own_step,
        tower_optimizer,
        lambda jit: tower_optimizer(jit, accumulation_steps=2),
        lambda jit: tower_model(jit, keras.optimizers.SGD(RATE)),
        lambda jit: tower_model(jit, scaling(keras.optimizers.SGD(RATE))),
        lambda jit: tower_model(
            jit, keras.optimizers.SGD(RATE, gradient_accumulation_steps=2), times=2
        ),
        epoch_function,
    ],
    ids=[
        *("own step", "ampopt", "accumulates", "fit", "scales", "fit accumulates"),
        "rlload",
    ],
)
def test_functions_train_as_a_model_in_numpy(train, jit_compile, wanted):
    assert_trained(train(jit_compile), wanted)


@pytest.mark.parametrize("build", [built_by_tensorpack, built_by_stylegan])
def test_session_graphs_train_as_a_model_in_numpy(build, wanted):
    assert_trained(in_session(build), wanted)
