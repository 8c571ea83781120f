"""``compare``: what it calls equal, what not, and which reason it gives."""

import re
import tomllib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tower_models import CPUS

from tw_keras import Comparison, _doctor, compare
from tw_keras._comparing import verdict
from tw_keras._comparing.verdict import Difference, Value
from tw_keras._steps import Steps

PACKAGE = Path(__file__).parents[1]
layers = keras.layers
RANDOM = np.random.default_rng(0)
X, LABELS = RANDOM.normal(size=[100, 6]), RANDOM.integers(0, 3, 100)
TOKENS = RANDOM.integers(0, 3, [100, 6])
STATIC = tf.data.Dataset.from_tensor_slices((X, LABELS)).batch(10, drop_remainder=True)
TWO = CPUS[:2]
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SETTINGS = {"optimizer": "adam", "loss": SPARSE, "metrics": ["accuracy"]}


class TestVerdict:
    """Plain Python."""

    def test_an_equal_result_is_one_line(self):
        result = Comparison(True, 3.4e-16, 3, 2, "float64")
        assert str(result) == "equal to 3e-16 (3 steps, 2 towers, float64)"
        assert result
        narrow = Comparison(True, 0.0, 1, 1, "float32")
        assert str(narrow) == (
            "equal to 0e+00 (1 step, 1 tower, float32)\n"
            "In float32, in which differences up to 0.001 count as equal."
        )

    def test_a_result_that_differs_has_at_most_five_lines(self):
        why = tuple("abcdef")
        result = Comparison(False, 0.0123, 3, 2, "float32", "dense/kernel", 2, why)
        assert str(result).splitlines() == [
            "differs by 0.01 in step 2: dense/kernel (3 steps, 2 towers, float32)",
            "In float32, in which differences up to 0.001 count as equal.",
            *"abc",
        ]
        assert not result

    @pytest.mark.parametrize(
        ("got", "step", "value", "size"),
        [
            ([1.0, 2.0, 4.0], 0, "", 0.0),
            ([1.0, 2.0, 4.0 + 4e-12], 0, "", 1e-12),
            ([1.0, 2.0, 5.0], 2, "d/kernel", 0.25),
            ([1.0, 2.5, 5.0], 2, "mae", 0.25),
            ([np.nan, 2.0, 4.0], 2, "loss", np.inf),
            ([1.0, None, 4.0], 2, "mae", np.inf),
        ],
    )
    def test_the_first_value_that_differs_is_found(self, got, step, value, size):
        def values(of_step, model="d"):
            names = ("loss", "mae", f"{model}/kernel")
            kinds = ("loss", "metric", "weight")
            every = zip(kinds, names, of_step, strict=True)
            return [Value(*own) for own in every if own[2] is not None]

        wanted = [1.0, 2.0, 4.0]
        both = [values(wanted)] * 2, [values(wanted, "d_1"), values(got, "d_1")]
        found = verdict.first_difference(*both, 1e-9)
        assert found[:2] == (step, value)
        np.testing.assert_allclose(found.size, size, rtol=1e-3, atol=1e-14)
        if value == "mae" and size == 0.25:
            assert found.kinds == {"metric", "weight"}

    def test_a_metric_that_only_towers_have_differs(self):
        plain, extra = Value("loss", "loss", 1.0), Value("metric", "more", 1.0)
        found = verdict.first_difference([[plain]], [[plain, extra]], 1e-9)
        assert found[:3] == (1, "more", np.inf)

    @given(
        rows=st.lists(st.integers(1, 9), min_size=3, max_size=3),
        constant=st.floats(-2, 2),
        seed=st.integers(0, 999),
    )
    def test_a_loss_is_known_by_its_values_for_parts(self, rows, constant, seed):
        random = np.random.default_rng(seed)
        parts = [random.normal(size=n) for n in rows]
        weights = [random.integers(1, 9, n) for n in rows]

        def losses(of):
            chosen = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]
            join = np.concatenate
            return [
                constant
                + of(join([parts[k] for k in own]), join([weights[k] for k in own]))
                for own in chosen
            ]

        def root(values, _):
            return np.sqrt(np.mean(values**2))

        def weighted(values, of):
            return np.average(values, weights=of)

        def kind(*of):
            return verdict.kind_of_loss(rows, [*map(losses, of)], 1e-9)

        assert kind(lambda values, _: np.mean(values)) == "rows"
        assert kind(lambda values, _: np.sum(values) / 7) == "sum"
        per_row = {own.sum() / n for own, n in zip(weights, rows, strict=True)}
        assert kind(weighted) == ("rows" if len(per_row) == 1 else "weights")
        assert kind(root) == "batch"
        assert kind(weighted, weighted) == kind(weighted)
        assert kind(lambda values, _: np.sum(values) / np.sum(values**2)) == "weights"

        def with_weights(power):
            return lambda values, of: np.average(values, weights=of**power)

        assert kind(with_weights(1), with_weights(3)) in ("batch", "rows")

    def test_each_reason_is_given_for_its_finding(self):
        loss = Difference(1, "loss", 0.1, frozenset({"loss", "weight"}))
        equal = Difference(0, "", 2e-16, frozenset())

        def starts(*expected, left=loss, **findings):
            found = verdict.reasons(left, **findings)
            assert [own[: len(e)] for own, e in zip(found, expected, strict=True)] == [
                *expected
            ]

        starts("The loss is over the whole batch", loss="batch")
        starts("The loss is a sum over rows", loss="sum")
        starts("The loss is a mean over something other than rows", loss="weights")
        starts("The cause is unknown: the loss is a mean over rows", loss="rows")
        starts("The cause is unknown, and the loss could not be", loss=None)
        starts(
            "Random numbers",
            "It is equal to 2e-16 without random numbers.",
            left=equal,
            is_random=True,
        )
        untried = {"is_random": True, "is_untried": True}
        starts("Random numbers", "Whether anything else", **untried)
        starts(
            "Batch statistics are of a tower's rows in a, b, c, ...:",
            "The loss is over",
            unsynchronized=list("abcd"),
            loss="batch",
        )
        for kind, expected in (("metric", "A number that"), ("state", "State that is")):
            starts(expected, left=loss._replace(kinds=frozenset({kind})), loss="rows")
        starts("The difference is as small", left=loss._replace(size=1e-8), loss="rows")

    def test_the_pages_of_reasons_have_their_sections(self):
        pages = re.findall(r"docs/([\w/-]+\.md)#([\w-]+)", str(verdict._REASONS))
        assert len(pages) > 6
        for page, section in pages:
            text = (PACKAGE.parents[1] / "docs" / page).read_text()
            titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            slugs = [
                re.sub(r"[^\w -]", "", t).lower().replace(" ", "-") for t in titles
            ]
            assert section in slugs, f"{page} has no section {section}"


