"""Plans of what travels together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tw_syncrep._protocol.decision import quotas
from tw_syncrep._transfer.packs import Piece, plan_packs, servers_of

PIECES = st.lists(
    st.builds(
        dict,
        server=st.sampled_from(["/job:ps/task:0", "/job:ps/task:1"]),
        dtype=st.sampled_from(["float32", "float64"]),
        shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=12,
).map(
    lambda rows: [
        Piece(n, itemsize={"float32": 4, "float64": 8}[row["dtype"]], **row)
        for n, row in enumerate(rows)
    ]
)


@given(PIECES, st.integers(0, 200))
def test_every_piece_is_in_one_pack_of_its_server_and_dtype(pieces, below):
    packs = plan_packs(pieces, below=below)
    assert sorted(p.index for pack in packs for p in pack.pieces) == [
        piece.index for piece in pieces
    ]
    for pack in packs:
        assert {(p.server, p.dtype) for p in pack.pieces} == {(pack.server, pack.dtype)}


@given(PIECES, st.integers(0, 200))
def test_large_pieces_travel_alone_and_small_ones_never_apart(pieces, below):
    packs = plan_packs(pieces, below=below)
    joined = [pack for pack in packs if not pack.is_alone]
    assert all(p.size * p.itemsize < below for pack in joined for p in pack.pieces)
    small = {(p.server, p.dtype) for p in pieces if p.size * p.itemsize < below}
    large = [p for p in pieces if p.size * p.itemsize >= below]
    assert len(packs) == len(small) + len(large)


def test_servers_are_listed_once():
    pieces = [Piece(n, f"/job:ps/task:{n % 2}", "float32", (1,), 4) for n in range(4)]
    packs = plan_packs(pieces, below=0)
    assert servers_of(packs) == ("/job:ps/task:0", "/job:ps/task:1")


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match=r"below must be 0 .* got -1"):
        plan_packs([], below=-1)


@given(st.integers(1, 30), st.integers(1, 30))
def test_slots_are_shared_out_evenly_and_are_enough(aggregate, total):
    quota = quotas(aggregate, total)
    assert len(quota) == total
    assert sum(quota) == max(aggregate, total)
    assert max(quota) == max(1, -(-aggregate // total))
    assert max(quota) - min(quota) <= 1
