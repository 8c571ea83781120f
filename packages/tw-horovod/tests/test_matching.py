"""Which collective of a rank meets which of another's: names, order and shapes."""

import os

import horovod_ranks
import numpy as np
import pytest
from harness.ranks import ENGINE, Raised


@pytest.fixture(scope="module", params=[3])
def ranks(request, processes):
    group = horovod_ranks.make(processes, request.param)
    yield group
    group.end()


@pytest.fixture
def two(processes):
    group = horovod_ranks.make(processes, 2)
    yield group
    group.end()


def hear_errors(ranks):
    """Returns what every rank raised."""
    errors = []
    for rank in ranks.all:
        with pytest.raises(Raised) as raised:
            rank.hear(40)  # The deadline is 60 s.
        errors.append(raised.value)
    return errors


def ask(ranks, name, arguments):
    for rank, own in zip(ranks.all, arguments, strict=True):
        rank.say(name, *own)


def test_an_op_without_a_name_may_stand_anywhere_among_those_with(ranks):
    orders = [["", "loss"], ["loss", ""], ["loss", ""]]
    calls = [("function", orders[rank.rank], False, 2) for rank in ranks.all]
    factor = np.mean([rank.rank + 1 for rank in ranks.all])
    for rank in ranks.call_each("reduce_by_name", calls):
        assert rank == [{"loss": 4 * factor, "": 0.0}] * 2


def test_metrics_are_averaged_by_name(ranks):
    def logs(*orders):
        return [
            ({name: len(name) * (r.rank + 1.0) for name in orders[r.rank]},)
            for r in ranks.all
        ]

    same = ["loss", "mae"]
    ask(ranks, "average_metrics", logs(same, ["loss", "val_loss"], same))
    for error in hear_errors(ranks):
        assert "named 'metrics loss, mae', rank 1 " in error.text
        assert "named 'metrics loss, val_loss'" in error.text
    factor = np.mean([rank.rank + 1 for rank in ranks.all])
    for got in ranks.call_each("average_metrics", logs(same, same[::-1], same)):
        assert got == {"loss": 4 * factor, "mae": 3 * factor}


def test_functions_of_new_shapes_are_kept_for_a_while_only(ranks):
    size = float(len(ranks.all))
    few = 0 if os.environ.get(ENGINE) == "mpi" else 4  # MPI compiles none.
    for sums, kept in ranks.call("bring_new_shapes", 6, 4):
        assert sums == [size] * 12
        assert kept == few


def test_an_exchange_takes_the_keys_that_it_needs(ranks):
    assert ranks.call("agree_on_keys", [3, 0, 0, 1_000_000, 1]) == [
        [0, 3, 3, 3, 1_000_003]
    ] * len(ranks.all)


@pytest.mark.slow
def test_hundreds_of_tensors_travel_by_themselves(ranks):
    size = len(ranks.all)
    assert ranks.call("reduce_apart", 260) == [[{size}, {size}]] * size


def test_named_tensors_of_other_shapes_are_refused_where_nobody_waits(two):
    ask(two, "reduce_by_name", [("function", ["x"], hides, 1) for hides in (0, 1)])
    says = "tensor 0 of 'an allreduce' named 'metrics/x' is a tensor float32 [1] on "
    for error in hear_errors(two):
        assert says in error.text or "float32 [None] on rank 0" in error.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "name", "signature", "shapes"),
    [
        ("function", "allreduce", None, [[6], [2, 3]]),
        ("session", "reducescatter", [None, 2], [[100, 2], [104, 2]]),
        ("function", "allgather", [None, None], [[100, 2], [100, 3]]),
    ],
)
def test_shapes_that_are_known_late_are_compared(two, mode, name, signature, shapes):
    alike = [(mode, name, shapes[0], signature)] * 2
    assert all(total > 0 for total in two.call_each("combine_ones", alike))
    ask(two, "combine_ones", [(mode, name, shape, signature) for shape in shapes])
    for error in hear_errors(two):
        assert "all ranks must pass the same shape to" in error.text
        for shape in shapes:
            assert f"[{' '.join(map(str, shape))}" in error.text


@pytest.mark.slow(by_day=["eager", "root"])
@pytest.mark.parametrize("kind", ["eager", "shape", "root", "name"])
def test_collectives_that_were_agreed_on_are_compared_each_time(two, kind):
    assert len(two.call("use_in_order", kind, [0, 1, 0])) == 2
    ask(two, "use_in_order", [(kind, [0, 1, 0]), (kind, [0, 1, 1])])
    for error in hear_errors(two):
        assert "ranks wait in different collectives" in error.text
        says = {
            "eager": ["'an allreduce' 'loss'", "'an allreduce' 'part'"],
            "shape": ["float32 [3]", "float32 [4]"],
            "root": ["root=0", "root=1"],
            "name": ["'x' of a tensor float32 [5]", "'x' of a tensor float32 [6]"],
        }[kind]
        for words in says:
            assert words in error.text