def stack(*inner, start=6):
    """Returns a function that makes a small model around some layers."""

    def make():
        own = [make_layer() for make_layer in inner]
        return keras.Sequential([keras.Input([start]), *own, layers.Dense(3)])

    return make


def hidden():
    return layers.Dense(8, "relu", kernel_regularizer="l2")


def norm(synchronized=False):
    return layers.BatchNormalization(synchronized=synchronized, name="norm")


def embedding(mask_zero=False):
    def make():
        embed = layers.Embedding(10, 4, mask_zero=mask_zero)
        return keras.Sequential(
            [keras.Input([6], dtype="int32"), embed, layers.Dense(3)]
        )

    return make


def sparse_input():
    return keras.Sequential([keras.Input([6], sparse=True), layers.Dense(3)])


def sparse_data():
    for n in range(0, 60, 15):
        yield tf.sparse.from_dense(np.maximum(X[n : n + 15], 0)), LABELS[n : n + 15]


class Own(keras.Sequential):
    """Trains on a loss of its outputs alone."""

    loss_of = staticmethod(lambda z: tf.reduce_mean(z**2))
    clips = logs_more = False

    def train_step(self, data):
        with tf.GradientTape() as tape:
            z = self(data[0], training=True)
            loss = self.loss_of(z)
        grads = tape.gradient(loss, self.trainable_variables)
        if self.clips:
            grads, _ = tf.clip_by_global_norm(grads, 0.1)
        self.optimizer.apply_gradients(
            zip(grads, self.trainable_variables, strict=True)
        )
        more = {"spread": tf.math.reduce_std(z)} if self.logs_more else {}
        return {"loss": loss, **more}


