"""The package exports exactly what ``__all__`` lists."""

import tw_syncrep


def test_the_exported_names_are_sorted():
    assert tw_syncrep.__all__ == sorted(tw_syncrep.__all__)


def test_every_exported_name_can_be_imported():
    for name in tw_syncrep.__all__:
        assert getattr(tw_syncrep, name) is not None
