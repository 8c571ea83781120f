"""The arithmetic of cutting, against dealing rows out one by one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_rlload import plan_load


def deal(sequences, num_devices, length, maximum, remainder):
    """Says slowly which sequences each device takes in each step: [S][K] lists.

    A pad is None.
    """
    per_step = 0
    while (per_step + 1) * length <= maximum:
        per_step += 1
    waiting = list(range(sequences))
    if remainder == "drop":
        while per_step * num_devices > len(waiting):
            per_step -= 1
        steps = 0
        while (steps + 1) * per_step * num_devices <= len(waiting):
            steps += 1
        share = [steps * per_step] * num_devices
    else:
        share = [0] * num_devices
        for i in range(sequences):
            share[i % num_devices] += 1
        per_step = min(per_step, max(share))
        steps = 0
        while steps * per_step < max(share):
            steps += 1
    devices = []
    for size in share:
        mine = [waiting.pop(0) for _ in range(size)]
        devices.append(mine + [None] * (steps * per_step - size))
    return [
        [mine[s * per_step : (s + 1) * per_step] for mine in devices]
        for s in range(steps)
    ]


def laid_out(plan):
    """Says the same of a plan."""
    steps = []
    for offset in plan.batch_offsets:
        first = offset // plan.sequence_length
        step = []
        for shard in plan.shards:
            pads = [None] * (plan.sequences_per_device - len(shard))
            mine = [*shard, *pads]
            step.append(mine[first : first + plan.sequences_per_device_step])
        steps.append(step)
    return steps


@st.composite
def batches(draw):
    num_devices = draw(st.integers(1, 5))
    length = draw(st.integers(1, 4))
    sequences = draw(st.integers(num_devices, 60))
    maximum = draw(st.integers(length, 80))
    return sequences, num_devices, length, maximum


def cut(batch, remainder):
    sequences, num_devices, length, maximum = batch
    return plan_load(
        sequences * length,
        sequences,
        num_devices=num_devices,
        max_per_device_batch_size=maximum,
        remainder=remainder,
    )


@given(batches(), st.sampled_from(["drop", "pad"]))
def test_every_sequence_goes_where_dealing_them_out_puts_it(batch, remainder):
    sequences, num_devices, length, maximum = batch
    plan = cut(batch, remainder)
    wanted = deal(sequences, num_devices, length, maximum, remainder)
    assert laid_out(plan) == wanted
    dealt = [s for step in wanted for device in step for s in device]
    real = [sequence for sequence in dealt if sequence is not None]
    assert plan.rows_loaded == len(real) * length
    assert plan.rows_padded == (len(dealt) - len(real)) * length
    assert plan.rows_dropped == (sequences - len(real)) * length
    assert plan.rows_per_device * num_devices == len(dealt) * length
    assert plan.rows_per_device_step <= maximum
    assert all(step[0][0] is not None for step in wanted), "each step has a row"


@given(batches())
def test_error_refuses_exactly_what_drop_would_drop(batch):
    dropped = cut(batch, "drop").rows_dropped
    if not dropped:
        assert laid_out(cut(batch, "error")) == laid_out(cut(batch, "drop"))
        return
    with pytest.raises(ValueError, match=f"leave {dropped} rows over"):
        cut(batch, "error")


def test_a_drawing_shows_rows_without_states_and_single_ones():
    plan = plan_load(5, num_devices=2, max_per_device_batch_size=1, remainder="pad")
    assert plan.drawing().splitlines() == [
        "state     1 2 3 4 5",
        "row       A B C D E",
        "sequence  |          1 row",
        "device 0  |---|      3 rows, 3 steps of 1",
        "device 1        |-|  2 rows, 3 steps of 1",
    ]
