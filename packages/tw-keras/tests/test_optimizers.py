"""Every optimizer of Keras trains towers as it trains one device."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.keras_optimizers import CASES, KINDS, present, unknown_options
from harness.keras_optimizers import make as optimizer_of
from harness.recording import Recording
from tower_models import check_near, seeded, towers_of

from tw_reduce import compression

layers = keras.layers
RANDOM = np.random.default_rng(0)
ROWS = 24  # two batches of 10, and one of 4
WORDS = RANDOM.integers(0, 50, size=(ROWS, 3))
Y = RANDOM.normal(size=(ROWS, 2)).astype("float32")
TOLERANCE = 2e-5
# Options that read or change more than one variable, or its variable's rows.
MEETING_OTHERS = [
    *("Adam use_ema", "Adam global_clipnorm", "Adam clipnorm", "AdamW weight_decay"),
    *("SGD gradient_accumulation_steps", "LossScaleOptimizer dynamic_growth_steps"),
]
BY_DAY = ["Adam amsgrad", "Muon", "Ftrl use_ema"]
BY_DAY += ["Adafactor gradient_accumulation_steps"]


def sparse_and_dense():
    """Has sparse gradients, one that travels in a pack and one that travels alone."""
    return keras.Sequential(
        [
            keras.Input([3], dtype="int64"),
            layers.Embedding(50, 4, name="words"),
            layers.Flatten(),
            layers.Dense(400, "tanh", name="hidden"),
            layers.Dense(2, name="out"),
        ]
    )


def recording():
    own = [Recording(), layers.Dense(4, "tanh"), Recording(), layers.Dense(2)]
    return keras.Sequential([keras.Input([3]), *own])


def dense():
    return keras.Sequential(
        [
            keras.Input([3]),
            layers.Rescaling(0.02),
            layers.Dense(1_400, "tanh", name="hidden"),
            layers.Dense(2, name="out"),
        ]
    )


def trained(case, num_towers=None, *, jit_compile="auto", **options):
    """Returns the history, the optimizer's state, and the weights of all towers."""

    # Keras divides no sparse gradients by a scale.
    make = dense if "loss_scale_factor" in case else sparse_and_dense
    model = towers_of(make, num_towers, **options) if num_towers else seeded(make)()
    # Compiled, Keras's own fit begins with momenta of 0 in place of the weights.
    is_eager = case.startswith("ScheduleFree") and num_towers is None
    how = {"run_eagerly": is_eager, "jit_compile": False if is_eager else jit_compile}
    model.compile(optimizer_of(case), "mse", metrics=["mae"], **how)
    if "sharded" in options.values():  # slots move to the owners of variables
        model.optimizer.build(model.trainable_variables)
    given = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(WORDS, Y, **given).history
    state = [own.numpy() for own in model.optimizer.variables]
    return [
        history,
        state,
        [own.get_weights() for own in getattr(model, "towers", [model])],
    ]


@pytest.mark.slow(by_day=["Adam amsgrad-2", "Adam use_ema-sharded"])
@pytest.mark.parametrize(
    ("case", "num_towers", "variables"),
    [
        *(pytest.param(case, 2, "replicated", id=f"{case}-2") for case in CASES),
        *(
            pytest.param(case, 1 + n % 4, variables, id=f"{case}-{variables}")
            for variables in ("sharded", "parameter_server")
            for n, case in enumerate([*KINDS, *MEETING_OTHERS])
        ),
    ],
)
def test_an_optimizer_trains_towers_as_one_device(case, num_towers, variables):
    one, many = trained(case), trained(case, num_towers, variables=variables)
    assert all(map(np.all, map(np.isfinite, tf.nest.flatten(one))))
    first, last = one[0]["loss"]
    assert first != last
    check_near(many[:2], one[:2], TOLERANCE)
    check_near(many[2][:1], one[2], TOLERANCE)
    for tower in many[2][1:]:
        check_near(tower, many[2][0], 0.0)


