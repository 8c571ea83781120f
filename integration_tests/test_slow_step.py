"""What timelines tell: the planted faults of docs/examples/slow_step.py, and none.

A ``fit`` over towers that is right is accused of nothing, however it trains.
"""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from harness.docs_blocks import example

import tw_builders
import tw_core
import tw_doctor
import tw_reduce
from tw_ampopt import TowerOptimizer
from tw_core.testing import CPUS
from tw_doctor import explained
from tw_doctor._timeline.parts import cargo_of
from tw_keras import TowerModel


@pytest.fixture(scope="module")
def slow_step():
    with example("slow_step") as module, pytest.MonkeyPatch.context() as patch:
        module.LARGE, module.NUM_SMALL, module.LATE_S = 256, 40, 0.02
        # The devices that all tests of this process share.
        patch.setattr(tw_core, "use_logical_cpus", lambda count: CPUS[:count])
        yield module


@pytest.fixture(scope="module")
def healthy(slow_step):
    return slow_step.record("none", num_steps=2)


def taken(steps, cargo, device):
    """Bytes a step that a device takes of what others read of variables."""
    return sum(
        arrival.num_bytes or 0
        for step in steps.steps
        for arrival in step.arrivals
        if arrival.device == device and cargo in arrival.name
    ) / len(steps.steps)


def number(steps, part):
    return sum(own.part == part for own in steps.steps[-1].intervals)


def wait_of(steps, word):
    rows = [row for row in steps.summary().rows if row.part == "wait"]
    return max((row.ms for row in rows if word in row.waits_for), default=0.0)


def test_a_healthy_step_is_explained_and_takes_no_variables(slow_step, healthy):
    assert all(explained(step) >= 0.95 for step in healthy.steps)
    for device in healthy.steps[0].devices:
        assert taken(healthy, "ReadVariableOp", device) == 0


@pytest.mark.slow
def test_a_variable_on_the_wrong_device_is_taken_from_there(slow_step):
    steps = slow_step.record("wrong-device", num_steps=2)
    first, second = steps.steps[0].devices
    assert taken(steps, "ReadVariableOp", second) == 4 * slow_step.LARGE**2
    assert taken(steps, "ReadVariableOp", first) == 0


@pytest.mark.slow
def test_unpacked_gradients_show_by_their_number(slow_step, healthy):
    steps = slow_step.record("unpacked", num_steps=2)
    more = number(steps, "reduce") - number(healthy, "reduce")
    assert more > 2 * slow_step.NUM_SMALL
    assert number(steps, "apply") == number(healthy, "apply")


@pytest.mark.slow
def test_late_input_is_time_between_steps(slow_step):
    steps = slow_step.record("late-input", num_steps=2)
    assert wait_of(steps, "between steps") >= 0.9 * 1e3 * slow_step.LATE_S


