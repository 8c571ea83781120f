"""Messages and bytes of a sum between processes, counted on the wire."""

import pytest

RING, GATHERED = 40_000, 1_000  # floats
STEPS = 4


def expected_calls(size, floats, wire):
    """Returns how often a rank asks another for a part of the sum, per step."""
    if wire is not None:  # swapped, then gathered; the weight apart
        return 2 * (size - 1) + 1 * (size - 1)
    is_gathered = 4 * (floats + 1) * (size - 1) <= 1 << 16
    return size - 1 if is_gathered else 2 * (size - 1)


def expected_bytes(size, floats, wire):
    """Returns what a rank receives per step, without headers."""
    if wire is not None:
        return 2 * (size - 1) / size * 2 * floats
    is_gathered = 4 * (floats + 1) * (size - 1) <= 1 << 16
    share = size - 1 if is_gathered else 2 * (size - 1) / size
    return 4 * (floats + 1) * share


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 5, 8, 12])
def test_messages_are_those_of_the_formula(make_ranks, size):
    ranks = make_ranks(size, counted=True).joined()
    for floats, wire in ((GATHERED, None), (RING, None), (RING, "bfloat16")):
        told = ranks.call("count_calls", floats, STEPS, {"wire_dtype": wire})
        for rank, (calls, received, others) in enumerate(told):
            assert calls == {"RecvBuf": expected_calls(size, floats, wire)}, (
                floats,
                wire,
            )
            payload = expected_bytes(size, floats, wire)
            assert payload <= received <= 1.05 * payload + 600 * calls["RecvBuf"]
            if floats == RING and wire is None:  # Around the ring, in rank order.
                assert others == {(rank - 1) % size}
