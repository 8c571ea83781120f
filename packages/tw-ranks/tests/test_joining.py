"""Joining a group: who comes, who is refused, what a rank knows then."""

import errno
import inspect
import json
import socket
import time
import warnings

import pytest
import tensorflow as tf
from harness.ports import find_free_ports
from harness.rank_faults import run_drill
from harness.ranks import Raised

import tw_ranks
from tw_launch import ExposedServerWarning
from tw_ranks import _tf_compat
from tw_ranks._engines.choice import EngineFacts
from tw_ranks._joining import joining
from tw_ranks._joining.seats import Seat
from tw_ranks._side_channel._member import AbsentError


@pytest.mark.slow
def test_ranks_know_their_numbers(make_ranks):
    ranks = make_ranks(3).joined()
    for rank, told in enumerate(ranks.call("place")):
        assert told == {
            "rank": rank,
            "size": 3,
            "local_rank": rank,
            "local_size": 3,
            "node_rank": 0,
            "num_nodes": 1,
        }
    for text in ranks.call("join_again"):
        assert text.startswith("join: this process has already joined a group")
    ranks.call("leave")


def test_a_launcher_tells_the_ranks(make_ranks):
    [port] = find_free_ports(1)
    by_rank = {
        rank: {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        for rank in range(2)
    }
    ranks = make_ranks(2, alone=True, environment=by_rank).joined()
    assert [told["rank"] for told in ranks.call("place")] == [0, 1]
    assert ranks.call("step_until", 2) == [4, 4]


def test_a_name_that_is_local_to_rank_0_is_refused_on_several_machines():
    seat = Seat(0, 2, ("node1", 1), "node1", None, spans_machines=True)
    says = r"node1 resolves to 127\.0\.0\.1 here, .* set TW_LISTEN"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(ValueError, match=says):
            joining._check_reachable(seat, listener)
        assert listener.fileno() < 0
    with socket.create_server(("", 0)) as listener:
        assert joining._check_reachable(seat, listener) == ""


@pytest.mark.parametrize(
    ("host", "told", "is_said"),
    [
        ("node1", "", True),
        ("node1", "127.0.0.1", False),  # Somebody forwards connections there.
        ("localhost", "", False),
        ("127.0.1.1", "", False),
    ],
)
def test_a_name_that_is_local_is_said_where_it_is_unknown_if_there_are_other_machines(
    monkeypatch, caplog, host, told, is_said
):
    monkeypatch.setenv("TW_LISTEN", told)
    seat = Seat(0, 2, (host, 1), host, None)
    with socket.create_server(("127.0.1.1", 0)) as listener:
        fault = joining._check_reachable(seat, listener)
    says = (
        f"{host} resolves to 127.0.1.1 here, where other machines cannot reach rank 0"
    )
    assert bool(fault) == (says in fault) == is_said
    assert (f"only ranks on this machine can join: {says}" in caplog.text) == is_said
    if is_said:
        absent = AbsentError("rank 1 did not join within 2 s", (1,))
        late = joining._as_start_error(absent, seat, 2.0, fault)
        assert f"rank 1 did not join within 2 s: {says}" in str(late)


def test_ranks_whose_place_only_mpi_knows_are_refused_over_another_engine(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setattr(joining, "_has_mpi4py", lambda: True)
    says = "an MPI launcher has started 4 processes, and only MPI can tell them where"
    with pytest.raises(ValueError, match=says):
        tw_ranks.join(engine="tensorflow")
    monkeypatch.setattr(joining, "_has_mpi4py", lambda: False)
    with pytest.raises(ValueError, match="pip install"):
        tw_ranks.join()


@pytest.mark.slow
def test_who_does_not_come_is_named(make_ranks):
    ranks = make_ranks(4, start_timeout_s=2.0, absent=[1, 3])
    for rank in ranks.all:
        with pytest.raises(Raised) as raised:
            rank.hear()
        assert raised.value.kind == "StartTimeoutError"
        assert "ranks 1, 3 did not join within 2 s" in raised.value.text
        assert raised.value.missing == [1, 3]
        assert "arrived   rank 0, rank 2\n" in raised.value.report
        assert "missing   rank 3: has not joined" in raised.value.report


def test_rank_0_that_does_not_come_is_named(make_ranks):
    ranks = make_ranks(2, start_timeout_s=1.0, absent=[0])
    with pytest.raises(Raised, match=r"rank 0 does not answer at 127.0.0.1") as raised:
        ranks.all[0].hear(20)
    assert raised.value.kind == "StartTimeoutError"


def test_a_port_in_use_is_reported_once(caplog):
    def open_port():
        raise OSError(errno.EADDRINUSE, "Address already in use")

    seat = Seat(0, 2, ("localhost", 1234), "localhost", None)
    with pytest.raises(AbsentError, match=r"in use; end the program that listens"):
        joining._open_port(open_port, seat, 1234, time.monotonic() + 0.6)
    assert caplog.messages == [
        "join waits for up to 1 s: rank 0 cannot listen at localhost:1234 (Address "
        "already in use)."
    ]


def test_a_started_runtime_is_refused(make_ranks):
    ranks = make_ranks(2, start_timeout_s=5.0, starts_early=[1])
    with pytest.raises(Raised, match=r"TensorFlow's runtime has already started"):
        ranks.all[1].hear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "changes"), [("function", True), ("session", True), ("eager", False)]
)
def test_the_runtime_starts_with_its_first_op(make_ranks, mode, changes):
    ranks = make_ranks(2, timeout_s=2.0, towers=1 if changes else 2).joined()
    calls = [(mode, changes, 3.0 * rank) for rank in range(2)]
    for rank, got in enumerate(ranks.call_each("set_up", calls)):
        place = f"/job:worker/replica:0/task:{rank}/device:CPU:"
        assert got == {"total": [2.0, 2.0], "devices": [place + "0", place + "1"]}
    if mode == "session":
        assert ranks.call("sum_in_the_global_graph") == [[2.0, 4.0]] * 2