def own(*inner, **attributes):
    def make():
        layers_within = [make_layer() for make_layer in inner]
        model = Own([keras.Input([6]), *layers_within, layers.Dense(3)])
        for name, value in attributes.items():
            setattr(model, name, value)
        return model

    return make


def contrast(z):
    """Each row is to be like the next one, and unlike all others."""
    z = tf.math.l2_normalize(z, 1)
    nearest = tf.roll(tf.range(tf.shape(z)[0]), 1, 0)
    logits = tf.matmul(z, z, transpose_b=True)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(nearest, logits)
    )


def dice(y, prediction):
    chosen = keras.ops.one_hot(keras.ops.cast(y, "int32"), 3)
    chosen = keras.ops.cast(keras.ops.reshape(chosen, [-1, 3]), prediction.dtype)
    shares = keras.ops.softmax(prediction)
    both = keras.ops.sum(chosen) + keras.ops.sum(shares**2)
    return 1 - 2 * keras.ops.sum(chosen * shares) / both


class Rivals(keras.Model):
    """Two parts, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = layers.Dense(3), layers.Dense(3)

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def call(self, x):
        return self.other(self.one(x))

    def train_step(self, data):
        with tf.GradientTape(persistent=True) as tape:
            z = self.one(data[0])
            losses = tf.reduce_mean(z**2), tf.reduce_mean((self.other(z) - 1.0) ** 2)
        parts = (self.one, self.other), (self.first, self.second)
        for loss, part, optimizer in zip(losses, *parts, strict=True):
            weights = part.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": losses[0], "other": losses[1]}


class Counting(layers.Layer):
    def build(self, shape):
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.total.assign_add(tf.reduce_sum(x))
        return x


def two_inputs():
    inputs = keras.Input([6]), keras.Input([6])
    joined = layers.Concatenate()([layers.Dense(3)(x) for x in inputs])
    return keras.Model([*inputs], layers.Dense(3)(joined))


def rivals(model):
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9))


def constant_rows():
    add = layers.Lambda(lambda z: z + tf.ones([10, 3], z.dtype))
    return keras.Sequential([keras.Input([6]), layers.Dense(3), add])


def narrow():
    return keras.Sequential([keras.Input([6]), layers.Dense(3, dtype="float32")])


def compiled():
    model = stack(hidden)()
    model.compile("lion", SPARSE.__class__(from_logits=True))
    return model


def num_tokens(x, y, sample_weight):
    return tf.reduce_sum(tf.cast(x != 0, tf.float64))


class BadNoise(layers.Layer):
    """Has no rate that could be set to 0."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x), dtype=x.dtype)


