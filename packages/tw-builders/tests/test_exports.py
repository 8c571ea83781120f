"""The package exports exactly what ``__all__`` lists."""

import tw_builders


def test_the_exported_names_are_sorted():
    assert tw_builders.__all__ == sorted(tw_builders.__all__)


def test_every_exported_name_can_be_imported():
    for name in tw_builders.__all__:
        assert getattr(tw_builders, name) is not None
