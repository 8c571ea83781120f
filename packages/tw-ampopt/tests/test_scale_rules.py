"""The rules against plain Python."""

from functools import cache

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_ampopt import DynamicLossScale, GradualLossScale, StaticLossScale

VERDICTS = st.lists(st.booleans(), max_size=60)
DTYPES = {int: tf.int64, float: tf.float32}
GRADUAL = [GradualLossScale(5.0, up, down, 2.0, 9.0) for up, down in ((0.3, 1), (2, 0))]
DYNAMIC = [
    DynamicLossScale(3, interval, lowest=1, highest=5, hysteresis=hysteresis)
    for interval, hysteresis in ((1, 1), (2, 3), (3, 1), (5, 2), (6, 4))
]


@cache
def scan_of(rule):
    """Traces a loop over outcomes once; it returns the state after each."""
    initial = {k: tf.constant(v, DTYPES[type(v)]) for k, v in rule.initial().items()}

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.bool)])
    def scan(goods):
        return tf.scan(
            lambda state, good: {**state, **rule.next(state, good)}, goods, initial
        )

    return scan


def run(rule, outcomes):
    """Returns the state after every outcome; a scan of none has no result."""
    states = scan_of(rule)([*outcomes, True])
    return {key: value.numpy()[:-1] for key, value in states.items()}


def gradual_oracle(rule, outcomes):
    log2, history = np.float32(rule.init), []
    for good in outcomes:
        step = np.float32(rule.increment) if good else -np.float32(rule.decrement)
        log2 = min(max(log2 + step, np.float32(rule.lowest)), np.float32(rule.highest))
        history.append(log2)
    return history


def dynamic_oracle(rule, outcomes):
    log2, good_steps, left, history = rule.init, 0, rule.hysteresis, []
    for good in outcomes:
        if good:
            good_steps += 1
            if good_steps == rule.growth_interval:
                log2, good_steps, left = min(log2 + 1, rule.highest), 0, rule.hysteresis
        else:
            good_steps = 0
            left = max(left - 1, 0)
            if left == 0:
                log2 = max(log2 - 1, rule.lowest)
        history.append((log2, good_steps, left))
    return history


@given(VERDICTS, st.sampled_from(GRADUAL))
def test_the_gradual_rule_follows_numpy(outcomes, rule):
    got = run(rule, outcomes)["log2"]
    np.testing.assert_array_equal(got, gradual_oracle(rule, outcomes))


@given(VERDICTS, st.sampled_from(DYNAMIC))
def test_the_dynamic_rule_follows_plain_python(outcomes, rule):
    got = run(rule, outcomes)
    names = ["log2", "good_steps", "tolerance"][: 2 if rule.hysteresis == 1 else 3]
    history = list(zip(*(got[name] for name in names), strict=True))
    want = [state[: len(names)] for state in dynamic_oracle(rule, outcomes)]
    assert history == want


def test_a_static_scale_stays():
    assert set(run(StaticLossScale(7), [True, False] * 5)["log2"]) == {7}


@pytest.mark.parametrize("log2", [-120, -64, -1, 0, 1, 10, 24, 79, 120])
def test_a_whole_exponent_gives_the_very_power_of_two(log2):
    rule = StaticLossScale(log2)
    assert rule.scale(tf.constant(log2, tf.int64)).numpy() == np.float32(2.0**log2)


def test_a_fractional_exponent_gives_the_fractional_power():
    scale = GradualLossScale().scale(tf.constant(10.0005))
    np.testing.assert_allclose(scale, 2.0**10.0005, rtol=1e-6)
