"""Long messages of rank 0, packed: what goes to all of N ranks is of N ranks.

The addresses of 1,000 ranks, or where each of them was when one was lost, take 100 to
400 KB as JSON, which 1,000 ranks receive at once. Most words in them are the same.
"""

import base64
import zlib
from typing import Any

from tw_launch.internal import MAX_BYTES, parse_messages, read_as, write_line

_SHORT_BYTES = 2_000


def write_packed(message: dict[str, Any]) -> bytes:
    """Writes a message as a line, packed if it is long."""
    line = write_line(message)
    if len(line) <= _SHORT_BYTES:
        return line
    packed = base64.b64encode(zlib.compress(line)).decode()
    return write_line({"do": "packed", "message": packed})


def unpack(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the message in a packed one, or itself; raises ValueError."""
    if message["do"] != "packed":
        return message
    data = base64.b64decode(read_as(str, message.get("message")), validate=True)
    try:
        unpacked = zlib.decompressobj().decompress(data, MAX_BYTES)
    except zlib.error as error:
        raise ValueError(f"expected a packed message, got {error}") from None
    [found] = parse_messages([unpacked])
    return found
