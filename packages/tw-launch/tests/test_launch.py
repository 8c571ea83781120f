"""tw-launch starts tasks, supervises them and leaves none behind.

Private modules are imported for what a launch decides before it starts anything.
"""

import ctypes
import errno
import inspect
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings

import pytest
from harness.launches import finish, launch
from harness.ports import find_free_ports
from harness.processes import IN_BACKGROUND, is_alive, wait_until

from tw_launch import ExposedServerWarning, _network_exposure, is_exposed, main
from tw_launch._network_exposure import hold_free_ports, warn_if_exposed

LOOPBACKS = {"127.0.0.1": socket.AF_INET, "::1": socket.AF_INET6}


def test_tasks_get_their_tf_config_and_their_output_a_prefix(tmp_path):
    # The run ends with the workers, so these wait until the server has spoken.
    program = f"""
    spoken = {str(tmp_path / "spoken")!r}
    print(json.dumps(config), flush=True)
    if job == "ps":
        open(spoken, "w").close()
        time.sleep(60)
    while not os.path.exists(spoken):
        time.sleep(0.05)
    """
    status, out, _ = finish(launch(program, "--ps", "1", "--workers", "2"))
    assert status == 0
    lines = dict(line[1:].split("] ", 1) for line in out.splitlines())
    assert sorted(lines) == ["ps 0", "worker 0", "worker 1"]
    clusters = [json.loads(text)["cluster"] for text in lines.values()]
    assert clusters[0] == clusters[1] == clusters[2]
    assert [len(clusters[0][job]) for job in ("ps", "worker")] == [1, 2]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_goes_on_though_nobody_reads_its_output(stream):
    # More than a pipe holds: a task whose output is not taken would block.
    program = f"""
    for _ in range(5000):
        print("x" * 100, file=sys.{stream}, flush=True)
    """
    pipe = {stream: subprocess.PIPE}
    process = launch(program, "--ps", "0", "--grace", "5", **pipe)
    getattr(process, stream).close()
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()


def test_a_launcher_without_an_output_runs():
    command = [sys.executable, "-m", "tw_launch", "--ps", "0", "--", "echo"]
    shell = ["sh", "-c", '"$@" >&- 2>&-', "sh", *command]
    assert subprocess.run(shell, timeout=30).returncode == 0


def test_what_the_output_cannot_hold_is_escaped():
    program = r"sys.stdout.buffer.write(b'\xc3\xbc\nend\n')"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    process = launch(program, "--ps", "0", "--workers", "1", env=env)
    status, out, _ = finish(process)
    assert status == 0
    assert out == "[worker 0] \\xfc\n[worker 0] end\n"


def test_states_of_a_progress_bar_pass_as_they_come(tmp_path):
    gate = tmp_path / "gate"
    program = f"""
    sys.stdout.write("1 of 2\\r")
    sys.stdout.flush()
    while not os.path.exists({str(gate)!r}):
        time.sleep(0.02)
    sys.stdout.write("2 of 2\\r\\nend\\r")
    sys.stdout.flush()
    time.sleep(0.2)  # The launcher has read the carriage return.
    print()
    """
    options = ("--ps", "0", "--workers", "1", "--log-dir", str(tmp_path))
    process = launch(program, *options)
    process.wait_for("1 of 2\r")
    gate.touch()
    _, out, _ = finish(process)
    assert out == "[worker 0] 1 of 2\r[worker 0] 2 of 2\r\n[worker 0] end\r\n"
    log = (tmp_path / "worker-0.0.log").read_bytes()
    assert log == b"1 of 2\r2 of 2\r\nend\r\n"


def test_a_progress_bar_is_one_of_the_last_lines():
    program = "print('a'); print(*range(99), sep='\\r'); sys.exit(3)"
    status, _, err = finish(launch(program, "--ps", "0", "--workers", "1"))
    assert status == 3
    said = err.partition("its last lines:\n")[2].splitlines()
    assert said == ["[tw-launch]   a", "[tw-launch]   98"]


def test_a_long_line_is_not_cut():
    program = "for _ in range(3): print('\u00fc' * 200_000, flush=True)"
    status, out, _ = finish(launch(program, "--ps", "0"))
    assert status == 0
    line = "\u00fc" * 200_000
    lines = sorted(out.splitlines())
    assert lines == [f"[worker {n}] {line}" for n in (0, 0, 0, 1, 1, 1)]


# Of a program: waits until a task has ended and the launcher knows.
ENDED = """
def wait_for(pid_file):
    while not os.path.exists(pid_file) or os.path.exists(
        f"/proc/{open(pid_file).read()}"
    ):
        time.sleep(0.02)

def leave_pid(pid_file):
    with open(pid_file + ".part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(pid_file + ".part", pid_file)
"""


