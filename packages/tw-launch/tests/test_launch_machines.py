"""tw-launch on several machines, which are loopback addresses of this one.

Node n has the address 127.0.0.<n + 1>. In ``test_launch_links`` they are network
namespaces.
"""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from queue import SimpleQueue

import pytest
from harness.launches import Launches
from harness.ports import find_free_ports
from harness.processes import is_alive, wait_until
from harness.rank_faults import send_proved, send_raw
from harness.relays import Relay

from tw_launch._launcher.meeting import NODE_0, Port, open_port
from tw_launch._launcher.messages import Ended, Hello, Over, decode, encode

WAITING = "print('pid', os.getpid(), flush=True); time.sleep(60)"
PID = r"pid (\d+)"


@pytest.fixture
def launches():
    (port,) = find_free_ports(1)
    launches = Launches(f"127.0.0.1:{port}")
    yield launches
    launches.kill()


def start_waiting(launches, *arguments, nodes=(0, 1)):
    """Starts launchers whose tasks wait; returns them and the tasks' process ids."""
    started = [launches.start(n, WAITING, *arguments, nnodes=len(nodes)) for n in nodes]
    return started, [int(one.wait_for(PID)[1]) for one in started]


def test_machines_make_one_cluster_in_the_order_of_their_ranks(launches, tmp_path):
    program = f"""
    os.chdir({str(tmp_path)!r})
    names = "LOCAL_RANK", "LOCAL_SIZE", "NODE_RANK", "NUM_NODES", "START"
    print(json.dumps([config, [os.environ.get(f"TW_{{name}}") for name in names]]))
    sys.stdout.flush()
    open(f"{{job}} {{index}}", "w").close()
    if job == "ps":
        time.sleep(600)
    while len(os.listdir()) < 7:
        time.sleep(0.02)
    """
    more = ("--ps", "1", "--evaluators", "1", "--workers")
    # The last comes first, and node 0 second.
    nodes = {
        n: launches.start(n, program, *more, w, nnodes=3)
        for n, w in [(2, 1), (0, 2), (1, 2)]
    }
    assert launches.finish() == [0, 0, 0]
    told = {}
    for node, process in nodes.items():
        for name, text in re.findall(r"\[(\w+ \d)\] (.*)", process.out):
            told[name] = (node, *json.loads(text))
    assert sorted(told) == ["evaluator 0", "ps 0", *(f"worker {n}" for n in range(5))]
    clusters = [config["cluster"] for _, config, _ in told.values()]
    assert clusters == clusters[:1] * 7
    hosts = [address.rpartition(":")[0] for address in clusters[0]["worker"]]
    assert hosts == ["127.0.0.1"] * 2 + ["127.0.0.2"] * 2 + ["127.0.0.3"]
    assert clusters[0]["ps"][0].startswith("127.0.0.1:")
    places = {name: (node, own) for name, (node, _, own) in told.items()}
    assert places == {
        "ps 0": (0, [None, None, "0", "3", "0"]),
        "evaluator 0": (0, [None, None, "0", "3", "0"]),
        "worker 0": (0, ["0", "2", "0", "3", "0"]),
        "worker 1": (0, ["1", "2", "0", "3", "0"]),
        "worker 2": (1, ["0", "2", "1", "3", "0"]),
        "worker 3": (1, ["1", "2", "1", "3", "0"]),
        "worker 4": (2, ["0", "1", "2", "3", "0"]),
    }


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_failure_decides_for_all_machines(launches, failing):
    program = f"""
    if index == {failing}:
        print("what went wrong", flush=True)
        sys.exit(7)
    print("pid", os.getpid(), flush=True)
    time.sleep(60)
    """
    processes = [launches.start(node, program) for node in (0, 1)]
    assert launches.finish() == [7, 7]
    where = f"node {failing} (127.0.0.{failing + 1})"
    for process in processes:
        err = process.err
        assert f"worker {failing} failed with status 7 after 1 start(s)" in err
        assert f"failed: worker {failing} on {where}, exit code 7" in err
        assert "[tw-launch]   what went wrong" in err