@pytest.mark.slow
def test_the_program_writes_picture_and_trace(slow_step, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    arguments = ["slow_step.py", "--fault", "unpacked", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    slow_step.main()
    assert "waits for" in capsys.readouterr().out
    assert (out / "unpacked.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "unpacked.json").read_text())["traceEvents"]


# Steps without a fault ----------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01),
    "accumulating": lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
    "scaling": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
    "own name": lambda: keras.optimizers.Adam(0.01, name="mine"),
}


def make_model(last_device=""):
    model = keras.Sequential([keras.Input([32]), keras.layers.Dense(64, "relu")])
    last = keras.layers.Dense(4)
    with tf.device(last_device):
        last.build([None, 64])
    model.add(last)
    return model


def record_fit(make, towers, optimizer="adam", variables="replicated", **compiled):
    """Records three steps of a fit whose functions are called, not inlined."""
    model = TowerModel(make, CPUS[:towers], variables=variables, inline=False)
    model.compile(OPTIMIZERS[optimizer](), "mse", **compiled)
    batches = 12 * compiled.get("steps_per_execution", 1)
    x = np.random.default_rng(0).normal(size=[16 * batches, 32]).astype("float32")
    with tw_doctor.record_steps(3) as steps:
        options = {"verbose": 0, "callbacks": [steps.keras_callback()]}
        model.fit(x, x[:, :4], batch_size=16, **options)
    assert len(steps.steps) == 3
    return steps


def check_parts(steps, updated):
    """Operations count once, towers ``updated`` apply, and forward is no update."""
    for step in steps.steps:
        assert explained(step) >= 0.9
        for call in step.intervals:
            inside = [
                own
                for own in step.intervals
                if own.name.startswith(f"{call.name}/") and own.part != "move"
                if call.start <= own.start < own.end <= call.end
            ]
            assert not inside, (call, inside)
        applying = {own.device for own in step.intervals if own.part == "apply"}
        assert {step.devices[k] for k in updated} <= applying
        words = ("apply_gradients", "apply_grad", "adam", "copy_from_owners")
        for own in step.intervals:
            if own.part in ("forward", "other"):
                assert not any(word in own.name.lower() for word in words), own


def check_no_variables_taken(steps):
    for one in (one for step in steps.steps for one in step.arrivals):
        assert cargo_of(one.name) != "variables", one
    assert "variables" not in str(steps.summary())


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 1, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variables", ["replicated", "sharded", "parameter_server"])
def test_a_fit_without_a_fault_is_accused_of_nothing(variables, optimizer, towers):
    if towers == 1 and optimizer == "own name":
        pytest.skip("Keras itself applies, under a name that says nothing")
    steps = record_fit(make_model, towers, optimizer, variables)
    is_shared = variables == "parameter_server"
    check_parts(steps, [0] if is_shared else range(min(towers, 2)))
    # What is shared is read where it is: variables, and the one loss scale.
    if not is_shared and (variables, optimizer) != ("sharded", "scaling"):
        check_no_variables_taken(steps)


@pytest.mark.slow(by_day=["replicated"])
@pytest.mark.parametrize("variables", ["replicated", "sharded"])
def test_a_compiled_update_is_no_forward_pass(variables):
    steps = record_fit(make_model, 2, variables=variables, jit_compile=True)
    check_parts(steps, range(2))
    check_no_variables_taken(steps)


@pytest.mark.slow
def test_several_batches_in_a_call_are_told_apart():
    steps = record_fit(make_model, 2, steps_per_execution=3)
    check_parts(steps, range(2))
    check_no_variables_taken(steps)


@pytest.mark.slow
def test_of_eager_steps_nothing_is_said_to_be_explained():
    steps = record_fit(make_model, 2, run_eagerly=True)
    assert "0.0% explained" in str(steps.summary())
    assert "run_eagerly" in str(steps.summary())


@pytest.mark.slow
def test_a_layer_of_a_tower_on_another_device_is_told_in_a_fit():
    devices = iter(["", CPUS[0]])
    steps = record_fit(lambda: make_model(next(devices)), 2)
    check_parts(steps, range(2))
    first, second = steps.steps[0].devices
    taken = {
        (one.device, one.source)
        for step in steps.steps
        for one in step.arrivals
        if cargo_of(one.name) == "variables"
    }
    assert taken == {(second, first)}


@pytest.mark.slow(by_day=["replicated", "loss scaling"])
@pytest.mark.parametrize("update", ["replicated", "sharded", "loss scaling"])
def test_a_step_of_ones_own_is_accused_of_nothing(update):
    towers = tw_core.towers(CPUS[:2])
    models = tw_core.replicate(towers, lambda tower: make_model())
    averaged = tw_reduce.mean(tw_reduce.all_reduce(CPUS[:2]))
    make = OPTIMIZERS["adam"]
    if update == "replicated":
        own = tw_builders.make_optimizers(towers, make, models)
    elif update == "sharded":
        own, _ = tw_builders.make_sharded_optimizer(towers, make, models)
    else:
        lists = [model.trainable_variables for model in models]
        own = TowerOptimizer(lists, tf_optimizer="tf.train.AdamOptimizer")

    def gradient(tower, model, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return loss, tape.gradient(loss, model.trainable_variables)

    @tf.function(autograph=False)
    def train_step(x):
        parts = tf.split(x, len(towers))
        losses, grads = zip(
            *tw_core.map_towers(gradient, towers, models, parts, inline=False),
            strict=True,
        )
        if update == "replicated":
            tw_builders.apply_gradients(towers, averaged(grads), models, own)
        elif update == "sharded":
            tw_builders.apply_sharded_gradients(towers, grads, models, own)
        else:
            own.apply(grads)
        return losses

    with tw_doctor.record_steps(3) as steps:
        for _ in range(12):
            with steps.step():
                train_step(tf.ones([16, 32]))
    check_parts(steps, range(2))
    check_no_variables_taken(steps)
