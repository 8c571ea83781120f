"""Random models that XLA compiles train over towers as they do on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.random_models import OPTIMIZERS, Drawn
from tower_models import STEPS, check_near, seeded, towers_of


def trained(drawn, model, *, jit_compile):
    """Returns the history, the weights, an evaluation and predictions."""
    losses = {"classes": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    x, y, weights = drawn.data
    model.compile(
        OPTIMIZERS[drawn.optimizer](0.02),
        losses.get(drawn.loss, drawn.loss),
        metrics=["mae"] if drawn.loss != "classes" else ["accuracy"],
        steps_per_execution=STEPS if drawn.has_several_steps else 1,
        jit_compile=jit_compile,
    )
    given = {"sample_weight": weights, "batch_size": drawn.batch_size, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **given).history
    results = [history, model.get_weights(), model.evaluate(x, y, **given)]
    return [*results, model.predict(x, batch_size=drawn.batch_size, verbose=0)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_a_random_model_trains_compiled_as_on_one_device(seed):
    drawn = Drawn(seed)
    many = towers_of(drawn.made, drawn.num_towers, **drawn.options)
    got = trained(drawn, many, jit_compile=True)
    want = trained(drawn, seeded(drawn.made)(), jit_compile=False)
    assert np.isfinite(tf.nest.flatten(want[0])).all()
    check_near(got, want)