SGD = {"optimizer": "sgd"}
ADAMW = {"optimizer": keras.optimizers.AdamW(0.01), "loss": SPARSE}
ROWS = (X, LABELS)
EQUAL = {  # make_model, data, compile, options of TowerModel
    "dense": (stack(hidden), ROWS, SETTINGS, {}),
    "rows with weights": (stack(), (X, LABELS, X[:, 0] ** 2), ADAMW, {}),
    "batches that divide evenly": (stack(hidden), STATIC, SETTINGS, {}),
    "synchronised": (stack(hidden, lambda: norm(True)), ROWS, SETTINGS, {}),
    "embedding": (embedding(), (TOKENS, TOKENS), ADAMW, {}),
    "sparse": (sparse_input, "sparse", SETTINGS, {}),
    "two inputs": (two_inputs, ([X, 1 - X], LABELS), SETTINGS, {}),
    "two optimizers": (Rivals, ROWS, rivals, {}),
    "compiled by make_model": (compiled, ROWS, None, {}),
    "without metrics": (stack(), ROWS, {**SETTINGS, "metrics": []}, {}),
    "own step": (own(), ROWS, SGD, {}),
    "tokens with weights": (
        *(embedding(True), (TOKENS, TOKENS), SETTINGS),
        {"weights": num_tokens},
    ),
    "sum that is announced": (
        *(own(loss_of=tf.reduce_sum), ROWS, SGD),
        {"loss_reduction": "sum"},
    ),
}
OTHER = {  # make_model, data, compile, and beginnings of lines after the first
    "batch statistics": (
        *(stack(hidden, norm), ROWS, SETTINGS),
        ["Batch statistics are of a tower's rows in norm:", "It is equal to "],
    ),
    "dropout": (
        *(stack(hidden, lambda: layers.Dropout(0.5, seed=3)), ROWS, SETTINGS),
        ["Random numbers ", "It is equal to "],
    ),
    "both": (
        *(stack(norm, lambda: layers.GaussianNoise(0.5)), ROWS, SETTINGS),
        ["Random numbers ", "Batch statistics are ", "It is equal to "],
    ),
    "noise without a rate": (
        *(stack(BadNoise), ROWS, SETTINGS),
        ["Random numbers ", "Whether anything else differs could not be tried."],
    ),
    "pairs": (own(loss_of=contrast), ROWS, SGD, ["The loss is over the whole batch "]),
    "pairs and all else": (
        *(own(norm, lambda: layers.Dropout(0.5), loss_of=contrast), ROWS, SGD),
        ["Random numbers ", "Batch statistics are ", "The loss is over the whole "],
    ),
    "dice": (
        *(stack(), ROWS, {"optimizer": "sgd", "loss": dice}),
        ["The loss is over the whole batch "],
    ),
    "sum": (own(loss_of=tf.reduce_sum), ROWS, SGD, ["The loss is a sum over rows, "]),
    "tokens": (
        *(embedding(True), (TOKENS, TOKENS), SETTINGS),
        ["The loss is a mean over something other than rows "],
    ),
    "a number in the logs": (
        *(own(logs_more=True), ROWS, SGD),
        ["A number that train_step returns without a metric "],
    ),
    "state": (stack(Counting), ROWS, SETTINGS, ["State that is computed from rows "]),
    "clipped": (own(clips=True), ROWS, SGD, ["The cause is unknown: the loss is a "]),
    "constant rows": (
        *(constant_rows, STATIC, SETTINGS),
        ["The model needs a constant number of rows, "],
    ),
    "not finite": (
        *(stack(), ROWS, {"optimizer": keras.optimizers.SGD(1e200), "loss": SPARSE}),
        ["Plain Keras has NaN or infinity, too"],
    ),
}


@pytest.mark.slow(by_day=["own step", "without metrics"])
@pytest.mark.parametrize("name", EQUAL)
def test_towers_equal_one_device(name):
    make_model, data, settings, options = EQUAL[name]
    data = sparse_data() if data == "sparse" else data
    result = compare(make_model, data, TWO, compile=settings, **options)
    assert result.equal, str(result)
    assert re.fullmatch(r"equal to \de-1\d \(3 steps, 2 towers, float64\)", str(result))


@pytest.mark.slow(by_day=["sum", "pairs"])
@pytest.mark.parametrize("name", OTHER)
def test_a_difference_is_said_with_its_reason(name):
    make_model, data, settings, expected = OTHER[name]
    result = compare(make_model, data, TWO, compile=settings)
    assert not result.equal
    first, *lines = str(result).splitlines()
    assert first.startswith("differs by " if result.step else "does not train over 2 ")
    assert len(lines) == len(expected), str(result)
    for line, start in zip(lines, expected, strict=True):
        assert line.startswith(start), str(result)


def test_a_model_with_float32_layers_is_compared_in_float32():
    result = compare(narrow, ROWS, TWO, compile=SETTINGS, steps=2)
    assert result.equal
    assert (result.dtype, result.steps) == ("float32", 2)


@pytest.mark.slow
def test_a_model_that_float64_breaks_is_compared_as_it_is():
    def make_model():
        cast = layers.Lambda(lambda z: z + tf.ones([], tf.float32))
        return keras.Sequential([keras.Input([6]), layers.Dense(3), cast])

    result = compare(make_model, ROWS, TWO, compile=SETTINGS)
    assert (result.equal, result.dtype) == (True, "float32")


def rows_alike(self, parts, sizes):
    return None


def first_part_twice(self, method, data):
    sizes, parts, lent = CUT(self, method, data)
    return sizes, [parts[0]] * len(parts), lent


CUT = Steps._cut


