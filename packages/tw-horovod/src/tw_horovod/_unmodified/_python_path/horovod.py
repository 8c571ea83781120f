"""Horovod's package, of which ``tw_horovod`` has the modules.

It is on the path of ``tw-launch --horovod`` and ``python -m tw_horovod``.
"""

from typing import NoReturn

from tw_horovod._unmodified import aliases

__version__ = aliases.VERSION
__path__: list[str] = []
aliases.install()


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(aliases.explain(f"{__name__}.{name}"))
