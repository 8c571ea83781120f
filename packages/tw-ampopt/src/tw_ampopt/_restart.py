"""A ``TowerOptimizer``'s state put back to the start, where nothing initialises it.

Outside of session graphs a variable does not know how it began. Counts and
accumulators began at known values; for the slots a fresh optimizer is asked.
"""

import tensorflow as tf

from tw_ampopt._settings import make_shared
from tw_ampopt._tower_core import TowerCore


def restart(core: TowerCore) -> None:
    """Puts slots, accumulators and counts back to the start; the scale stays."""
    for variable in core.updater.state():
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    _restart_counts(core)
    fresh = make_shared(core.settings)
    fresh.start(core.shared.scalars.host)
    for k, inner in enumerate(core.updater.inners):
        tower, variables = core.towers[k], core.variables[k]
        new = fresh.inner_of(tower.name, tower.device)
        with tf.device(tower.device):
            new.build(variables)
        for old, start in zip(inner.variables(), new.variables(), strict=True):
            old.assign(start)


def _restart_counts(core: TowerCore) -> None:
    scalars = core.shared.scalars
    scalars.updates.assign(0)
    scalars.skipped.assign(0)
    initial = core.settings.rule.initial()
    for key, variable in scalars.scale.state.items():
        if variable is not scalars.scale.log2:
            variable.assign(initial[key])
