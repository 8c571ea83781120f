"""Horovod's elastic module, which is refused by name.

None of it is supported; ``tw_syncrep.SyncReplicasOptimizer(elastic=True)`` trains with
replicas that join and leave.
"""

from typing import NoReturn


class _Refused(NotImplementedError, AttributeError):
    """States why; also an AttributeError, so that ``hasattr`` returns False."""


def __getattr__(name: str) -> NoReturn:
    raise _Refused(
        f"elastic.{name}: not supported by tw_horovod: the ranks of a run stay "
        "the same; restart it from a checkpoint, or use "
        "tw_syncrep.SyncReplicasOptimizer(elastic=True)."
    )
