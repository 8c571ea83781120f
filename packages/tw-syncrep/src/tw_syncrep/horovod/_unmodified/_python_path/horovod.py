"""Horovod's package, of which ``tw_syncrep.horovod`` has the modules.

It is on the path of ``tw-launch --horovod`` and ``python -m tw_syncrep.horovod``.
"""

from typing import NoReturn

from tw_syncrep.horovod._unmodified import aliases

__version__ = aliases.VERSION
__path__: list[str] = []
aliases.install()


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(aliases.explain(f"{__name__}.{name}"))
