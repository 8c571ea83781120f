"""The purpose of an operation, by the names that towers and their parts give.

Names are paths of scopes: towers, reducers, gradients and optimizers each open one. The
scopes of the sibling packages are listed here as mere words in names: nothing is
imported from these packages.
"""

import re

from tw_doctor._timeline.intervals import Interval

_MOVES = {
    *("_Send", "_Recv", "_HostSend", "_HostRecv", "RecvTensor", "Copy", "CopyHost"),
    *("MemcpyH2D", "MemcpyD2H", "MemcpyD2D", "MemcpyP2P", "EagerCopyToDevice"),
}
_INPUTS = re.compile(
    r"(IteratorGetNext|Optional(GetValue|HasValue|FromValue)|Unstage|Stage"
    r"|QueueDequeue|MapUnstage)"
)
_COLLECTIVES = re.compile(r"(Collective(Reduce|Gather|Bcast|AllToAll)|Nccl)")
_APPLIES = re.compile(r"(Resource)?(Sparse)?Apply[A-Z]|Resource(Sparse)?Apply")
_ASSIGNS = re.compile(r"(Assign(Add|Sub)?(Variable)?(Op)?|ResourceScatter\w+)$")

_REDUCES = {
    # tw-reduce
    *("all_reduce", "auto", "sum_on_device", "sum_balanced", "sum_round_robin"),
    *("sum_collective", "sum_nccl", "hierarchical", "mean", "weights", "weigh"),
    *("pack", "unpack", "spread", "reduce_as", "cast_during", "same_shapes"),
    *("reducer",),  # one with memory
    *("GradientPacker", "allreduce_grads_naive", "aggregate_grads_colocate"),
    # tw-core, tw-ranks, tw-rlload, tw-syncrep
    *("sum_over_towers", "sum_over_towers_gradient", "moments_over_towers"),
    *("weighted_mean", "sum_duplicate_rows", "meeting", "round"),
    *("by_tensorflow", "by_nccl", "by_mpi"),  # The engine between processes.
}
_APPLY_SCOPES = {
    *("accumulate", "apply_grad", "apply_gradients"),
    *("copy_from_owners", "sync_variables"),
    # The names that optimizers of Keras and of TensorFlow 1 have by default.
    *("adadelta", "adafactor", "adagrad", "adam", "adam_w", "adamax", "adamw"),
    *(
        "ftrl",
        "gradientdescent",
        "lamb",
        "lion",
        "momentum",
        "muon",
        "nadam",
        "rmsprop",
    ),
    *("sgd", "loss_scale_optimizer", "simpleadam", "tf_optimizer", "trainopt"),
}
_BACKWARDS = {"gradients", "gradient_tape"}
_COMPUTES = {"forward", "backward", "other"}  # what reads variables to compute
_INPUT_SCOPES = {"staging_input", "load", "per_tower"}

_TOWER = re.compile(r"tower(\d+)$")
_NUMBER = re.compile(r"_\d+$")
_SENT = re.compile(r"(/_\d+(__cf__\d+)?|_S\d+)$")

PARTS = ("input", "forward", "backward", "reduce", "apply", "move", "other")


def part_of(name: str, kind: str) -> str:
    """Returns which of ``PARTS`` an operation belongs to; the first match counts."""
    scopes = [_NUMBER.sub("", scope) for scope in name.split("/")]
    if kind in _MOVES:
        return "move"
    if _INPUTS.match(kind):
        return "input"
    if _COLLECTIVES.match(kind) or not _REDUCES.isdisjoint(scopes[:-1]):
        return "reduce"
    lower = {scope.lower() for scope in scopes}
    if _APPLIES.match(kind) or not _APPLY_SCOPES.isdisjoint(lower):
        return "apply"
    if any(scope.startswith("update_") for scope in scopes[:-1]):
        return "apply"
    if any(scope in _BACKWARDS or scope.endswith("_grad") for scope in scopes):
        return "backward"
    if not _INPUT_SCOPES.isdisjoint(scopes):
        return "input"
    if _ASSIGNS.match(kind) and tower_of(name) is None:
        return "apply"
    return "other" if tower_of(name) is None else "forward"


def interval_of(
    device: str,
    name: str,
    kind: str,
    start: float,
    end: float,
    num_bytes: int | None = None,
) -> Interval:
    """Makes an interval with its part and tower."""
    part, tower = part_of(name, kind), tower_of(name)
    return Interval(device, part, tower, name, kind, start, end, num_bytes)


def cargo_of(name: str) -> str:
    """Returns a tensor's kind by its op's name: ``"variables"``, or the op's part.

    Updates, too, read variables: such as the learning rate that all towers share.
    """
    part = part_of(name, "")
    return "variables" if is_read(name) and part in _COMPUTES else part


def is_read(name: str) -> bool:
    """Whether an op reads a variable."""
    return name.rpartition("/")[2].startswith("ReadVariableOp")


def tower_of(name: str) -> int | None:
    """Returns the index of the tower whose scope a name has, or None."""
    for scope in name.split("/"):
        found = _TOWER.match(_NUMBER.sub("", scope))  # a scope opened again: tower1_1
        if found:
            return int(found[1])
    return None


def producer_of(name: str) -> str:
    """Returns the name of the op whose output a send, receive or input names."""
    return _SENT.sub("", name.removeprefix("^").split(":")[0])
