"""Horovod's package, of which ``tw_syncrep.horovod`` has the modules.

It is on the path of ``tw-launch --horovod`` and ``python -m tw_syncrep.horovod``.
"""

from typing import NoReturn

from tw_syncrep.horovod import _aliases

__version__ = _aliases.VERSION
__path__: list[str] = []
_aliases.install()


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(_aliases.explain(f"{__name__}.{name}"))
