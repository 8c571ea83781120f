"""The older system's mode names, each mapped to a reducer once, at the edge.

Source: tensorpack 0.11, ``SyncMultiGPUReplicatedBuilder``.
"""

from collections.abc import Callable, Sequence
from functools import partial

from tw_reduce._checks import check_devices
from tw_reduce._combinators.packed import packed
from tw_reduce._reducer import Reducer
from tw_reduce._sums.collectives import (
    check_one_gpu_per_tower,
    sum_collective,
    sum_nccl,
)
from tw_reduce._sums.hierarchical import EIGHT_GPU_CROSS, hierarchical
from tw_reduce._sums.one_device import sum_balanced, sum_on_device
from tw_reduce._sums.rendezvous import CollectiveKeys, check_keys


def reducer_for_mode(
    mode: str, devices: Sequence[str], *, keys: CollectiveKeys | None = None
) -> Reducer:
    """Returns the reducer that an older mode name stands for.

    Args:
      mode: ``"cpu"`` adds on the first CPU; ``"gpu"`` on the towers' devices,
        the bytes spread evenly; ``"hierarchical"`` in two groups of four;
        ``"nccl"`` and ``"collective"`` by those libraries.
      devices: [K] the towers' devices, tower 0 first.
      keys: the caller's collective keys; None makes an object for this reducer.

    Returns:
      A reducer of sums, not means.

    Raises:
      TypeError: ``keys`` are not a CollectiveKeys.
      ValueError: an unknown mode (the known ones are listed), no device,
        ``"hierarchical"`` with other than eight devices, ``"nccl"`` without a
        GPU for each of several towers.
    """
    if keys is not None:
        check_keys(keys, caller="reducer_for_mode")
    makers: dict[str, Callable[[Sequence[str], CollectiveKeys], Reducer]] = {
        "collective": lambda own, keys: partial(sum_collective, devices=own, keys=keys),
        "cpu": lambda own, keys: partial(sum_on_device, device="/cpu:0"),
        "gpu": lambda own, keys: partial(sum_balanced, devices=own),
        "hierarchical": lambda own, keys: _in_two_groups(own),
        "nccl": _by_nccl,
    }
    if mode not in list(makers):
        raise ValueError(
            f"reducer_for_mode: unknown mode {mode!r}; known are {sorted(makers)}. "
            "Or pass a reducer, such as auto(devices)."
        )
    check_devices(devices, caller=f"reducer_for_mode: mode {mode!r}")
    return makers[mode](tuple(devices), keys or CollectiveKeys())


def _in_two_groups(devices: Sequence[str]) -> Reducer:
    if len(devices) != 8:
        raise ValueError(
            "reducer_for_mode: mode 'hierarchical' means eight towers; got "
            f"{len(devices)}. For other numbers pass hierarchical(groups), e.g. "
            "hierarchical([[0, 1], [2, 3]])."
        )
    return packed(hierarchical(EIGHT_GPU_CROSS, devices=devices))


def _by_nccl(devices: Sequence[str], keys: CollectiveKeys) -> Reducer:
    if len(devices) > 1:
        check_one_gpu_per_tower(devices, len(devices))
    return partial(sum_nccl, devices=devices, keys=keys)
