"""What a ``TowerOptimizer`` is made of, out of sight of checkpoint tracking.

A ``tf.Module`` saves whatever variables it can reach, the model's among them. The
optimizer decides itself what is saved, and names it by ``saved``.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._settings import Settings, check_share, make_shared
from tw_ampopt._shared_state import SharedState
from tw_ampopt._updater import UpdateOptions, Updater
from tw_core import Tower


class TowerCore:
    """State and updater of K towers.

    Attributes:
      settings: what sharing optimizers agree on.
      shared: slots, scale and counts.
      updater: the towers' updater.
      variables: [K][N], or [1][N] where towers share.
      towers: the K towers.
    """

    def __init__(
        self,
        settings: Settings,
        options: UpdateOptions,
        share: "TowerCore | None",
        towers: Sequence[Tower],
        variables: Sequence[Sequence[Any]],
    ) -> None:
        """Makes all state; ``share`` gives the shared part.

        Raises:
          ValueError: a ``share`` of other settings.
        """
        if share is not None:
            check_share(settings, share.settings)
        self.settings: Settings = settings
        self.shared: SharedState = share.shared if share else make_shared(settings)
        self.towers = tuple(towers)
        self.variables = [list(tower) for tower in variables]
        keyed = [(tower.name, tower.device) for tower in towers]
        self.updater = Updater(self.shared, options, keyed, self.variables)

    @property
    def devices(self) -> list[str]:
        """The K towers' devices."""
        return [tower.device for tower in self.towers]

    def saved(self) -> dict[str, list[tf.Variable]]:
        """Lists what a checkpoint needs, by kind."""
        return {
            "shared": self.shared.scalars.variables(),
            "slots": self.updater.inners[0].variables(),
            "own": self.updater.state(),
        }
