"""The recommended session configuration has the devices, and leaves sums alone."""

import pytest
import tensorflow as tf

from tw_core import session_config
from tw_core.testing import NUM_CPUS

v1 = tf.compat.v1


def test_a_session_has_the_cpus_asked_for_and_soft_placement_unless_declined(graph):
    session_config().device_count["CPU"] = 1  # Each configuration is a fresh one.
    config = session_config()
    rewrites = config.graph_options.rewrite_options
    assert rewrites.memory_optimization == rewrites.NO_MEM_OPT
    assert config.gpu_options.allow_growth
    with tf.device("/cpu:99"):
        x = tf.constant(3)
    for own, count in (config, NUM_CPUS), (session_config(num_cpus=3), 3):
        with v1.Session(config=own) as sess:
            assert sum(d.device_type == "CPU" for d in sess.list_devices()) == count
            assert sess.run(x) == 3
    with (
        v1.Session(config=session_config(soft_placement=False)) as sess,
        pytest.raises(tf.errors.InvalidArgumentError, match="CPU:99"),
    ):
        sess.run(x)


GPUS = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in range(3)]


def config_with_gpus(monkeypatch, visible, divided):
    """Makes one where TensorFlow has three GPUs and tells this of them."""
    devices = {"CPU": tf.config.get_visible_devices("CPU"), "GPU": visible}
    answers = {
        "list_physical_devices": {"GPU": GPUS}.get,
        "get_visible_devices": devices.get,
        "get_logical_device_configuration": divided.get,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(tf.config, name, answer)
    return session_config()


def test_a_session_has_the_gpus_that_are_visible_and_their_parts(monkeypatch):
    part = tf.config.LogicalDeviceConfiguration
    divided = {GPUS[1]: [part(memory_limit=512), part(memory_limit=256)]}
    options = config_with_gpus(monkeypatch, [GPUS[2], GPUS[1]], divided).gpu_options
    assert options.visible_device_list == "1,2"
    parts = options.experimental.virtual_devices
    assert [list(own.memory_limit_mb) for own in parts] == [[512, 256], []]
    options = config_with_gpus(monkeypatch, GPUS, {}).gpu_options
    assert not options.visible_device_list and not options.experimental.virtual_devices
    config = config_with_gpus(monkeypatch, [], {})
    assert config.device_count["GPU"] == 0 and "GPU" in config.device_count


def kernels_of_a_large_sum(config):
    """Adds three tensors of 64 MiB, one of them from the sum's own device."""
    parts = []
    for k in range(3):
        with tf.device(f"/cpu:{k}"):
            parts.append(tf.random.stateless_uniform([2**24], [k, k]))
    with tf.device("/cpu:0"):
        total = tf.add_n(parts)
    metadata = v1.RunMetadata()
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
    with v1.Session(config=config) as sess:
        sess.run(total.op, options=options, run_metadata=metadata)
    labels = [
        node.timeline_label  # "name = Kernel(inputs)"
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
    ]
    return {label.split(" = ")[1].split("(")[0] for label in labels if " = " in label}


@pytest.mark.slow
def test_a_large_sum_stays_one_addition_which_tensorflow_would_take_apart(graph):
    assert "AddN" in kernels_of_a_large_sum(session_config())
    # Where this fails, session_config need not switch the memory pass off.
    config = v1.ConfigProto(device_count={"CPU": NUM_CPUS})
    kernels = kernels_of_a_large_sum(config)
    assert "AddN" not in kernels
    assert "TemporaryVariable" in kernels
