"""A group of one rank, as ``tw_core.ranks.RankGroup`` describes it."""


class Alone:
    """Has nobody to exchange anything with."""

    rank, size = 0, 1

    def sum(self, tensors, *, names=()):
        return list(tensors)

    def bounded(self, function):
        return function

    broadcast = tell = wait_for = bounded
