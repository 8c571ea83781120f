"""A ``TowerOptimizer``'s state put back to the start, where nothing initialises it.

Outside of session graphs a variable does not know how it began. Counts and
accumulators began at known values; for the slots a fresh optimizer is asked.
"""

import tensorflow as tf

from tw_ampopt._optimizers.function_core import TowerCore


def restart(core: TowerCore) -> None:
    """Puts slots, accumulators and counts back to the start; the scale stays."""
    fresh = core.shared.anew()
    for variable in core.updater.state():
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    _restart_counts(core)
    for old, start in zip(core.shared.slots(), fresh.slots(), strict=True):
        old.assign(start)


def _restart_counts(core: TowerCore) -> None:
    scalars = core.shared.scalars
    scalars.updates.assign(0)
    scalars.skipped.assign(0)
    initial = core.settings.rule.initial()
    for key, variable in scalars.scale.state.items():
        if variable is not scalars.scale.log2:
            variable.assign(initial[key])
