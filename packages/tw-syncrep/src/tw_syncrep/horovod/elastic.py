"""Horovod's elastic module, which is refused by name.

Nothing of it is here; ``tw_syncrep.SyncReplicasOptimizer(elastic=True)`` trains with
replicas that come and go.
"""

from typing import NoReturn


def __getattr__(name: str) -> NoReturn:
    if name.startswith("__"):
        raise AttributeError(name)
    raise NotImplementedError(
        f"elastic.{name}: not supported by tw_syncrep.horovod: the ranks of a run stay "
        "the same; restart it from a checkpoint, or use "
        "tw_syncrep.SyncReplicasOptimizer(elastic=True)."
    )
