"""The hosts of the fault drills: their network is cut and healed, and nothing is left.

``nox -s faults -- --drill hosts`` runs the situations.
"""

import os
import sys
import time

import pytest
from harness.processes import Program, is_alive, wait_until
from lab.faults.hosts import Hosts, why_no_hosts

ECHO = """
import socket
for peer, _ in iter(socket.create_server(("", 4000)).accept, None):
    peer.sendall(b"here")
"""
ASK = """
import socket
try:
    peer = socket.create_connection(("node1", 4000), 1)
    peer.settimeout(1)
    print("got", peer.recv(4).decode())
except OSError as error:
    print("got", type(error).__name__)
"""


def ask(hosts, host):
    asked = hosts.run(host, sys.executable, "-c", ASK)
    return asked.wait_for(r"got (\w+)", within_s=20).group(1)


def test_what_is_dropped_is_lost_and_what_is_refused_is_refused(tmp_path):
    if (reason := why_no_hosts()) is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    with Hosts(3, tmp_path) as hosts:
        echo = hosts.run(1, sys.executable, "-c", ECHO)
        until = time.monotonic() + 20
        while (answer := ask(hosts, 0)) != "here":
            assert time.monotonic() < until, answer
        hosts.drop(1, 0)
        assert (ask(hosts, 0), ask(hosts, 2)) == ("TimeoutError", "here")
        hosts.heal()
        assert ask(hosts, 0) == "here"
        hosts.refuse(1, 4000, sender=2)
        assert (ask(hosts, 0), ask(hosts, 2)) == ("here", "ConnectionRefusedError")
        with pytest.raises(AssertionError, match=r"node1\.log: no 'x' within 0 s"):
            echo.wait_for("x", within_s=0)
    assert echo.finish(20) != 0
    with pytest.raises(AssertionError, match=r"node1\.log has ended"):
        echo.wait_for("never")


def test_hosts_end_with_the_process_that_made_them(tmp_path):
    if (reason := why_no_hosts()) is not None:
        pytest.skip(f"no hosts can be made here: {reason}")
    program = (
        "import pathlib, sys, time; from lab.faults.hosts import Hosts; "
        "hosts = Hosts(2, pathlib.Path(sys.argv[1])).__enter__(); "
        "hosts.run(1, 'sleep', '333'); print(hosts._inner[1], flush=True); "
        "time.sleep(60)"
    )
    env = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    with Program([sys.executable, "-c", program, tmp_path], env=env) as made:
        inner = int(made.wait_for(r"(\d+)\n")[1])
    wait_until(lambda: not is_alive(inner))
