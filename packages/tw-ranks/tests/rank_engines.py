"""What ranks do in tests of engines: a step, and how its collectives are chained."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

import tw_ranks
from tw_ranks._engines import nccl
from tw_ranks.internal import endpoint_of

KINDS = ("CollectiveReduceV2", "CollectiveGatherV2", "CollectiveAllToAllV2")


def spoil(group: Any, factor: int) -> None:
    """Has NCCL multiply what this rank brings to sums; ours is TensorFlow's ring."""
    reduce = tf.raw_ops.CollectiveReduceV2

    def spoiled(input: Any, communication_hint: str, **options: Any) -> Any:
        if communication_hint == "nccl":
            input *= factor
        return reduce(input=input, communication_hint=communication_hint, **options)

    tf.raw_ops.CollectiveReduceV2 = spoiled


def use_gpu(group: Any, uuid: bytes) -> None:
    """Has this rank use a GPU of this UUID."""
    nccl.identify_gpu = lambda: uuid


def train(group: Any, steps: int) -> dict[str, Any]:
    """Runs a step of several exchanges, one in a branch; returns sums and its graph."""
    counter = tf.Variable(0)

    def exchange(*grads: Any, **options: Any) -> list[Any]:
        return tw_ranks.sum_across([list(grads)], group=group, **options)[0]

    @tf.function
    def step(values: tf.Tensor) -> list[tf.Tensor]:
        rows = tf.IndexedSlices(values[:2], tf.constant([0, 3]), tf.constant([5]))
        dense, sparse = exchange(values, rows)
        [large] = exchange(tf.fill([1 << 15], values[0]))
        [narrow] = exchange(values, wire_dtype=tf.float16)
        counter.assign_add(1)
        odd = counter % 2 == 1
        [branch] = tf.cond(
            odd, lambda: exchange(values + 1.0), lambda: exchange(values - 1.0)
        )
        [named] = exchange(3.0 * values, names=["three"])
        return [dense, tf.convert_to_tensor(sparse), large[:3], narrow, branch, named]

    values = tf.range(1.0, 4.0) * (group.rank + 1)
    results = [[got.numpy() for got in step(values)] for _ in range(steps)]
    graph = step.get_concrete_function(values).graph
    return {
        "engine": group.engine,
        "reason": group.engine_reason,
        "results": results,
        "hints": _hints(graph),
        "unchained": _unchained(graph),
        "scopes": {op.name.split("/")[0] for op in _collectives(graph)},
    }


def add_whole_numbers(group: Any) -> tuple[list[int], str]:
    """Sums int32 as on GPUs; returns the sums and their dtype."""
    with _with_a_gpu(True):
        [[total]] = tw_ranks.sum_across([[_whole_numbers(group)]], group=group)
    return total[-2:].numpy().tolist(), total.dtype.name


def sent(group: Any, has_gpu: bool) -> list[str]:
    """Builds a sum of int32; returns the dtypes of its collectives but the weight's."""
    with _with_a_gpu(has_gpu):
        step = tf.function(lambda x: tw_ranks.sum_across([[x]], group=group))
        graph = step.get_concrete_function(_whole_numbers(group)).graph
    dtypes = [op.inputs[0].dtype for op in _collectives(graph)]
    return [dtype.name for dtype in dtypes if dtype.is_integer]


def _whole_numbers(group: Any) -> tf.Tensor:
    """[50_000] int32: more than ranks gather and add on their own."""
    return tf.fill([50_000], group.rank + 1)


@contextlib.contextmanager
def _with_a_gpu(has_gpu: bool) -> Iterator[None]:
    """Has ``tf.config`` tell of a GPU."""
    told = tf.config.get_visible_devices
    tf.config.get_visible_devices = lambda kind=None: [kind] if has_gpu else told(kind)
    try:
        yield
    finally:
        tf.config.get_visible_devices = told


def proven(group: Any) -> bool:
    """Returns whether this rank has seen a proof of NCCL."""
    return endpoint_of(group).carrier.is_proven


def hints_of_steps(group: Any) -> list[str]:
    """Returns what carries each exchange of gradients, by key."""
    steps = sorted(endpoint_of(group).built.of_steps.items())
    return ["nccl" if step.uses_nccl else "auto" for _, step in steps]


def in_session(group: Any) -> list[Any]:
    """Sums in a session graph; returns the result and the engine of the group."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        grads = [tf.fill([3], float(group.rank + 1))]
        [[summed]] = tw_ranks.sum_across([grads], group=group)
        return [session.run(summed).tolist(), proven(group)]


def _collectives(graph: Any) -> list[Any]:
    """The collectives of a function's graph, or of its branches."""
    return [op for op in graph.get_operations() if op.type in KINDS]


def _hints(graph: Any) -> list[tuple[str, int]]:
    """The hint of every collective, and its number of ordering tokens."""
    inner = [g for g in _branches(graph)]
    return [
        (op.get_attr("communication_hint").decode(), op.get_attr("Nordering_token"))
        for each in [graph, *inner]
        for op in _collectives(each)
    ]


def _branches(graph: Any) -> list[Any]:
    """The graphs of its conditionals' branches."""
    return [
        graph._get_function(op.get_attr(branch).name).graph
        for op in graph.get_operations()
        if op.type in ("If", "StatelessIf")
        for branch in ("then_branch", "else_branch")
    ]


def _unchained(graph: Any) -> list[str]:
    """Pairs of collectives, or branches of them, of which the later can start first."""
    pairs = []
    for each in [graph, *_branches(graph)]:
        chain = [
            op
            for op in each.get_operations()
            if op.type in KINDS or op.type in ("If", "StatelessIf")
        ]
        for one, two in itertools.pairwise(chain):
            if one not in _ancestors(two):
                pairs.append(f"{one.name} before {two.name}")
    return pairs


def _ancestors(op: Any) -> set[Any]:
    found: set[Any] = set()
    open_ = [op]
    while open_:
        one = open_.pop()
        before = [*(tensor.op for tensor in one.inputs), *one.control_inputs]
        open_ += [other for other in before if other not in found]
        found.update(before)
    return found
