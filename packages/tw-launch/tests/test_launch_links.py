"""tw-launch on two machines that are network namespaces, joined by a link."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import links
from harness.launches import Launches
from harness.processes import is_alive, wait_until

HOSTS = ("10.77.0.1", "10.77.0.2")
IN_NAMESPACE = f"""
import os, sys
sys.path.insert(0, {str(Path(links.__file__).parents[1])!r})
from harness import links
links._unshare()
os.write(1, b"alone\\n")
sys.stdin.readline()
own = "addr add " + sys.argv[1] + "/24 dev end"
links._ip("link set lo up", own, "link set end up")
os.execv(sys.executable, [sys.executable, "-m", "tw_launch", *sys.argv[2:]])
"""


@pytest.fixture
def launches():
    launches = Launches(f"{HOSTS[0]}:29400")
    yield launches
    launches.kill()


def start(launches, program, *arguments):
    """Starts two launchers, each in a namespace of its own, and joins these."""
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"no {tool} here")
    processes = [
        launches.start(
            *(node, program, "--address", host, *arguments),
            launcher=[sys.executable, "-c", IN_NAMESPACE, host],
            stdin=subprocess.PIPE,
        )
        for node, host in enumerate(HOSTS)
    ]
    for process in processes:
        process.wait_for("alone|Error")
        if "alone" not in process.out:
            pytest.skip(f"no namespaces: {process.err.splitlines()[-1]}")
    first, second = (process.pid for process in processes)
    words = f"ip link add end netns {first} type veth peer name end netns {second}"
    joined = run(words)
    if joined.returncode:
        pytest.skip(f"no link between namespaces: {joined.stderr.strip()}")
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.close()
    return processes


def run(words):
    return subprocess.run(words.split(), capture_output=True, text=True, timeout=30)


def test_machines_with_a_network_between_them_reach_each_other(launches):
    program = """
    host, port = config["cluster"]["worker"][0].rsplit(":", 1)
    if index == 0:
        server = socket.create_server(("", int(port)))
        print("met", server.accept()[1][0], flush=True)
    while index == 1:
        try:
            socket.create_connection((host, int(port)), 1)
            break
        except OSError:
            time.sleep(0.05)
    """
    processes = start(launches, program)
    assert launches.finish() == [0, 0], processes[0].err
    assert "[worker 0] met 10.77.0.2" in processes[0].out
    assert "without a key, any program that reaches this port" in processes[0].err


@pytest.mark.slow
def test_a_link_that_goes_down_ends_both_machines_in_time(launches):
    program = "print('pid', os.getpid(), flush=True); time.sleep(60)"
    processes = start(launches, program, "--node-timeout", "2")
    pids = [int(one.wait_for(r"pid (\d+)")[1]) for one in processes]
    down = run(f"nsenter -t {processes[0].pid} -n ip link set end down")
    assert down.returncode == 0, down.stderr
    assert launches.finish() == [1, 1]
    for process, other in zip(
        processes, ("node 1 (10.77.0.2)", "node 0 (10.77.0.1)"), strict=True
    ):
        said = f"{other} is lost: its launcher has sent nothing for 2 s"
        assert said in process.err
    wait_until(lambda: not any(map(is_alive, pids)))
