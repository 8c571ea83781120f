"""The package exports exactly what ``__all__`` lists."""

import tw_reduce


def test_the_exported_names_are_sorted():
    assert tw_reduce.__all__ == sorted(tw_reduce.__all__)


def test_every_exported_name_can_be_imported():
    for name in tw_reduce.__all__:
        assert getattr(tw_reduce, name) is not None
