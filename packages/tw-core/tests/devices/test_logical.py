"""Devices are spelled one way, counted without starting TensorFlow, and checked."""

# Private imports: the reader of device strings that all public functions call, and
# the module, whose count of devices is replaced to pretend to have GPUs.

import numpy as np
import pytest
import tensorflow as tf

from tw_core import Shared, Tower, towers, use_logical_cpus
from tw_core.devices import _logical, available_devices, canonical_device, check_devices
from tw_core.devices._logical import parse_device
from tw_core.internal import host_of, repeated_devices
from tw_core.testing import CPUS, NUM_CPUS

LOCAL = ["", "/job:localhost", "/job:localhost/replica:0/task:0", "/replica:0/task:0"]


def test_a_device_of_this_process_has_one_spelling_and_others_keep_theirs():
    for prefix in LOCAL:
        for device in ("/gpu:1", "/GPU:1", "/device:GPU:1"):
            assert canonical_device(prefix + device) == "/device:GPU:1"
    assert canonical_device("cpu:3") == "/device:CPU:3"
    for device in (
        "",
        "/job:ps/task:1/device:CPU:0",
        "/job:localhost/task:1/device:CPU:0",
        "/task:1/device:CPU:0",
        "/replica:2/device:CPU:0",
        "/job:ps",
    ):
        assert canonical_device(device) == device


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


def test_gpus_go_before_cpus(monkeypatch):
    if not tf.config.list_physical_devices("GPU"):
        assert available_devices() == list(CPUS)
    counts = {"GPU": 2, "CPU": 8}
    monkeypatch.setattr(_logical, "count_logical_devices", counts.get)
    assert available_devices() == ["/gpu:0", "/gpu:1"]


def test_towers_are_of_all_gpus_or_of_the_first(monkeypatch):
    monkeypatch.setattr(_logical, "count_logical_devices", {"GPU": 3, "CPU": 8}.get)
    all_gpus = ["/gpu:0", "/gpu:1", "/gpu:2"]
    assert [tower.device for tower in towers()] == all_gpus
    assert [tower.device for tower in towers(np.int64(2))] == all_gpus[:2]
    assert towers(3) == towers() == towers([0, 1, 2])
    with pytest.raises(ValueError, match=r"at most 3, the number of GPUs .*; got 4\."):
        towers(4)


@pytest.mark.parametrize("devices", [None, 2])
def test_where_there_is_no_gpu_none_is_taken_silently(monkeypatch, devices):
    monkeypatch.setattr(_logical, "count_logical_devices", {"GPU": 0, "CPU": 8}.get)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    want = f"^devices={devices} means GPUs, and this process has none"
    with pytest.raises(ValueError, match=rf"{want}\. CUDA_VISIBLE_.* such as tw_core"):
        towers(devices)


def test_another_number_of_cpus_after_tensorflow_has_started_is_refused():
    tf.constant(0)
    assert use_logical_cpus(NUM_CPUS) == list(CPUS)
    want = f"already started with {NUM_CPUS} .*asked for 3"
    with pytest.raises(RuntimeError, match=want):
        use_logical_cpus(3)


def test_every_unknown_device_is_named_once_with_the_known_ones():
    with pytest.raises(ValueError) as error:
        check_devices(["/cpu:9", "/cpu:0", "/gpu:99", "/cpu:9"])
    message = str(error.value)
    assert message.startswith("Unknown devices ['/cpu:9', '/gpu:99']; known are")
    assert all(f"'/device:CPU:{i}'" in message for i in range(NUM_CPUS))
    assert "use_logical_cpus" in message
    with pytest.raises(ValueError, match=r"Unknown devices \['/tpu'\]"):
        check_devices(["/tpu"])
    others = ["/job:ps/task:3/gpu:9", "/job:localhost/cpu:99"]
    check_devices(["/cpu:0", "/CPU:7", "cpu", "", *others])


@pytest.mark.parametrize(
    ("built", "hidden", "gpus", "says"),
    [
        (
            False,
            None,
            [],
            "sees no GPU: it was installed without CUDA. Run",
        ),
        (True, None, [], "without CUDA, or the machine has no GPU or driver"),
        (True, "-1", [], "CUDA_VISIBLE_DEVICES hides all GPUs"),
        (True, None, ["a GPU"], "tf.config.set_visible_devices"),
    ],
)
def test_where_no_gpu_is_seen_it_says_what_to_install(
    monkeypatch, built, hidden, gpus, says
):
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there are GPUs")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    monkeypatch.setattr(tf.test, "is_built_with_gpu_support", lambda: built)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: gpus)
    with pytest.raises(ValueError, match=r"Unknown devices \['/gpu:0'\]") as error:
        check_devices(["/gpu:0", "/cpu:0"])
    assert says in str(error.value)
    has_advice = "pip install 'tensorflow[and-cuda]'" in str(error.value)
    assert has_advice == (hidden is None and not gpus)
    with pytest.raises(ValueError, match="Use known ones"):
        check_devices(["/cpu:99"])


def test_devices_of_tf_config_are_known_by_name(monkeypatch):
    logical = tf.config.list_logical_devices("CPU")
    [physical] = tf.config.list_physical_devices("CPU")
    assert [tower.device for tower in towers(logical[:2])] == [
        "/device:CPU:0",
        "/device:CPU:1",
    ]
    assert Tower(0, logical[1], 1) == Tower(0, "/device:CPU:1", 1)
    assert Shared((logical[1],)) == Shared(("/device:CPU:1",))
    assert canonical_device(logical[3]) == "/device:CPU:3"
    check_devices(logical)
    divided = r"physical_device:CPU:0 is divided .* those you want of \['/device:CPU:0'"
    with pytest.raises(ValueError, match=divided):
        towers([physical])
    two = [tf.config.PhysicalDevice(f"/physical_device:GPU:{n}", "GPU") for n in (0, 1)]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: two[1:])
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: None)
    assert canonical_device(two[1]) == "/device:GPU:0"  # of those that are visible
    with pytest.raises(ValueError, match="physical_device:GPU:0 is not visible"):
        canonical_device(two[0])


def test_a_sessions_own_devices_count_not_the_configured_ones(graph):
    for count in (2, NUM_CPUS, 12):
        config = tf.compat.v1.ConfigProto(device_count={"CPU": count})
        config = config if count != NUM_CPUS else None  # which is the default
        with tf.compat.v1.Session(config=config) as sess:
            check_devices(CPUS[:count], session=sess)
            listed = ".*CPU:2'.*CPU:9', '/device:CPU:10'" if count == 12 else ""
            says = rf"Unknown devices \['/cpu:{count}'\]{listed}"  # by number
            with pytest.raises(ValueError, match=says):
                check_devices([f"/cpu:{count}"], session=sess)


def test_a_session_on_a_server_knows_that_servers_devices(graph):
    cluster = {"worker": ["localhost:0"]}
    server = tf.compat.v1.train.Server(cluster, job_name="worker", task_index=0)
    with tf.compat.v1.Session(server.target) as sess:
        assert all("/job:worker/" in device.name for device in sess.list_devices())
        check_devices(["/cpu:0"], session=sess)
        with pytest.raises(ValueError, match="Unknown devices"):
            check_devices(["/cpu:99"], session=sess)
