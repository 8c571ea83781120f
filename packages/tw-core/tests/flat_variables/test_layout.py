"""Where variables lie in a flat one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tw_core.flat_variables._layout import Layout, is_slot_name

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=8)


@given(shapes)
def test_parts_lie_one_behind_the_other_and_fill_it(shapes):
    layout = Layout()
    for n, shape in enumerate(shapes):
        layout = layout.add(f"v{n}", shape)
    elements = np.arange(layout.size)
    found = [elements[part.start : part.end] for part in layout.parts]
    assert np.array_equal(np.concatenate([*found, []]), elements)
    assert layout.shapes == [tuple(shape) for shape in shapes]
    for part, own in zip(layout.parts, found, strict=True):
        assert own.reshape(part.shape).size == part.size


def test_slots_are_called_after_the_parts():
    layout = Layout().add("net/w", (2, 3)).add("b", ())
    slots = layout.renamed("tower1/flat/float32/Adam_1", "tower1/flat/float32")
    assert [part.name for part in slots.parts] == ["net/w/Adam_1", "b/Adam_1"]
    assert slots.shapes == layout.shapes
    legacy = layout.renamed("Adam/flat/float32/m", "flat/float32")
    assert [part.name for part in legacy.parts] == ["Adam/net/w/m", "Adam/b/m"]


def test_only_names_that_hold_all_of_another_are_slots():
    whole = "flat/float32"
    assert is_slot_name("flat/float32/Momentum", whole)
    assert is_slot_name("scope/flat/float32/Momentum", whole)
    assert not is_slot_name("flat/float32", whole)
    assert not is_slot_name("flat/float32_1/Momentum", whole)
    assert not is_slot_name("my_flat/float32/Momentum", whole)
