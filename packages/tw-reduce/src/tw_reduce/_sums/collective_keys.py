"""Keys by which the devices of one collective reduction find each other.

A key that was used must not come again for another reduction, in this graph or
any later one of the process: TensorFlow remembers its shape. Nothing but the
caller knows what belongs together, so the caller owns the object that counts.
"""

import random
from collections.abc import Sequence
from threading import Lock

import tw_core
from tw_core.checks import check_whole_number
from tw_reduce._devices import check_device_strings

# TensorFlow's own strategies count upwards from 1.
_LOWEST = 1 << 20
_HIGHEST = 1 << 30


class CollectiveKeys:
    """Gives out keys, each once; one object serves any number of reducers.

    Args:
      start: the first key. None draws one at random, so that objects which do
        not know of each other keep apart; processes that build one graph
        together must give the same number.

    Raises:
      TypeError: ``start`` is no whole number.
      ValueError: ``start`` is not between 1 and 2**30.
    """

    def __init__(self, start: int | None = None) -> None:
        if start is None:
            start = random.SystemRandom().randrange(_LOWEST, _HIGHEST)
        check_whole_number("CollectiveKeys", start=start)
        if not 1 <= start <= _HIGHEST:
            raise ValueError(
                f"CollectiveKeys: start must be between 1 and 2**30; got {start}. "
                "Leave it out to have one drawn."
            )
        self._next = start
        self._groups: dict[tuple[str, ...], int] = {}
        self._lock = Lock()

    def instance(self) -> int:
        """Gives the key of one new reduction."""
        with self._lock:
            return self._take()

    def group(self, devices: Sequence[str]) -> int:
        """Gives the key of a set of devices; the same for the same devices.

        Args:
          devices: in any spelling and order.

        Raises:
          TypeError: no list of strings.
          ValueError: no device.
        """
        check_device_strings(devices, caller="CollectiveKeys.group")
        members = tuple(sorted(tw_core.canonical_device(d) for d in devices))
        with self._lock:
            if members not in self._groups:
                self._groups[members] = self._take()
            return self._groups[members]

    def _take(self) -> int:
        self._next += 1
        return self._next - 1


def check_keys(keys: CollectiveKeys, *, caller: str) -> None:
    """Refuses what gives out no keys."""
    if not isinstance(keys, CollectiveKeys):
        raise TypeError(
            f"{caller}: keys must be a CollectiveKeys; got {keys!r}. Make one "
            "CollectiveKeys() for all reducers of the process."
        )