def with_an_unused_layer():
    x = keras.Input([2])
    model = keras.Model(x, layers.Dense(2)(x))
    model.unused = layers.Dense(2)
    model.unused.build([None, 2])
    return model


def test_averages_of_weights_keep_a_layer_that_has_no_gradient():
    found = []
    for model in (seeded(with_an_unused_layer)(), towers_of(with_an_unused_layer, 2)):
        sgd = keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=2)
        model.compile(sgd, "mse")
        model.fit(Y, Y, batch_size=10, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    check_near(found[1], found[0])


def every_word(cases):
    """Chooses cases such that each optimizer and each option is in one.

    XLA keeps what it has compiled as long as the process lives, in hundreds of memory
    maps a case; a process may have 65,530.
    """
    words, chosen = set(), []
    for case in [*BY_DAY, *cases]:
        if not words.issuperset(case.split()):
            words.update(case.split())
            chosen.append(case)
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("case", present(*every_word(CASES)))
def test_an_optimizer_trains_compiled_towers_as_one_device(case):
    one, many = trained(case, jit_compile=False), trained(case, 2, jit_compile=True)
    check_near(many[:2], one[:2])
    # Their step by a mean gradient near 0 is its sign, which rounding decides
    # (Muon steps so for embeddings; compiled, one device differs as much).
    kind, *options = case.split()
    is_adam = kind in ("Adam", "AdamW", "Adamax", "Nadam", "Muon")
    is_sign = is_adam and "accumulation" in str(options)
    check_near(many[2], one[2] * 2, TOLERANCE if is_sign else 2e-6)


WAYS = {
    "mean": {},
    "sum": {"loss": keras.losses.MeanSquaredError("sum")},
    "sum of losses": {"towers": {"loss_reduction": "sum"}},
    "weights": {"towers": {"weights": lambda x, y, w: tf.reduce_sum(w)}},
    "compiled": {"jit_compile": True},
    "eagerly": {"run_eagerly": True},
    "accumulated": {"optimizer": "SGD gradient_accumulation_steps"},
    "scaled": {"optimizer": "LossScaleOptimizer"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "variables", "num_towers"),
    [
        *itertools.product(
            [way for way in WAYS if way != "compiled"],
            ["replicated", "sharded", "parameter_server"],
            [1, 2, 3],
        ),
        # XLA keeps what it has compiled as long as the process lives.
        *[("compiled", "replicated", 3), ("compiled", "sharded", 2)],
    ],
)
def test_records_of_largest_inputs_are_those_of_the_whole_batch(
    way, variables, num_towers
):
    """A float8 layer that recorded a mean would clip the largest input."""
    options = dict(WAYS[way])
    kind, of_towers = options.pop("optimizer", "SGD"), options.pop("towers", {})
    weights = np.ones(len(WORDS), "float32")
    found = []
    for towers in (None, num_towers):
        model = (
            seeded(recording)()
            if towers is None
            else towers_of(recording, towers, variables=variables, **of_towers)
        )
        loss = "sum" if "loss_reduction" in of_towers else "sum_over_batch_size"
        own = {"loss": keras.losses.MeanSquaredError(loss), **options}
        model.compile(optimizer_of(kind), **own)
        model.optimizer.learning_rate = 1e-3
        x = WORDS.astype("float32") * [[1.0]] + np.arange(ROWS)[::-1, np.newaxis]
        given = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0}
        model.fit(x, Y, sample_weight=weights, **given)
        found.append([m.get_weights() for m in getattr(model, "towers", [model])])
    (one,), many = found
    assert one[0].max() > 60
    for tower in many:
        check_near(tower, one, 1e-5)


def test_records_are_refused_where_they_would_be_compressed():
    model = towers_of(
        recording, 2, reducer=compression.error_feedback(compression.top_k())
    )
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"record.*a reducer with memory, or"):
        model.fit(WORDS, Y, verbose=0)


def test_no_option_of_an_optimizer_is_left_out():
    assert unknown_options() == []