@pytest.mark.parametrize("failing", [0, 1])
def test_all_tasks_of_all_machines_are_restarted_on_fresh_ports(
    launches, tmp_path, failing
):
    program = f"""
    os.chdir({str(tmp_path)!r})
    print("start", start, os.getpid(), json.dumps(config["cluster"]), flush=True)
    print("run", os.environ["TW_RUN_ID"], flush=True)
    if start == 0:
        open(str(index), "w").close()
        while index != {failing} or len(os.listdir()) < 2:
            time.sleep(0.02)
        sys.exit(4)
    """
    options = ("--restart", "group", "--restart-delay", "0", "--max-restarts", "1")
    processes = [launches.start(node, program, *options) for node in (0, 1)]
    assert launches.finish() == [0, 0]
    told = [re.findall(r"start (\d) (\d+) (.*)", process.out) for process in processes]
    assert [[number for number, _, _ in one] for one in told] == [["0", "1"]] * 2
    first, second = (
        {cluster for _, _, cluster in pair} for pair in zip(*told, strict=True)
    )
    assert len(first) == len(second) == 1
    assert first != second
    out = "".join(process.out for process in processes)
    assert len(set(re.findall(r"run (\w{16})", out))) == 1
    assert not any(is_alive(int(pid)) for one in told for _, pid, _ in one)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("hit", [0, 1])
def test_a_signal_to_one_launcher_ends_all_machines(launches, hit, number):
    processes, pids = start_waiting(launches)
    processes[hit].send_signal(number)
    assert launches.finish() == [128 + number] * 2
    assert not any(map(is_alive, pids))
    said = f"node {hit} (127.0.0.{hit + 1}) got {signal.Signals(number).name}"
    assert said in processes[1 - hit].err


