"""What servers and sessions of a task are set to.

Private functions are imported, as a server does not show its settings.
"""

import pytest
import tensorflow as tf

import tw_launch
from tw_launch._servers import server_config, shares_processors

LOCAL = {"ps": ("localhost:1",), "worker": ("localhost:2", "localhost:3")}
SPREAD = {"ps": ("a:1",), "worker": ("b:1", "b:2", "c:1")}


@pytest.mark.parametrize(
    "addresses, own, processors, want",
    [
        (LOCAL, "localhost:1", 2, True),
        (LOCAL, "localhost:1", 3, True),
        (LOCAL, "localhost:1", 4, False),
        (SPREAD, "b:2", 2, True),
        (SPREAD, "b:2", 3, False),
        (SPREAD, "a:1", 1, False),
        ({"ps": ("[::1]:1",), "worker": ("[::1]:2",)}, "[::1]:2", 2, True),
    ],
)
def test_tasks_of_one_machine_share_its_processors(addresses, own, processors, want):
    assert shares_processors(addresses, own, processors=processors) is want


@pytest.mark.parametrize("tasks, sleeps", [(1, False), (10_000, True)])
def test_threads_sleep_where_a_task_has_no_processor_to_spare(tasks, sleeps):
    addresses = {"worker": tuple(f"h:{n}" for n in range(tasks))}
    config = server_config(addresses, "h:0")
    assert config.experimental.disable_thread_spinning is sleeps


def test_a_session_sees_the_servers_and_its_own_task_only():
    task = tw_launch.TaskConfig({"worker": ("a:1", "b:1"), "ps": ("c:1",)}, "worker", 1)
    given = tf.compat.v1.ConfigProto(log_device_placement=True)
    config = tw_launch.with_device_filters(given, task)
    assert list(config.device_filters) == ["/job:ps", "/job:worker/task:1"]
    assert config.log_device_placement
    own = tf.compat.v1.ConfigProto(device_filters=["/job:x"])
    assert tw_launch.with_device_filters(own, task) is own
    assert tw_launch.with_device_filters(None, None) is None


def test_an_evaluator_has_no_server():
    task = tw_launch.TaskConfig({"worker": ("a:1",)}, "evaluator", 0)
    with pytest.raises(ValueError, match="evaluator 0 is not part of the cluster"):
        tw_launch.start_server(task)