@pytest.mark.parametrize(
    ("name", "fault"), [("_weights", rows_alike), ("_cut", first_part_twice)]
)
@pytest.mark.slow(by_day=["_weights-rows_alike"])
def test_a_fault_of_towers_is_seen(name, fault, monkeypatch):
    monkeypatch.setattr(Steps, name, fault)
    result = compare(stack(), ROWS, TWO, compile=SETTINGS)
    assert not result
    assert "The cause is unknown: the loss is a mean over rows" in str(result)


def test_keras_keeps_its_float_type():
    keras.config.set_floatx("float32")
    before = keras.config.dtype_policy()
    with pytest.raises(ValueError, match=r"compile must be a dict .* got None"):
        compare(stack(), ROWS, TWO)
    assert keras.config.floatx() == "float32"
    assert keras.config.dtype_policy() == before
    assert layers.Dense(1).compute_dtype == "float32"


def test_data_without_a_batch_is_refused():
    with pytest.raises(ValueError, match="data must have at least one batch; got none"):
        compare(stack(), iter([]), TWO, compile=SETTINGS)


@pytest.mark.slow
def test_an_error_of_towers_alone_is_raised():
    make_model = own(hidden, loss_of=tf.reduce_sum)
    with pytest.raises(ValueError, match="cannot be separated from the regularizers"):
        compare(make_model, ROWS, TWO, compile=SGD, loss_reduction="sum")


@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_rows_of_arrays_do_not_divide_evenly(num_towers):
    from tw_keras._comparing.trial import take_batches

    batches, is_static = take_batches((X, LABELS), 3, num_towers)
    sizes = [len(x) for x, y in batches]
    assert sizes == [{1: 31, 2: 31, 3: 32}[num_towers]] * 3
    np.testing.assert_allclose(np.concatenate([x for x, _ in batches])[:9], X[:9], 1e-6)
    assert not is_static


PROGRAM = """
import keras, numpy as np

def make_model():
    norm = keras.layers.BatchNormalization(synchronized={synchronized})
    model = keras.Sequential([keras.Input([3]), norm, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

def make_data():
    x = np.random.default_rng(0).normal(size=[64, 3])
    return x, x[:, :1]
"""


class TestDoctor:
    """The command ``tw-doctor model``, in this process."""

    @pytest.fixture(autouse=True)
    def as_in_a_new_process(self, monkeypatch):
        monkeypatch.setattr(_doctor, "use_logical_cpus", lambda count: CPUS[:count])
        monkeypatch.setattr("sys.path", [*_doctor.sys.path])

    def test_the_package_declares_it(self):
        manifest = tomllib.loads((PACKAGE / "pyproject.toml").read_text())
        declared = manifest["project"]["entry-points"]["tw_doctor.commands"]
        assert declared == {"model": f"{_doctor.__name__}:{_doctor.model.__name__}"}

    @pytest.mark.slow(by_day=["True"])
    @pytest.mark.parametrize("synchronized", [True, False])
    def test_it_prints_the_verdict(self, synchronized, tmp_path, monkeypatch, capsys):
        module = f"program_{synchronized}"
        text = PROGRAM.format(synchronized=synchronized)
        (tmp_path / f"{module}.py").write_text(text)
        monkeypatch.chdir(tmp_path)
        status = _doctor.model([f"{module}:make_model", "--towers", "3", "--steps=2"])
        out = capsys.readouterr().out
        assert status == (0 if synchronized else 1)
        start = r"equal to \S+" if synchronized else r"differs by \S+ in step 1: loss"
        assert re.match(rf"{start} \(2 steps, 3 towers, float64\)\n", out)
        assert len(out.splitlines()) == (1 if synchronized else 3)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["no_such:make"], "'no_such:make' must be module:function; No module"),
            ([":make"], "':make' must be module:function; Empty module name"),
            (["math:nothing"], "'math:nothing': the module math has no such function"),
            (["math:sin"], "'math:make_data': the module math has no such function"),
            (["math:sin", "--data", "math:pi"], "'math:pi': the module math has no"),
            (["math:sin", "--towers", "0"], "argument --towers: must be 1 or more"),
        ],
    )
    def test_wrong_arguments_are_refused(self, arguments, said, capsys):
        with pytest.raises(SystemExit) as end:
            _doctor.model(arguments)
        assert end.value.code == 2
        assert said in capsys.readouterr().err