@pytest.mark.parametrize("hit", [0, 1])
def test_a_launcher_that_is_killed_ends_all_machines_at_once(launches, hit):
    processes, pids = start_waiting(launches, "--node-timeout", "1000")
    processes[hit].kill()
    other = processes[1 - hit]
    assert launches.finish(other) == [1]
    assert f"node {hit} (127.0.0.{hit + 1}) is lost: its" in other.err
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.slow
@pytest.mark.parametrize("hit", [0, 1])
def test_a_launcher_that_is_stopped_ends_the_others_in_time(launches, hit):
    processes, pids = start_waiting(launches, "--node-timeout", "6", nodes=(0, 1, 2))
    processes[hit].send_signal(signal.SIGSTOP)
    others = [process for process in processes if process is not processes[hit]]
    assert launches.finish(*others) == [1, 1]
    for other in others:
        said = f"node {hit} (127.0.0.{hit + 1}) is lost: its launcher has sent noth"
        assert said in other.err
    assert not is_alive(pids[2])
    processes[hit].send_signal(signal.SIGCONT)
    assert launches.finish(processes[hit]) == [1]
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_a_launcher_whose_output_is_not_read_is_not_taken_for_lost(launches, tmp_path):
    program = """
    if index == 1 and not os.path.exists("again"):
        open("again", "w").close()
        sys.exit(4)
    time.sleep(8 * (1 - index))
    """
    options = ("--max-restarts", "1", "--node-timeout", "4")
    settings = {"cwd": tmp_path}
    launches.start(0, program, *options, **settings)
    taken, given = os.pipe()
    os.set_blocking(given, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(given, bytes(4096))
    os.set_blocking(given, True)
    node_1 = launches.start(1, program, *options, **settings, stderr=given)
    os.close(given)
    wait_until(lambda: (tmp_path / "again").exists())
    time.sleep(6)  # It is to say that it restarts the task, and cannot.
    assert node_1.poll() is None
    with open(taken, "rb") as pipe:
        said = pipe.read()
    assert b"restart 1 of 1" in said
    assert launches.finish() == [0, 0]


def test_a_hello_of_another_version_is_refused_in_words(launches):
    launcher = [sys.executable, "-c", OTHER_HELLO]
    launches.start(0, "pass", "--start-timeout", "5")
    node_1 = launches.start(1, "pass", launcher=launcher)
    assert launches.finish(node_1) == [2]
    said = "node 0 does not know this version of tw-launch: expected a message"
    assert said in node_1.err


def test_a_name_that_is_local_to_node_0_is_refused(monkeypatch):
    monkeypatch.delenv("TW_LISTEN", raising=False)
    [port] = find_free_ports(1)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    says = (
        rf"^--coordinator node0:{port}: node0 resolves to 127\.0\.1\.1 here, .* node 0;"
    )
    with pytest.raises(ValueError, match=says):
        open_port("node0", port, within_s=5.0, inbox=SimpleQueue())
    for host in ("localhost", "127.0.1.1"):
        open_port(host, port, within_s=5.0, inbox=SimpleQueue()).close()


OTHER_HELLO = """
import sys
from tw_launch._launcher import command as launch
from tw_launch._launcher import link as _link
real = _link.encode
_link.encode = lambda message: real(message).replace(b'"workers"', b'"replicas"')
sys.exit(launch.main())
"""


def test_a_machine_that_was_lost_first_is_named_first(launches, tmp_path):
    program = f"""
    print("pid", os.getpid(), flush=True)
    while not os.path.exists({str(tmp_path / "fails")!r}):
        time.sleep(0.02)
    sys.exit(3)
    """
    processes = [launches.start(n, program, "--min-workers", "1") for n in (0, 1)]
    for process in processes:
        process.wait_for(PID)
    processes[1].kill()
    processes[0].wait_for(r"killed; continuing with 1 workers")
    (tmp_path / "fails").touch()
    assert launches.finish(processes[0]) == [1]
    err = processes[0].err
    assert re.search(
        r"first task that failed: worker 1 on node 1 .*, lost with its", err
    )
    assert "the task that ended the run: worker 0, exit code 3" in err


def test_what_is_no_launcher_is_turned_away_and_the_run_begins(launches):
    node_0 = launches.start(0, "pass")
    node_0.wait_for("node 0 waits at 127.0.0.1:")
    place = ("127.0.0.1", int(launches.coordinator.rpartition(":")[2]))
    lines = [
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"[" * 100_000 + b"\n",
        os.urandom(1000) + b"\n",
        b'["Beat", {}]\n',
        b"",
    ]
    for line in lines:
        with socket.create_connection(place, 5) as client:
            client.sendall(line)
    endless = socket.create_connection(place, 5)
    with endless, contextlib.ExitStack() as silent:
        with pytest.raises(OSError):
            for _ in range(1000):
                endless.sendall(b"x" * (1 << 16))
        for _ in range(150):  # More than may wait: the oldest is closed unheard.
            silent.enter_context(socket.create_connection(place, 5))
        node_1 = launches.start(1, "pass")
        assert launches.finish() == [0, 0]
    err = node_0.err
    assert err.count("[tw-launch] rejected a connection: ") == 5
    assert "a received line is longer than 65536 bytes; from now on only counted" in err
    assert "expected a message, got b'GET / HTTP/1.1" in err
    assert "Traceback" not in err + node_1.err


SHARED = "0123456789abcdef" * 2
SAYS_KEY = "print('key', os.environ.get('TW_KEY'), flush=True)"


def with_key(key):
    return {**os.environ, "TW_KEY": key}


@pytest.mark.slow(by_day=True)
def test_machines_share_a_key_and_each_run_has_its_own(launches, tmp_path):
    keys = []
    file = tmp_path / "key"
    file.write_text(SHARED)
    file.chmod(0o600)
    for _ in range(2):
        started = [
            launches.start(0, SAYS_KEY, "--key-file", str(file)),
            launches.start(1, SAYS_KEY, env=with_key(SHARED)),
        ]
        assert launches.finish(*started) == [0, 0]
        told = [re.search(r"key (\w{32})\n", one.out)[1] for one in started]
        assert told[0] == told[1] != SHARED
        keys.append(told[0])
        assert not any(key in one.err for one in started for key in (SHARED, told[0]))
    assert keys[0] != keys[1]


@pytest.mark.parametrize(
    ("key", "said"), [("", "node 0 has a key, and"), (SHARED[1:], "node 0 has another")]
)
def test_a_machine_without_the_key_takes_no_rank(launches, key, said):
    node_0 = launches.start(0, "pass", env=with_key(SHARED))
    stranger = launches.start(1, "pass", env=with_key(key))
    assert launches.finish(stranger) == [2]
    assert f"{launches.coordinator}: {said}" in stranger.err
    node_1 = launches.start(1, "pass", env=with_key(SHARED))
    assert launches.finish(node_0, node_1) == [0, 0]


def test_without_a_key_on_loopback_there_is_none(launches):
    started = [launches.start(node, SAYS_KEY) for node in (0, 1)]
    assert launches.finish() == [0, 0]
    assert all("key None\n" in one.out for one in started)
    assert all("without a key" not in one.err for one in started)


@pytest.fixture
def port():
    inbox = SimpleQueue()
    server = socket.create_server(("127.0.0.1", 0))
    port = Port(server, inbox=inbox, silence_s=30.0, key=SHARED)
    yield port, inbox, server.getsockname()
    port.close()


def test_a_greeting_that_nobody_reads_the_answer_of_delays_nobody(port, capsys):
    _, inbox, address = port
    hello = Hello(1, "\x1b[2J", 1, (1,), {"--nnodes": "2"})
    lines = [encode(hello), encode(replace(hello, host="h" * 10_000))]
    for line in lines:
        send_proved(address, line, key=SHARED, door=NODE_0).close()
    with send_proved(
        address, encode(replace(hello, host="h")), key=SHARED, door=NODE_0
    ) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        arrived = inbox.get(timeout=10)
        began_s = time.monotonic()
        arrived.turn_away("so long" * 1_000_000)
        assert time.monotonic() - began_s < 3.0
    err = capsys.readouterr().err
    assert inbox.empty()
    assert err.count("its greeting is inconsistent") == 2
    assert "\x1b" not in err
    assert len(err) < 3_000


def test_what_another_launcher_says_cannot_control_the_terminal():
    ended = Ended("\x1b[2J", 3, lines=("\x1b[31mred",), log="a\nb")
    over = decode(encode(Over(1, "a\x9b2J", failed=ended)))
    assert over.said == r"a\x9b2J"
    assert (over.failed.task, over.failed.log) == (r"\x1b[2J", r"a\nb")
    assert over.failed.lines == ended.lines  # As the task has printed them.


def test_a_recorded_run_takes_no_machines_place(port):
    _, inbox, address = port
    relay = Relay(address[1])
    line = encode(Hello(1, "h", 1, (1,), {"--nnodes": "2"}))
    with send_proved(("localhost", relay.port), line, key=SHARED, door=NODE_0):
        inbox.get(timeout=10)
    relay.end()
    [sent] = relay.recorded.values()
    assert sent.endswith(line)
    with send_raw(address, sent) as stranger, stranger.makefile("rb") as told:
        kinds = [json.loads(answer)["do"] for answer in told]
    assert kinds == ["challenge", "refused"]
    assert inbox.empty()


OTHER_VERSION = """
import sys
from tw_launch._launcher import command as launch
real = launch.version_of
launch.version_of = lambda name: "1.2.3" if name == "tensorflow" else real(name)
sys.exit(launch.main())
"""


def test_other_versions_are_refused_on_every_machine(launches):
    launcher = [sys.executable, "-c", OTHER_VERSION]
    processes = [
        launches.start(0, "pass", nnodes=3),
        launches.start(1, "pass", nnodes=3),
        launches.start(2, "pass", nnodes=3, launcher=launcher),
    ]
    assert launches.finish() == [2, 2, 2]
    said = (
        r"\[tw-launch\] node 0 \(127.0.0.1\) has TensorFlow [\w.]+, but node 2 "
        r"\(127.0.0.3\) has TensorFlow 1.2.3; all machines need the same versions"
    )
    for process in processes:
        assert re.search(said, process.err)


@pytest.mark.slow
def test_who_cannot_take_part_is_turned_away_and_the_run_begins(launches, tmp_path):
    program = f"""
    print("pid", os.getpid(), flush=True)
    while not os.path.exists({str(tmp_path / "over")!r}):
        time.sleep(0.02)
    """
    node_0, node_1 = (launches.start(node, program, nnodes=3) for node in (0, 1))
    node_0.wait_for("2 of 3 are here")
    twice = launches.start(1, "pass", nnodes=3)
    other = launches.start(2, "pass", nnodes=4)
    assert launches.finish(twice, other) == [2, 2]
    assert "rank 1 is already taken by 127.0.0.2" in twice.err
    assert "it has --nnodes 4, node 0 has 3" in other.err
    node_2 = launches.start(2, program, nnodes=3)
    node_2.wait_for(PID)
    late = launches.start(2, "pass", nnodes=3)
    assert launches.finish(late) == [2]
    assert "rejected: the run has begun" in late.err
    (tmp_path / "over").touch()
    assert launches.finish(node_0, node_1, node_2) == [0, 0, 0]


@pytest.mark.slow
def test_machines_that_do_not_come_are_named(launches):
    node_0 = launches.start(0, "pass", "--start-timeout", "2", nnodes=4)
    node_2 = launches.start(2, "pass", nnodes=4)
    assert launches.finish() == [2, 2]
    for process in (node_0, node_2):
        said = "[tw-launch] node ranks 1, 3 of 4 did not join within 2 s"
        assert said in process.err


@pytest.mark.parametrize(
    ("node", "coordinator", "options", "said"),
    [
        (
            1,
            "",
            ("--address", "tasks.invalid"),
            "--address tasks.invalid has no address (",
        ),
        (
            0,
            "192.0.2.1:1",
            (),
            "192.0.2.1:1: node 0 cannot listen there: 192.0.2.1 is no",
        ),
        (
            1,
            "",
            ("--start-timeout", "1"),
            "node rank 0 cannot be reached at 127.0.0.1:",
        ),
    ],
)
def test_a_machine_that_cannot_meet_the_others_says_why(
    launches, node, coordinator, options, said
):
    launches.coordinator = coordinator or launches.coordinator
    started = launches.start(node, "pass", *options)
    assert launches.finish() == [2]
    assert said in started.err


def test_a_coordinator_that_is_no_launcher_is_reported(launches):
    host, _, port = launches.coordinator.rpartition(":")
    with socket.create_server((host, int(port))) as server:
        node_1 = launches.start(1, "pass")
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"220 smtp.example.org\r\n")
            assert launches.finish() == [2]
    said = "no tw-launch answers at 127.0.0.1:"
    assert "expected a message, got b'220 smtp.example.org" in node_1.err
    assert said in node_1.err


