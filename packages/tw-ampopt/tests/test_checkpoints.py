"""A run that is stopped in the middle of a group and resumed, in both modes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tw_ampopt import DynamicLossScale, GradualLossScale, SimpleAdam

INITIAL = [
    np.ones((2, 3), np.float32),
    np.ones(2, np.float16),
    np.ones((3, 2000), np.float32),
    np.ones((129, 130), np.float16),
]
KINDS = {
    "v1": tf.compat.v1.train.AdamOptimizer,
    "legacy": tf_keras.optimizers.legacy.Adam,
    "keras": keras.optimizers.Adam,
    "simple": SimpleAdam,
}


def feeds(step, tower):
    rng = np.random.default_rng([step, tower])
    made = [rng.standard_normal(v.shape).astype(np.float32) for v in INITIAL]
    if step in (4, 11):
        made[0][0, 0] = np.inf
    return made


SKIP = ("skip_group", DynamicLossScale(4, growth_interval=2, hysteresis=2))
DROP = ("drop_micro_batch", GradualLossScale(4.0, 0.25, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "rule"),
    [*((kind, *SKIP) for kind in KINDS), ("v1", *DROP)],
    ids=[*KINDS, "v1-drops"],
)
def test_a_run_resumed_between_micro_batches_equals_the_uninterrupted_one_bit_for_bit(
    make_trainer, tmp_path, kind, policy, rule
):
    def make():
        return make_trainer(
            INITIAL,
            2,
            tf_optimizer=KINDS[kind],
            learning_rate=lambda updates: 0.1 / tf.cast(updates + 1, tf.float32),
            accumulation_steps=3,
            loss_scale=rule,
            on_nonfinite=policy,
            master_copies=True,
            weighs=policy == "drop_micro_batch",
        )

    def train(trainer, step):
        weights = (1 + step % 3, 2) if policy == "drop_micro_batch" else None
        trainer.step(feeds(step, 0), feeds(step, 1), weights=weights)

    whole = make()
    for step in range(14):
        if step == 8:
            path = whole.save(tmp_path)
        train(whole, step)
    resumed = make()
    resumed.restore(path)
    for step in range(8, 14):
        train(resumed, step)
    assert whole.statistics()["updates"] >= 2
    for got, want in zip(resumed.state(), whole.state(), strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip(resumed.values(), whole.values(), strict=True):
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(np.float32(g), np.float32(w))
    assert resumed.statistics() == whole.statistics()


def test_local_copies_are_restored_from_tower_0_and_towers_sums_are_their_own(tmp_path):
    import tw_ampopt
    from tw_core.variables import override_to_local_variable

    v1 = tf.compat.v1

    def build():
        optimizer = tw_ampopt.Optimizer(learning_rate=0.5, minibatch_multiplier=2)
        feeds, variables = [], []
        for k in range(2):
            with tf.device(f"/cpu:{k}"), override_to_local_variable(k > 0):
                variables.append(tf.Variable([1.0, 2.0], name=f"tower{k}/w"))
            with tf.device(f"/cpu:{k}"):
                feeds.append(v1.placeholder(tf.float32, [2]))
                loss = tf.reduce_sum(variables[k] * feeds[k])
            optimizer.register_gradients(loss, [variables[k]])
        return optimizer, optimizer.apply_updates(), feeds, variables

    def run(sess, step, feeds, number):
        values = [np.float32([number + k, -k]) for k in range(2)]
        sess.run(step, dict(zip(feeds, values, strict=True)))

    config = v1.ConfigProto(device_count={"CPU": 8})
    with tf.Graph().as_default():
        _, step, feeds, variables = build()
        saved = {v.name for v in v1.global_variables()}
        with v1.Session(config=config) as sess:
            sess.run(
                [v1.global_variables_initializer(), v1.local_variables_initializer()]
            )
            for number in range(3):
                run(sess, step, feeds, number)
            path = v1.train.Saver().save(sess, f"{tmp_path}/at")
            run(sess, step, feeds, 3)
            want = sess.run(variables)
    assert {name for name in saved if "tower1" in name} == {"Train/tower1/grad_acc_0:0"}
    with tf.Graph().as_default():
        optimizer, step, feeds, variables = build()
        copy = optimizer.copy_to_replicas()
        with v1.Session(config=config) as sess:
            sess.run(v1.local_variables_initializer())
            v1.train.Saver().restore(sess, path)
            sess.run(copy)
            run(sess, step, feeds, 3)
            for got in sess.run(variables):
                np.testing.assert_array_equal(got, want[0])
