"""The package exports exactly what ``__all__`` lists."""

import tw_rlload


def test_the_exported_names_are_sorted():
    assert tw_rlload.__all__ == sorted(tw_rlload.__all__)


def test_every_exported_name_can_be_imported():
    for name in tw_rlload.__all__:
        assert getattr(tw_rlload, name) is not None