@pytest.mark.parametrize("hit", [0, 1])
def test_a_signal_in_the_meeting_ends_all_that_have_come(launches, hit):
    node_0 = launches.start(0, "pass", nnodes=3)
    node_1 = launches.start(1, "pass", nnodes=3)
    node_0.wait_for("2 of 3 are here")
    (node_0, node_1)[hit].send_signal(signal.SIGINT)
    assert launches.finish() == [130, 130]


def test_a_machine_may_leave_the_meeting_and_come_back(launches):
    node_0 = launches.start(0, "pass", nnodes=3)
    leaving = [sys.executable, "-c", LEAVES]
    launches.start(1, "pass", nnodes=3, launcher=leaving)
    node_0.wait_for(r"node 1 \(127.0.0.2\) left before the run began")
    for node in (1, 2):
        launches.start(node, "pass", nnodes=3)
    assert launches.finish() == [0, 5, 0, 0]


LEAVES = """
import os, threading
from tw_launch._launcher import command as launch
launch.follow = lambda *_, **__: os._exit(5)
launch.main()
"""


def test_machines_without_a_worker_are_refused(launches):
    processes = [launches.start(node, "pass", "--workers", "0") for node in (0, 1)]
    assert launches.finish() == [2, 2]
    for process in processes:
        assert "0 workers on all machines" in process.err


