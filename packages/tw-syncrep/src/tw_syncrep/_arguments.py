"""Checks of the optimizer's arguments."""

import re
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import tensorflow as tf

from tw_core.internal import check_flag, check_text, check_whole_number
from tw_launch import find_tf_config
from tw_syncrep._checks import check_methods
from tw_syncrep._transfer.payload import SyncOptions
from tw_syncrep._transfer.rows import SPARSE_MEANS

_CLASS = "SyncReplicasOptimizer"
_SCOPE_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_./-]*")


def read_options(
    aggregate: Any,
    total: Any,
    *,
    fuse_below_bytes: int,
    compression: Any,
    sparse_mean: str,
    elastic: bool,
    min_replicas: int,
) -> SyncOptions:
    """Checks the options for transferring and counting gradients."""
    total = aggregate if total is None else total
    counts = {"replicas_to_aggregate": aggregate, "total_num_replicas": total}
    wrong = [
        f"{name}={count!r}"
        for name, count in counts.items()
        if isinstance(count, bool) or not isinstance(count, Integral) or count < 1
    ]
    if wrong:
        raise ValueError(
            f"{_CLASS}: counts must be whole numbers of at least 1; got "
            f"{', '.join(wrong)}."
        )
    check_choice("sparse_mean", sparse_mean, SPARSE_MEANS)
    check_flag(elastic=elastic)
    if check_whole_number(min_replicas=min_replicas, at_least=1) > total:
        raise ValueError(
            f"{_CLASS}: min_replicas={min_replicas} is more than the number of "
            f"replicas ({total})."
        )
    return SyncOptions(
        aggregate=int(aggregate),
        total=int(total),
        below_bytes=check_whole_number(fuse_below_bytes=fuse_below_bytes, at_least=0),
        wire_dtype=_wire_dtype(compression),
        sparse_mean=sparse_mean,
        is_elastic=elastic,
    )


def _wire_dtype(compression: Any) -> tf.DType | None:
    if compression is None:
        return None
    try:
        dtype = tf.as_dtype(compression)
    except TypeError:
        dtype = None
    if dtype is None or not dtype.is_floating:
        raise TypeError(
            f"{_CLASS}: compression must be a float type such as tf.bfloat16; got "
            f"{compression!r}."
        )
    return dtype


def check_choice(name: str, got: str, known: Sequence[str]) -> None:
    """Raises a ValueError unless ``got`` is one of the known values."""
    if got not in known:
        raise ValueError(
            f"{_CLASS}: {name} must be one of {', '.join(known)}; got {got!r}."
        )


def check_wrapped(
    opt: Any, *, variable_averages: Any, variables_to_average: Any, use_locking: Any
) -> None:
    """Checks the wrapped optimizer, and the arguments that go with it."""
    check_methods(
        ["compute_gradients", "apply_gradients"],
        "an optimizer such as those of tf.compat.v1.train (tw_ampopt.Optimizer wraps a "
        "Keras optimizer as such)",
        opt=opt,
    )
    if variable_averages is not None:
        check_methods(
            ["apply"],
            "a tf.train.ExponentialMovingAverage",
            variable_averages=variable_averages,
        )
    if variables_to_average is not None:
        _check_variables(variables_to_average=variables_to_average)
    check_flag(use_locking=use_locking)


def check_scope_name(name: Any) -> None:
    """Refuses a name that TensorFlow does not accept for ops."""
    check_text(name=name)
    if not _SCOPE_NAME.fullmatch(name):
        raise ValueError(
            "name must consist of letters, digits and ./_- only, and begin with a "
            f"letter, a digit or a dot; got {name!r}."
        )


def check_loss(loss: Any, var_list: Any) -> None:
    """Checks the loss and the variables of ``compute_gradients``."""
    if not (tf.is_tensor(loss) or callable(loss)):
        raise TypeError(
            f"loss must be a tensor, or a function that returns one; got {loss!r}."
        )
    if var_list is not None:
        _check_variables(var_list=var_list)


def _check_variables(**given: Any) -> None:
    """Refuses anything but a variable or a list of them."""
    ((name, value),) = given.items()
    others = [v for v in tf.nest.flatten(value) if not isinstance(v, tf.Variable)]
    if others:
        raise TypeError(
            f"{name} must be a list of variables; got {', '.join(map(repr, others))}."
        )


def find_replica_index(given: int | None, *, total: int) -> int:
    """Returns this replica's number."""
    index, source = given, "replica_index="
    if index is None:
        index, source = _index_of_device(), "the current device"
    if index is None:
        config = find_tf_config()
        index, source = config.replica_index if config else None, "TF_CONFIG"
    if index is None and total == 1:
        return 0
    if index is None:
        raise ValueError(
            f"{_CLASS}: cannot determine which replica this is: replica_index= was not "
            "given, the current device names no task, and TF_CONFIG names no replica. "
            "Pass replica_index=, or build under tf.device('/job:worker/task:0')."
        )
    if not 0 <= index < total:
        raise ValueError(
            f"{_CLASS}: replica {index} (from {source}) is not one of the {total} "
            f"replicas 0..{total - 1}. Correct it, or total_num_replicas."
        )
    return index


def _index_of_device() -> int | None:
    """Returns the replica's number by the current device; None if it names none."""
    spec = tf.DeviceSpec.from_string(tf.no_op(name="replica").device or "")
    if spec.task is None or spec.job in ("ps", "chief"):
        return None if spec.job == "ps" else spec.task
    # If the cluster has a chief, it is the first replica, and the workers follow.
    config = find_tf_config()
    has_chief = config is not None and bool(config.addresses.get("chief"))
    return int(spec.task) + (spec.job == "worker" and has_chief)