def test_a_child_forked_before_the_first_op_takes_no_rank(make_ranks):
    ranks = make_ranks(2).joined()
    for device in ranks.call("place_in_child"):
        assert device == "/job:localhost/replica:0/task:0/device:CPU:0"
    assert ranks.call("step_until", 2) == [4, 4]


@pytest.mark.slow
def test_strangers_are_not_noticed_while_all_train(processes):
    assert not run_drill(processes, "processes: rank 0 strangers, function").failure


@pytest.mark.slow
def test_ports_that_are_still_taken_are_waited_for(make_ranks):
    """Those of a group that was killed, where others listen for a while."""
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(2)]
    former = make_ranks(2, tf_config={"worker": addresses}).joined()
    assert former.call("step_until", 2) == [4, 4]
    former.end()
    ports = [int(address.rpartition(":")[2]) for address in addresses]
    held = [socket.create_server(("", port)) for port in ports]
    ranks = make_ranks(2, tf_config={"worker": addresses}, start_timeout_s=40.0)
    for rank in ranks.all:
        assert not rank.pipe.poll(1), rank.hear()
    for listener in held:
        listener.close()
    ranks.joined()
    assert ranks.call("step_until", 2) == [4, 4]


@pytest.mark.slow
def test_a_port_that_stays_taken_is_named(make_ranks):
    addresses = [f"127.0.0.1:{port}" for port in find_free_ports(2)]
    ranks = make_ranks(
        2, absent=[0], start_timeout_s=2.0, tf_config={"worker": addresses}
    )
    port = int(addresses[1].rpartition(":")[2])
    with socket.create_server(("", port)), pytest.raises(Raised) as raised:
        ranks.all[0].hear()
    assert raised.value.kind == "StartTimeoutError"
    said = f"join: rank 1 cannot listen at {addresses[1]}: Address already in use; end"
    assert said in raised.value.text


def test_a_server_that_cannot_start_is_named(monkeypatch):
    def fail(*_, **__):
        raise tf.errors.UnknownError(None, None, "Could not start gRPC server")

    monkeypatch.setattr(_tf_compat, "start_runtime", fail)
    with socket.create_server(("", 0)) as held:
        port = held.getsockname()[1]
        says = rf"server of rank 1 cannot start at port {port}: Could not start gRPC "
        with pytest.raises(RuntimeError, match=says):
            joining._start_runtime(1, held)


def test_a_coordinator_elsewhere_is_refused(make_ranks):
    ranks = make_ranks(2, address="192.0.2.1:1234", absent=[1])
    with pytest.raises(Raised) as raised:
        ranks.all[0].hear()
    said = (
        "join: rank 0 cannot listen at 192.0.2.1:1234: 192.0.2.1 is not an address of "
        "this machine; correct the host, or, "
    )
    assert raised.value.kind == "ValueError"
    assert said in raised.value.text


@pytest.mark.slow
def test_names_that_are_not_known_yet_are_waited_for(make_ranks):
    [port] = find_free_ports(1)
    ranks = make_ranks(2, address=f"localhost:{port}", resolves_in_s=1.0).joined()
    assert ranks.call("step_until", 2) == [4, 4]


