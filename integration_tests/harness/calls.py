"""Counts the gRPC calls between the tasks of a cluster, on the wire.

A task's messages to another go through a TCP proxy. gRPC speaks HTTP/2: a call is a
HEADERS frame of its client, which opens a stream and names the method. Header fields
are written once and then referred to by number; that much of HPACK (RFC 7541) is read
here.
"""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
UNKNOWN = "?"
_HEADERS, _CONTINUATION = 1, 9
_END_HEADERS, _PADDED, _HAS_PRIORITY = 0x4, 0x8, 0x20
_PATH = b":path"
_PATHS = {4: b"/", 5: b"/index.html"}
_STATIC = 61
"""Numbers up to here stand for fields that nobody has sent; these two for paths."""
_CHUNK = 1 << 16


class FieldReader:
    """Reads header blocks of one connection; knows the fields that were sent before.

    The oldest fields are never forgotten: numbers count from the newest, and a sender
    does not refer to one that it has dropped.
    """

    def __init__(self) -> None:
        self._known: list[tuple[bytes, bytes]] = []

    def path_of(self, block: bytes) -> str:
        """Returns the path that a header block has, or UNKNOWN."""
        path, place = UNKNOWN, 0
        while place < len(block):
            first = block[place]
            if first & 0x80:
                number, place = _read_int(block, place, 7)
                name, value = self._field(number)
            elif first & 0xE0 == 0x20:  # a new size of the table
                _, place = _read_int(block, place, 5)
                continue
            else:
                is_kept = bool(first & 0x40)
                number, place = _read_int(block, place, 6 if is_kept else 4)
                if number:
                    name = self._field(number)[0]
                else:
                    name, place = _read_text(block, place)
                value, place = _read_text(block, place)
                if is_kept:
                    self._known.insert(0, (name, value))
            if name == _PATH:
                path = value.decode("ascii")
        return path

    def _field(self, number: int) -> tuple[bytes, bytes]:
        if number <= _STATIC:
            path = _PATHS.get(number)
            return (b"", b"") if path is None else (_PATH, path)
        return self._known[number - _STATIC - 1]


def _read_int(block: bytes, place: int, bits: int) -> tuple[int, int]:
    limit = (1 << bits) - 1
    value, place, shift = block[place] & limit, place + 1, 0
    if value < limit:
        return value, place
    while True:
        byte, place = block[place], place + 1
        value += (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, place


def _read_text(block: bytes, place: int) -> tuple[bytes, int]:
    """Reads a string; one in Huffman's code, which gRPC does not use, is UNKNOWN."""
    is_coded = bool(block[place] & 0x80)
    size, place = _read_int(block, place, 7)
    text = UNKNOWN.encode() if is_coded else block[place : place + size]
    return text, place + size


class CallReader:
    """Finds the calls in what the client of an HTTP/2 connection sends."""

    def __init__(self, on_call: Callable[[str], object]) -> None:
        """Keeps what takes the path of each call."""
        self._on_call = on_call
        self._fields = FieldReader()
        self._buffer = bytearray()
        self._block = b""
        self._has_begun = False
        self._last_stream = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes, however they are cut."""
        self._buffer += data
        if not self._has_begun:
            if len(self._buffer) < len(PREFACE):
                return
            assert self._buffer.startswith(PREFACE), bytes(self._buffer[:24])
            del self._buffer[: len(PREFACE)]
            self._has_begun = True
        while len(self._buffer) >= 9:
            size = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < 9 + size:
                return
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big") & 0x7FFFFFFF
            payload = bytes(self._buffer[9 : 9 + size])
            del self._buffer[: 9 + size]
            if kind in (_HEADERS, _CONTINUATION):
                self._take_headers(kind, flags, stream, payload)

    def _take_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == _HEADERS:
            padding = payload[0] if flags & _PADDED else 0
            begin = bool(flags & _PADDED) + 5 * bool(flags & _HAS_PRIORITY)
            self._block = payload[begin : len(payload) - padding]
        else:
            self._block += payload
        if flags & _END_HEADERS:
            path = self._fields.path_of(self._block)
            if stream > self._last_stream:  # else a trailer
                self._last_stream = stream
                self._on_call(path)


class CallCounter:
    """Proxies between tasks, in a thread, and what has gone through them."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._open: set[Any] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def between(self, source: str, target: str, address: str) -> str:
        """Opens a proxy; returns the "host:port" where a task reaches another."""
        host, _, port = address.rpartition(":")

        async def serve(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            try:
                theirs = await asyncio.open_connection(host, int(port))
            except OSError:  # the task is not there yet
                writer.close()
                return

            def count_call(path: str) -> None:
                self._calls[source, target, path.rpartition("/")[2]] += 1

            calls = CallReader(count_call)
            own = asyncio.current_task()
            self._open.add(own)  # The loop itself does not keep it.
            try:
                await asyncio.gather(
                    self._pump(reader, theirs[1], (source, target), calls.feed),
                    self._pump(theirs[0], writer, (target, source), None),
                )
            except (OSError, asyncio.CancelledError):  # lost, or by close()
                pass
            finally:
                writer.close()
                theirs[1].close()
                self._open.discard(own)

        async def listen() -> str:
            server = await asyncio.start_server(serve, "127.0.0.1", 0)
            return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"

        return asyncio.run_coroutine_threadsafe(listen(), self._loop).result(10)

    def calls(self) -> Counter[tuple[str, str, str]]:
        """Returns how many calls there were, by source, target and method."""
        return self._ask(lambda: Counter(self._calls))

    def bytes(self) -> Counter[tuple[str, str]]:
        """Returns how many bytes went, by source and target, whoever called."""
        return self._ask(lambda: Counter(self._bytes))

    def settled(
        self, *, quiet_s: float = 0.4, within_s: float = 30
    ) -> Counter[tuple[str, str, str]]:
        """Returns the calls once none has come for a while."""
        until = time.monotonic() + within_s
        before = self.calls()
        while time.monotonic() < until:
            time.sleep(quiet_s)
            now = self.calls()
            if now == before:
                return now
            before = now
        raise TimeoutError(f"calls did not end within {within_s} s")

    def close(self) -> None:
        """Ends the proxies and all connections through them."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            self._loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self._loop)
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._loop.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        ends: tuple[str, str],
        feed: Callable[[bytes], None] | None,
    ) -> None:
        while data := await reader.read(_CHUNK):
            self._bytes[ends] += len(data)
            if feed is not None:
                feed(data)
            writer.write(data)
            await writer.drain()
        writer.write_eof()

    def _ask(self, what: Callable[[], Any]) -> Any:
        async def answer() -> Any:
            return what()

        return asyncio.run_coroutine_threadsafe(answer(), self._loop).result(10)