def test_a_tasks_output_is_whole_when_its_machine_ends(launches):
    program = """
    for number in range(2000):
        print("line", number)
    """
    processes = [launches.start(node, program) for node in (0, 1)]
    assert launches.finish() == [0, 0]
    for process in processes:
        assert process.out.count("line") == 2000


def test_a_port_that_is_about_to_be_free_is_waited_for(launches):
    host, _, port = launches.coordinator.rpartition(":")
    with socket.create_server((host, int(port))):
        node_0 = launches.start(0, "pass")
        node_0.wait_for("cannot listen there: Address already in use; trying")
    launches.start(1, "pass")
    assert launches.finish() == [0, 0]


def test_a_port_that_stays_taken_is_named(launches):
    host, _, port = launches.coordinator.rpartition(":")
    with socket.create_server((host, int(port))):
        node_0 = launches.start(0, "pass", "--start-timeout", "1")
        assert launches.finish() == [2]
    said = f"--coordinator {launches.coordinator}: node 0 cannot listen there: Address"
    assert node_0.err.count(said) == 2


def test_a_signal_ends_the_wait_for_a_port(launches):
    host, _, port = launches.coordinator.rpartition(":")
    with socket.create_server((host, int(port))):
        node_0 = launches.start(0, "pass")
        node_0.wait_for("trying again")
        node_0.send_signal(signal.SIGINT)
        assert launches.finish() == [130]


def test_machines_meet_at_an_ipv6_address_and_share_the_runs_name(launches):
    launches.coordinator = launches.coordinator.replace("127.0.0.1", "[::1]")
    program = "print('run', os.environ['TW_RUN_ID'], config['cluster'], flush=True)"
    nodes = [launches.start(n, program, "--address", "[::1]") for n in (0, 1)]
    assert launches.finish() == [0, 0]
    told = [re.search(r"run (\w{16}) (.*)", one.out) for one in nodes]
    assert told[0].groups() == told[1].groups()
    assert told[0][2].count("'[::1]:") == 2
