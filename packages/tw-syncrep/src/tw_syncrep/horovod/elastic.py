"""Horovod's elastic module, which is refused by name.

Nothing of it is here; ``tw_syncrep.SyncReplicasOptimizer(elastic=True)`` trains with
replicas that come and go.
"""

from typing import NoReturn


class _Refused(NotImplementedError, AttributeError):
    """Says why, and is "there is none" for those who only look."""


def __getattr__(name: str) -> NoReturn:
    raise _Refused(
        f"elastic.{name}: not supported by tw_syncrep.horovod: the ranks of a run stay "
        "the same; restart it from a checkpoint, or use "
        "tw_syncrep.SyncReplicasOptimizer(elastic=True)."
    )