def test_names_that_stay_unknown_are_named(make_ranks):
    ranks = make_ranks(2, address="rank-0.invalid:1234", start_timeout_s=1.5)
    for rank in ranks.all:
        with pytest.raises(Raised, match=r"rank-0\.invalid:1234.* not known") as raised:
            rank.hear()
        assert raised.value.kind == "StartTimeoutError"


@pytest.mark.parametrize("told_by", ["coordinator", "TF_CONFIG"])
def test_ranks_meet_at_ipv6_addresses(make_ranks, told_by):
    addresses = [f"[::1]:{port}" for port in find_free_ports(2)]
    if told_by == "TF_CONFIG":
        ranks = make_ranks(2, tf_config={"worker": addresses})
    else:
        ranks = make_ranks(2, address=addresses[0])
    assert ranks.joined().call("step_until", 2) == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (
            {"rank": 0, "size": 2},
            ValueError,
            "rank and size need a coordinator",
        ),
        ({"coordinator": "here", "rank": 0, "size": 2}, ValueError, "'host:port'; got"),
        ({"coordinator": "a:1", "rank": 2, "size": 2}, ValueError, "0 to 1; got 2"),
        ({"coordinator": "a:1", "rank": 0}, TypeError, "size"),
        ({"coordinator": 7, "rank": 0, "size": 1}, TypeError, "coordinator"),
        ({"timeout_s": 0}, ValueError, "timeout_s"),
        ({"stall_timeout_s": 0}, ValueError, "stall_timeout_s"),
        ({"key": "secret"}, ValueError, "key must have 22 to 200 .* got 6 characters"),
        ({"key": 7}, TypeError, "key"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        tw_ranks.join(**arguments)


@pytest.mark.parametrize(
    ("listens_at", "key", "is_warned"),
    [("", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "k" * 32, False)],
)
def test_rank_0_warns_of_a_port_without_a_key(
    monkeypatch, caplog, listens_at, key, is_warned
):
    monkeypatch.setenv("TW_LISTEN", listens_at)
    monkeypatch.setattr(joining._tf_compat, "has_started", lambda: False)
    (port,) = find_free_ports(1)
    settings = {"start_timeout_s": 0.3, "engine": "tensorflow", "key": key}
    with pytest.raises(tw_ranks.StartTimeoutError, match="rank 1 did not join"):
        tw_ranks.join(f"127.0.0.1:{port}", rank=0, size=2, **settings)
    says = f"rank 0 listens at {listens_at}:{port} without a key: any program that can"
    assert (says in caplog.text) == is_warned


@pytest.mark.parametrize(("rank", "num_gpus"), [(0, 1), (0, 0), (1, 1)])
def test_rank_0_warns_of_the_worst_layout(monkeypatch, caplog, rank, num_gpus):
    class Group:
        has_left, node_ranks = True, (0, 0, 1, 1)

    facts = EngineFacts(4, num_gpus=num_gpus)
    monkeypatch.setattr(joining, "_find_facts", lambda seat: facts)
    monkeypatch.setattr(joining, "_join_others", lambda *_, **__: Group())
    monkeypatch.setattr(joining, "warn_if_exposed", lambda *_, **__: None)
    tw_ranks.join("127.0.0.1:1", rank=rank, size=4)
    says = "join: 4 ranks with GPUs, 2 of them on one machine, add their gradients"
    assert (says in caplog.text) == (rank == 0 and num_gpus == 1)


def test_parameter_servers_are_refused(monkeypatch):
    config = {
        "cluster": {"ps": ["a:1"], "worker": ["a:2"]},
        "task": {"type": "worker", "index": 0},
    }
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=r"tw-launch -n"):
        tw_ranks.join()


def test_a_process_without_tf_config_is_alone(make_ranks):
    ranks = make_ranks(1, alone=True).joined()
    assert ranks.call("place")[0]["size"] == 1
    assert ranks.call("step_until", 3) == [3]


def test_join_warns_of_its_server_at_the_line_of_the_users_program(monkeypatch):
    class Group:
        has_left, node_ranks = True, (0, 0)

    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    monkeypatch.setattr(joining, "_join_others", lambda *_, **__: Group())
    place = {"size": 2, "engine": "tensorflow"}
    with pytest.warns(ExposedServerWarning, match="tw-launch --isolate") as caught:
        line = inspect.currentframe().f_lineno + 1
        tw_ranks.join("127.0.0.1:1", rank=0, **place)
    assert [(w.filename, w.lineno) for w in caught] == [(__file__, line)]
    with warnings.catch_warnings(action="error"):
        tw_ranks.join("127.0.0.1:1", rank=1, **place)
