"""Devices are spelled one way, counted without starting TensorFlow, and checked."""

# Private imports: the reader of device strings that all public functions call, and
# the module, whose count of devices is replaced to pretend to have GPUs.

import logging

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tw_core import towers, use_logical_cpus
from tw_core.devices import _logical, available_devices, canonical_device, check_devices
from tw_core.devices._logical import parse_device
from tw_core.internal import host_of, repeated_devices
from tw_core.testing import CPUS, NUM_CPUS

HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
LOCAL = ["", "/job:localhost", "/job:localhost/replica:0/task:0", "/replica:0/task:0"]


@pytest.mark.parametrize("prefix", LOCAL)
@pytest.mark.parametrize("device", ["/gpu:1", "/GPU:1", "/device:GPU:1"])
def test_a_device_of_this_process_has_one_spelling(prefix, device):
    assert canonical_device(prefix + device) == "/device:GPU:1"


def test_the_first_slash_may_be_left_out():
    assert canonical_device("cpu:3") == "/device:CPU:3"


@pytest.mark.parametrize(
    "device",
    [
        "/job:ps/task:1/device:CPU:0",
        "/job:localhost/task:1/device:CPU:0",
        "/task:1/device:CPU:0",
        "/replica:2/device:CPU:0",
        "/job:ps",
    ],
)
def test_a_device_of_another_process_keeps_its_address(device):
    assert canonical_device(device) == device


def test_no_device_stays_no_device():
    assert canonical_device("") == ""


@given(
    st.sampled_from([*LOCAL, "/job:ps", "/job:worker/task:2"]),
    st.sampled_from(["cpu", "gpu", "CPU", "device:TPU"]),
    st.integers(0, 99),
)
def test_the_canonical_spelling_is_its_own(prefix, kind, number):
    once = canonical_device(f"{prefix}/{kind}:{number}")
    assert canonical_device(once) == once


@pytest.mark.parametrize(
    "device", ["foo", "/foo:0", "/cpu:x", "/cpu:-1", "/cpu:0/gpu:1", 3]
)
def test_what_tensorflow_cannot_read_is_refused_by_name(device):
    with pytest.raises(ValueError, match=f"^{device!r} is not a TensorFlow device"):
        parse_device(device)
    with pytest.raises(ValueError, match=r"^.* is not .*write e.g. '/gpu:0'"):
        canonical_device(device)


@pytest.mark.parametrize(
    ("device", "host"),
    [
        ("/gpu:3", "/device:CPU:0"),
        ("/cpu:3", "/device:CPU:0"),
        ("", "/device:CPU:0"),
        (None, "/device:CPU:0"),
        ("/job:ps/task:2/gpu:1", "/job:ps/task:2/device:CPU:0"),
        ("/job:ps/task:2", "/job:ps/task:2/device:CPU:0"),
    ],
)
def test_the_host_of_a_device_is_its_tasks_first_cpu(device, host):
    assert host_of(device) == host


def test_devices_are_repeated_in_whatever_spelling():
    devices = ["/gpu:1", "cpu:0", "/device:GPU:1", "/job:ps/cpu:0", "/CPU:0"]
    assert repeated_devices(devices) == ["/device:CPU:0", "/device:GPU:1"]
    assert repeated_devices(devices[:2]) == []


def pretend(monkeypatch, **counts):
    monkeypatch.setattr(
        _logical, "count_logical_devices", lambda kind: counts.get(kind, 0)
    )


@pytest.mark.skipif(HAS_GPU, reason="lists the GPUs instead")
def test_without_gpus_the_logical_cpus_are_available():
    assert available_devices() == list(CPUS)


def test_gpus_go_before_cpus(monkeypatch):
    pretend(monkeypatch, GPU=2, CPU=8)
    assert available_devices() == ["/gpu:0", "/gpu:1"]


def test_asking_for_the_cpus_that_there_are_changes_nothing():
    assert use_logical_cpus(NUM_CPUS) == list(CPUS)


def test_another_number_of_cpus_after_tensorflow_has_started_is_refused():
    tf.constant(0)
    want = f"already started with {NUM_CPUS} .*asked for 3"
    with pytest.raises(RuntimeError, match=want):
        use_logical_cpus(3)


def test_a_session_without_a_configuration_has_the_logical_cpus(graph):
    with tf.compat.v1.Session() as sess:
        check_devices(CPUS, session=sess)
        with pytest.raises(ValueError, match=f"Unknown devices .'/cpu:{NUM_CPUS}'"):
            check_devices([f"/cpu:{NUM_CPUS}"], session=sess)


@pytest.mark.parametrize(
    "device",
    ["/cpu:0", "/CPU:7", "cpu", "", "/job:ps/task:3/gpu:9", "/job:localhost/cpu:99"],
)
def test_known_devices_and_devices_with_a_job_pass(device):
    check_devices([device])


def test_every_unknown_device_is_named_once_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        check_devices(["/cpu:9", "/cpu:0", "/gpu:99", "/cpu:9"])
    message = str(error.value)
    assert message.startswith("Unknown devices ['/cpu:9', '/gpu:99']; known are")
    assert all(f"'/device:CPU:{i}'" in message for i in range(NUM_CPUS))
    assert "use_logical_cpus" in message


def test_a_kind_that_no_device_has_is_unknown_without_a_number_too():
    with pytest.raises(ValueError, match=r"Unknown devices \['/tpu'\]"):
        check_devices(["/tpu"])


def test_a_sessions_own_devices_count_not_the_configured_ones(graph):
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 2})
    with tf.compat.v1.Session(config=config) as sess:
        check_devices(["/cpu:1"], session=sess)
        with pytest.raises(ValueError, match=r"Unknown devices \['/cpu:2'\]"):
            check_devices(["/cpu:2"], session=sess)


def test_a_session_on_a_server_knows_that_servers_devices(graph):
    cluster = {"worker": ["localhost:0"]}
    server = tf.compat.v1.train.Server(cluster, job_name="worker", task_index=0)
    with tf.compat.v1.Session(server.target) as sess:
        assert all("/job:worker/" in device.name for device in sess.list_devices())
        check_devices(["/cpu:0"], session=sess)
        with pytest.raises(ValueError, match="Unknown devices"):
            check_devices(["/cpu:99"], session=sess)


def test_what_is_no_device_string_is_refused_among_devices():
    with pytest.raises(ValueError, match=r"^'nonsense' is not a TensorFlow device"):
        check_devices(["nonsense"])


def test_devices_with_several_towers_are_said_in_the_log(caplog):
    with caplog.at_level(logging.WARNING, logger="tw_core"):
        towers(["/cpu:0", "/gpu:0", "CPU:0", "/cpu:1"])
    assert caplog.messages == [
        "towers: several towers on one device: /device:CPU:0 (2 towers)"
    ]


def test_devices_with_a_tower_each_are_not_worth_a_word(caplog):
    towers(["/cpu:0", "/cpu:1"])
    assert caplog.messages == []
