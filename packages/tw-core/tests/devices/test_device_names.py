"""Device strings are read, spelled one way, or refused by name."""

# Private import: the reader of device strings that all public functions call.

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_core.devices import canonical_device, host_of, repeated_devices
from tw_core.devices._names import parse_device

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
    with pytest.raises(
        ValueError, match=f"asker: {device!r} is not a TensorFlow device"
    ):
        parse_device(device, caller="asker")
    with pytest.raises(ValueError, match=r"^canonical_device: .*write e.g. '/gpu:0'"):
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
