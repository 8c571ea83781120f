"""The key of a run: 128 bits that its processes share, and proofs of having them.

    client                                server (``_reception``)
    ------                                ------
                   <- challenge (B) ---   draws B
    draws A        -- prove (A, p) ---->  p = HMAC(key, "client", door, A, B)?
    q as expected? <- proved (q) -------  q = HMAC(key, "server", door, A, B)

No proof fits another connection, another door or the other direction. Messages that
follow are neither signed nor encrypted.
"""

import hmac
import os
import secrets
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tw_launch._channel import LineSocket, read_as, write_printable

KEY_VARIABLE = "TW_KEY"
"""The environment variable with the key: other users cannot read it, as arguments."""

_FEWEST, _MOST = 22, 200  # Characters; 22 hold 128 bits in base64.
_MAKE_ONE = "make one with `openssl rand -hex 16`"


class KeyMismatchError(ValueError):
    """The two ends of a connection do not have the same key."""


def draw_key() -> str:
    """Draws 128 bits."""
    return secrets.token_hex(16)


def derive_key(shared: str, run: str) -> str:
    """Returns the key of one run of those that share one."""
    return sign(shared, "run", run)[:32]


def find_key(environment: Mapping[str, str] = os.environ) -> str:
    """Returns the key in ``TW_KEY``, or ""."""
    key = environment.get(KEY_VARIABLE, "")
    return key and check_key(key, KEY_VARIABLE)


def check_key(key: str, name: str) -> str:
    """Refuses what could be guessed, or does not fit into a variable."""
    is_plain = key.isascii() and key.isprintable() and " " not in key
    if not is_plain or not _FEWEST <= len(key) <= _MOST:
        raise ValueError(  # Not the key itself, which must not get into a log.
            f"{name} must have {_FEWEST} to {_MOST} printable ASCII characters and no "
            f"spaces; got {len(key)} characters. To get a key, {_MAKE_ONE}."
        )
    return key


def read_key_file(path: Path) -> str:
    """Reads a key from a file that nobody else can read."""
    with path.open() as file:
        found = os.fstat(file.fileno())
        others = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if others or found.st_uid not in (os.geteuid(), 0):
            raise ValueError(
                f"--key-file {path}: only its owner, this user, may have access to it; "
                f"run `chmod 600 {path}`, as it has mode {found.st_mode & 0o777:03o} "
                f"and user {found.st_uid}"
            )
        return check_key(file.read(_MOST + 2).strip(), f"--key-file {path}")


def sign(key: str, *texts: str) -> str:
    """Returns the HMAC-SHA256 of texts without newlines."""
    return hmac.new(key.encode(), "\n".join(texts).encode(), "sha256").hexdigest()


def is_same(proof: str, wanted: str) -> bool:
    """Compares in a time that does not depend on where they differ."""
    return hmac.compare_digest(proof.encode(), wanted.encode())


def prove(line: LineSocket, key: str, door: str, *, timeout_s: float) -> None:
    """Proves to the program that listens to have the key, and has it prove the same.

    Raises ``KeyMismatchError``; ``ValueError`` if that program has no such door;
    ``OSError`` if it does not answer in time.
    """
    end_s = time.monotonic() + timeout_s
    challenge = _hear(line, "challenge", end_s)
    theirs = read_as(str, challenge.get("nonce"))
    if challenge.get("door") != door or "\n" in theirs:
        raise ValueError(f"it has no door for {door}")
    if key and not challenge.get("has_key"):
        raise KeyMismatchError(
            f"this process has a key, and {door} has none; give {door} the same "
            f"{KEY_VARIABLE}, or unset it here"
        )
    if challenge.get("has_key") and not key:
        raise KeyMismatchError(
            f"{door} has a key, and this process has none; give it the same "
            f"{KEY_VARIABLE} as {door}"
        )
    own = secrets.token_hex(16)
    proof = sign(key, "client", door, own, theirs)
    left_s = max(0.1, end_s - time.monotonic())
    line.send({"do": "prove", "nonce": own, "proof": proof}, timeout_s=left_s)
    answer = _hear(line, "proved", end_s)
    wanted = sign(key, "server", door, own, theirs)
    if not is_same(read_as(str, answer.get("proof")), wanted):
        raise KeyMismatchError(
            f"the program that answers does not have the key of this run's {door}, "
            "and may be a stranger's; end it, or choose another port"
        )


def _hear(line: LineSocket, what: str, end_s: float) -> dict[str, Any]:
    """Waits for one message of a kind."""
    while True:
        if not line.wait(end_s - time.monotonic()):
            raise TimeoutError("it sent nothing")
        messages = line.receive()
        if messages is None:
            raise ConnectionError("it closed the connection")
        for message in messages:
            if message["do"] == "refused":
                # It has proved nothing, and this may be shown on a terminal.
                raise KeyMismatchError(
                    write_printable(read_as(str, message.get("why")))
                )
            if message["do"] != what or len(messages) > 1:
                raise ValueError(f"expected a {what}, got {message!r:.60}")
            return message