def test_the_first_that_failed_is_named_where_the_run_went_on_without_it(tmp_path):
    program = f"""{ENDED}
path = {str(tmp_path / "pid")!r}
if index == 1:
    leave_pid(path)
    os.kill(os.getpid(), signal.SIGKILL)
wait_for(path)
sys.exit("worker 1 is missing")
"""
    counts = ("--ps", "0", "--workers", "2", "--min-workers", "1")
    status, _, err = finish(launch(program, *counts))
    assert status == 128 + signal.SIGKILL
    assert (
        "worker 1 failed with status 137 after 1 start(s); continuing with 1 w" in err
    )
    assert "the first task that failed: worker 1, SIGKILL" in err
    told = "the task that ended the run: worker 0, exit code 1", "its last lines:"
    assert [f"[tw-launch] {line}" for line in (*told, "  worker 1 is missing")] == [
        line.rstrip() for line in err.splitlines()[-3:]
    ]


@pytest.mark.slow
def test_signals_are_handed_on_and_stubborn_tasks_killed():
    program = """
    if index == 1:
        signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(os.getpid(), flush=True)
    while True:
        time.sleep(1)
    """
    process = launch(program, "--ps", "0", "--grace", "2", start=IN_BACKGROUND)
    pids = [int(pid) for pid in process.wait_for(r"(\d+)\n.* (\d+)\n").groups()]
    process.send_signal(signal.SIGTERM)
    status, out, err = finish(process)
    assert status == 128 + signal.SIGTERM
    assert "got SIGTERM" in err
    assert "[worker 1] heard" in out
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_stubborn_tasks_share_one_grace():
    program = """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(60)
    """
    process = launch(program, "--ps", "3", "--workers", "1", "--grace", "3")
    process.wait_for(r"(ready\n.*){4}")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    status, _, _ = finish(process)
    assert status == 128 + signal.SIGINT
    assert 3 <= time.monotonic() - began < 4 * 3


def test_a_server_that_ends_well_before_the_workers_is_reported_once(tmp_path):
    program = f"""{ENDED}
path = {str(tmp_path / "pid")!r}
leave_pid(path) if job == "ps" else wait_for(path)
"""
    status, _, err = finish(launch(program, "--ps", "1", "--workers", "2"))
    assert status == 0
    said = "[tw-launch] ps 0 ended with status 0 before the workers"
    assert err.count(said) == 1
    assert "worker 0 ended" not in err


@pytest.mark.parametrize(
    ("shown", "of_workers", "said"),
    [("3,1,0,2", ["3,1", "0,2"], ""), ("0", ["", ""], "1 GPU for 2 workers")],
)
def test_every_worker_gets_its_own_gpus_and_servers_none(shown, of_workers, said):
    program = """
    print(os.environ.get("CUDA_VISIBLE_DEVICES", "unset"), flush=True)
    time.sleep(60 if job == "ps" else 1)
    """
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": shown}
    counts = ["--ps", "1", "--workers", "2", "--evaluators", "1"]
    status, out, err = finish(launch(program, *counts, env=env))
    assert status == 0
    of_tasks = [f"[worker {n}] {gpus}" for n, gpus in enumerate(of_workers)]
    assert sorted(out.splitlines()) == ["[evaluator 0] ", "[ps 0] ", *of_tasks]
    assert said in err


