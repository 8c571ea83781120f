"""The line channel, and the decoder of what strangers send."""

import contextlib
import json
import socket
import threading
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tw_launch._channel import LineSocket, parse_line, read_as
from tw_launch._launcher.messages import MAX_BYTES, Hello, encode
from tw_ranks._agreement import Exchange, TensorSpec
from tw_ranks._side_channel._attendance import Report
from tw_ranks._side_channel._introduction import Introduction


@dataclass(frozen=True)
class Every:
    """A field of each kind."""

    flag: bool
    share: float
    pair: tuple[str, int]
    by_name: dict[str, int]
    maybe: tuple[int | None, ...] | None


INT = st.integers(-(1 << 63), (1 << 63) - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
KINDS = {
    Every: st.builds(
        Every,
        st.booleans(),
        FINITE,
        st.tuples(st.text(), INT),
        st.dictionaries(st.text(), INT, max_size=3),
        st.none() | st.lists(st.none() | INT, max_size=3).map(tuple),
    ),
    Report: st.builds(Report, INT, INT, INT, st.text()),
    Introduction: st.builds(
        Introduction,
        *(INT, INT, st.text(), st.text(), st.text()),
        st.dictionaries(st.text(), st.text(), max_size=2),
        *(st.text(), INT),
    ),
    Exchange: st.builds(
        Exchange,
        st.text(),
        st.lists(
            st.builds(
                *(TensorSpec, st.text(), st.text()),
                st.none() | st.lists(st.none() | INT, max_size=3).map(tuple),
            )
        ).map(tuple),
    ),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_what_was_written_is_read(kind, data):
    value = data.draw(KINDS[kind])
    assert read_as(kind, parse_line(json.dumps(asdict(value)).encode())) == value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_field_of_another_type_is_refused_and_nothing_else_happens(kind, data):
    fields = json.loads(json.dumps(asdict(data.draw(KINDS[kind]))))
    name = data.draw(st.sampled_from([*fields, "more"]))
    fields[name] = data.draw(JSON)
    try:
        assert isinstance(read_as(kind, fields), kind)
    except ValueError as error:
        assert str(error).startswith("expected ")


@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_parsed_or_refused(line):
    try:
        parse_line(line)
    except ValueError as error:
        assert str(error) == f"expected a message, got {line[:60]!r}"


@pytest.mark.parametrize(
    "line",
    [
        b"NaN",
        b"[-Infinity]",
        b'{"a": 1e999}',
        b"9" * 5_000,
        b"[" * 200_000,
        b"",
        b"\xff",
    ],
)
def test_what_json_does_not_hold_is_refused(line):
    with pytest.raises(ValueError, match=r"^expected a message, got b'"):
        parse_line(line)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 63) - 1, True, 1.0, "1", None])
def test_what_is_no_whole_number_of_64_bits_is_refused(number):
    with pytest.raises(ValueError, match="expected int, got "):
        read_as(int, number)


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname(), 10)
        theirs = server.accept()[0]
    with ours, theirs:
        yield ours, theirs


def test_lines_arrive_whole_however_they_are_cut(ends):
    ours, line = ends[0], LineSocket(ends[1])
    messages = [{"do": "a", "n": n} for n in range(4)]
    data = b"".join(json.dumps(message).encode() + b"\n" for message in messages)
    heard = []
    for cut in (1, 3, 7, 20):
        for begin in range(0, len(data), cut):
            ours.sendall(data[begin : begin + cut])
            heard += line.receive()
    ours.close()
    while (more := line.receive()) is not None:
        heard += more
    assert heard == messages * 4


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_refused_before_it_ends(ends, end):
    line = LineSocket(ends[1], max_bytes=1_000)
    ends[0].sendall(b"x" * 1_001 + end)
    with pytest.raises(ValueError, match="a received line is longer than 1000 bytes"):
        for _ in range(100):
            line.receive_lines()


@pytest.mark.slow
def test_reading_keeps_pythons_lock_while_another_thread_computes(ends):
    """A socket's own method gives it up, though it does not wait."""
    line, computed, meanwhile = LineSocket(ends[1]), 0, [0, 0]

    def read_as_often(read, which):
        before = computed
        for _ in range(1_000):
            read()
        meanwhile[which] += computed - before

    def give_up_lock():
        with contextlib.suppress(BlockingIOError):
            line.connection.recv(1)

    for which, read in enumerate((line.receive_lines, give_up_lock) * 10):
        thread = threading.Thread(target=read_as_often, args=(read, which % 2))
        thread.start()
        while thread.is_alive():
            computed += 1
    assert meanwhile[0] < meanwhile[1] / 2


def test_a_closed_socket_is_an_os_error(ends):
    line = LineSocket(ends[1])
    line.close()
    with pytest.raises(OSError, match="the connection is closed"):
        line.send({"do": "beat"}, timeout_s=1.0)


def test_a_machine_of_thousands_of_tasks_says_hello_in_one_line():
    hello = Hello(1, "host.example.org", 20_000, (65_535,) * 20_000, {})
    assert len(encode(hello)) < MAX_BYTES
