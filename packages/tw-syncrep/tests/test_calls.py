"""How many gRPC calls a step has, counted on the wire, and that they are counted."""

import os
import socket
import threading

import pytest
from harness.calls import PREFACE, CallCounter, CallReader, FieldReader
from hypothesis import given
from hypothesis import strategies as st

PATH = "/tensorflow.WorkerService/RunGraph"


def test_paths_of_the_examples_in_the_rfc_are_read():
    # RFC 7541, C.2.2 and C.3: three requests of one connection.
    assert FieldReader().path_of(bytes.fromhex("040c2f73616d706c652f70617468")) == (
        "/sample/path"
    )
    fields = FieldReader()
    requests = {
        "828684410f7777772e6578616d706c652e636f6d": "/",
        "828684be58086e6f2d6361636865": "/",
        "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565": "/index.html",
    }
    for block, path in requests.items():
        assert fields.path_of(bytes.fromhex(block)) == path
    # And what the last of them has written, by its number, is no path.
    assert fields.path_of(b"\xbe") == "?"


def literal(path, name=b"\x44"):
    """A field that is kept: ``:path`` by its number, and a value."""
    return name + bytes([len(path)]) + path.encode()


def frame(kind, flags, stream, payload):
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
    return head + stream.to_bytes(4, "big") + payload


KEPT = b"\xbe"  # the newest field that was kept
CALLS = [
    (frame(1, 0x4, 1, literal(PATH)), PATH),
    (frame(0, 0x1, 1, bytes(70)), None),  # data
    (frame(1, 0x5, 1, b"\x86"), None),  # trailers
    (frame(1, 0x4, 3, KEPT), PATH),
    (frame(8, 0, 0, bytes(4)), None),  # more room for answers
    (frame(1, 0x2C, 5, b"\x02" + bytes(5) + KEPT + bytes(2)), PATH),  # padded
    (frame(1, 0x0, 7, KEPT[:0]) + frame(9, 0x4, 7, KEPT), PATH),  # in two parts
    (frame(1, 0x4, 9, literal("/b/RecvTensor", b"\x40\x05:path")), "/b/RecvTensor"),
    (frame(1, 0x4, 11, b"\x3f\x01\xbf"), PATH),  # behind a new size of the table
]
SENT = PREFACE + b"".join(sent for sent, _ in CALLS)
WANT = [path for _, path in CALLS if path]


@given(cuts=st.lists(st.integers(0, len(SENT)), max_size=8).map(sorted))
def test_calls_are_found_however_the_bytes_are_cut(cuts):
    found = []
    reader = CallReader(found.append)
    for begin, end in zip([0, *cuts], [*cuts, len(SENT)], strict=True):
        reader.feed(SENT[begin:end])
    assert found == WANT


@pytest.fixture
def counter():
    counter = CallCounter()
    yield counter
    counter.close()


def test_a_proxy_changes_nothing_and_counts_calls_and_bytes(counter):
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=echo, args=(server,), daemon=True).start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        port = int(counter.between("a", "b", address).rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), 10) as client:
            client.sendall(SENT)
            client.shutdown(socket.SHUT_WR)
            with client.makefile("rb") as answer:
                assert answer.read() == SENT
    assert counter.settled() == {("a", "b", "RunGraph"): 5, ("a", "b", "RecvTensor"): 1}
    assert counter.bytes() == {("a", "b"): len(SENT), ("b", "a"): len(SENT)}


def echo(server):
    peer, _ = server.accept()
    with peer:
        while data := peer.recv(100):
            peer.sendall(data)


def test_a_task_that_is_not_there_closes_the_connection(counter):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    port = int(counter.between("a", "b", address).rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 10) as client:
        assert client.recv(1) == b""


@pytest.fixture(scope="module")
def counted(processes):
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from syncrep_counted import CountedCluster

    counted = CountedCluster(processes, ps=2, workers=4)
    yield counted
    counted.close()


@pytest.mark.full("2-1-True-3", "2-2-False-3")
@pytest.mark.parametrize(
    "workers, servers, is_pulled, variables",
    [(2, 1, True, 3), (4, 2, True, 2), (2, 2, False, 3), (4, 1, False, 2)],
)
def test_a_step_has_the_calls_of_the_formula(
    counted, workers, servers, is_pulled, variables
):
    from syncrep_counted import (
        CountedRun,
        Work,
        expected_at_table,
        expected_calls,
    )

    work = Work(workers, servers, variables, is_pulled)
    run = CountedRun(counted, work)
    calls = run.calls_of_a_step(6)
    run.close()
    by_method = {}
    for (_, _, method), count in calls.items():
        by_method[method] = by_method.get(method, 0) + count
    assert by_method == expected_calls(work)
    at_table = [count for key, count in calls.items() if run.table_server in key]
    assert sum(at_table) == expected_at_table(work)