def test_a_killed_launcher_leaves_neither_tasks_nor_their_children_behind():
    program = """
    child = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    print(os.getpid(), child, flush=True)
    time.sleep(60)
    """
    process = launch(program, "--ps", "0", "--workers", "2")
    found = process.wait_for(r"(\d+) (\d+)\n.* (\d+) (\d+)\n")
    pids = [int(pid) for pid in found.groups()]
    process.kill()
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_launcher_under_nohup_goes_on_when_its_terminal_closes():
    program = "print('ready', flush=True); time.sleep(1); print('done')"
    process = launch(
        *(program, "--ps", "0", "--workers", "1"),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    process.wait_for("ready")
    process.send_signal(signal.SIGHUP)
    status, out, _ = finish(process)
    assert (status, out) == (0, "[worker 0] ready\n[worker 0] done\n")


def test_isolated_tasks_have_the_loopback_interface_only():
    program = """
    names = [name for _, name in socket.if_nameindex()]
    server = socket.create_server(("", 0))
    socket.create_connection(("localhost", server.getsockname()[1]), 5)
    print(names, os.getuid())
    """
    status, out, err = finish(launch(program, "--ps", "0", "--isolate"))
    if "does not allow a network namespace" in err:
        assert status == 2
        pytest.skip("no network namespaces here")
    assert status == 0
    assert f"[worker 0] ['lo'] {os.getuid()}" in out


def test_isolation_that_the_system_refuses_is_reported(monkeypatch, capsys):
    class Refusing:
        def unshare(self, flags):
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Refusing())
    assert main(["--isolate", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert "does not allow a network namespace (Operation not permitted)" in said
    assert "run without --isolate behind a firewall" in said


def test_ports_are_different_and_held_for_the_servers_to_come():
    held = hold_free_ports(5)
    assert len(held) == 5
    for port, one in held.items():
        with one, socket.socket() as other:
            with pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            with pytest.raises(ConnectionRefusedError):
                other.connect(("127.0.0.1", port))
            for host, family in LOOPBACKS.items():
                with socket.create_server((host, port), family=family):
                    pass
    with pytest.raises(RuntimeError, match=r"found \d+ of 100000 free ports"):
        hold_free_ports(100_000)


@pytest.mark.parametrize("host", ["", *LOOPBACKS])
def test_no_port_is_drawn_that_another_has(monkeypatch, host):
    [(port, held)] = hold_free_ports(1).items()
    monkeypatch.setattr(_network_exposure, "_LOWEST_PORT", port)
    monkeypatch.setattr(_network_exposure, "_first_ephemeral", lambda: port + 1)
    if host:
        held.close()
        held = socket.create_server((host, port), family=LOOPBACKS[host])
    with held, pytest.raises(RuntimeError, match="found 0 of 1 free ports"):
        hold_free_ports(1)
    assert [*hold_free_ports(1)] == [port]


def test_seeds_do_not_change_what_is_drawn_nor_draws_what_follows():
    random.seed(7)
    state = random.getstate()
    assert find_free_ports(3) != find_free_ports(3)
    assert random.getstate() == state


def test_a_server_on_all_interfaces_is_noticed(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    for host, exposed in [("", True), ("127.0.0.1", False)]:
        with socket.create_server((host, 0)) as server:
            assert is_exposed(server.getsockname()[1]) is exposed
    with socket.create_server(("", 0), family=socket.AF_INET6) as server:
        assert is_exposed(server.getsockname()[1])
        with pytest.warns(ExposedServerWarning, match="firewall"):
            warn_if_exposed(server.getsockname()[1])
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo")])
    with socket.create_server(("", 0)) as server:
        assert not is_exposed(server.getsockname()[1])


def test_an_interface_that_is_down_lets_nobody_in(monkeypatch):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "tunl0")])
    with socket.create_server(("", 0)) as server:
        for flags in (0x80, 0x81):  # 1: up
            told = struct.pack("16sh14x", b"tunl0", flags)
            monkeypatch.setattr(
                _network_exposure.fcntl, "ioctl", lambda *_, told=told: told
            )
            assert is_exposed(server.getsockname()[1]) is bool(flags & 1)


def test_what_the_system_does_not_show_is_called_unknown_once(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with pytest.warns(ExposedServerWarning, match="is unknown.*tcp'"):
        assert is_exposed(80, proc=tmp_path) is False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for port in (80, 81):
            warn_if_exposed(port, proc=tmp_path)
    (warning,) = caught
    assert "is unknown here: [Errno 2]" in str(warning.message)
    assert "tw-launch --isolate" in str(warning.message)


def test_a_system_without_ipv6_shows_what_there_is(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    (tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st\n"
        "   0: 00000000:0050 00000000:0000 0A\n"
        "   1: 0100007F:0051 00000000:0000 0A\n"
    )
    assert is_exposed(80, proc=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_exposed(81, proc=tmp_path)


def test_starting_servers_warns_once_that_they_are_open(monkeypatch):
    import tw_launch

    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        line = inspect.currentframe().f_lineno + 1
        tw_launch.start_local(ps=1, workers=1)
    (warning,) = [w for w in caught if w.category is ExposedServerWarning]
    assert "tw-launch --isolate" in str(warning.message)
    assert (warning.filename, warning.lineno) == (__file__, line)


def test_the_chief_warns_for_all_servers(monkeypatch):
    import tw_launch
    from tw_launch import _servers

    monkeypatch.setattr(_network_exposure, "_find_exposure", lambda *_: True)
    monkeypatch.setattr(_servers, "_start", lambda *_, **options: None)
    cluster = {"ps": ("a:1",), "worker": ("a:2", "b:3")}
    told = {}
    for job, addresses in cluster.items():
        for index in range(len(addresses)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                tw_launch.start_server(tw_launch.TaskConfig(cluster, job, index))
            told[job, index] = [w.category for w in caught]
    assert told == {
        ("ps", 0): [],
        ("worker", 0): [ExposedServerWarning],
        ("worker", 1): [],
    }


def test_a_tensorflow_server_is_open_whatever_host_it_was_given():
    from harness.replica_threads import local_cluster

    names = [name for _, name in socket.if_nameindex()]
    if not any(map(_network_exposure._leads_outside, names)):
        pytest.skip("no other interface is up here")
    port = int(local_cluster().addresses["ps"][0].rpartition(":")[2])
    assert is_exposed(port)
