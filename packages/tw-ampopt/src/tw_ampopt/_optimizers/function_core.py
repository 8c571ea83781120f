"""What a ``TowerOptimizer`` is made of, out of sight of checkpoint tracking.

A ``tf.Module`` saves whatever variables it can reach, the model's among them. The
optimizer decides itself what is saved, and names it by ``saved``.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tw_ampopt._checks.arguments import check_loss, check_options
from tw_ampopt._checks.pairs import trained_variables
from tw_ampopt._optimizers.gradients_by_tower import gradients_by_tower
from tw_ampopt._optimizers.settings import Settings, shared_with
from tw_ampopt._update.options import UpdateOptions
from tw_ampopt._update.state import SharedState
from tw_ampopt._update.tower_buffers import RawGradients
from tw_ampopt._update.update import Updater
from tw_ampopt._variables import as_tf_variable
from tw_core import (
    Tower,
    builds_session_graph,
    canonical_device,
    compiles_with_xla,
)


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
        self.settings: Settings = settings
        self.shared: SharedState = shared_with(share, settings)
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

    def variables_of_state(self) -> list[tf.Variable]:
        """Lists scale, counts, all towers' slots, and accumulators."""
        slots = [v for inner in self.updater.inners for v in inner.variables()]
        return [*self.shared.scalars.variables(), *slots, *self.updater.state()]

    def enter(self, method: str) -> str:
        """Checks where a method of ``TowerOptimizer`` is called.

        Returns:
          What opens its messages.

        Raises:
          RuntimeError: in a session graph, its branches, loops and functions included.
        """
        caller = f"{self.settings.caller}.{method}"
        if builds_session_graph():
            raise RuntimeError(
                f"{caller}: works in a tf.function and eagerly; got a session graph, "
                "whose sessions do not have this optimizer's state. Use "
                "tw_ampopt.Optimizer there."
            )
        return caller

    def raw(self, grads: Sequence[Any], method: str) -> RawGradients:
        """Makes [K][N][1] of gradients as a method of ``TowerOptimizer`` takes them."""
        caller = self.enter(method)
        self._check_xla(caller)
        return gradients_by_tower(
            grads, self.variables, len(self.towers), caller=caller
        )

    def _check_xla(self, caller: str) -> None:
        variables = [as_tf_variable(v) for tower in self.variables for v in tower]
        devices = sorted({canonical_device(v.device) for v in variables})
        if len(devices) > 1 and compiles_with_xla():
            raise ValueError(
                f"{caller}: XLA compiles a function with the variables of one device; "
                f"got towers on {devices}. Leave jit_compile=True to the functions "
                "that compute a tower's gradients."
            )

    def unscaled_pairs(
        self, loss: tf.Tensor, var_list: Sequence[Any] | None, **options: Any
    ) -> list[tuple[Any, Any]]:
        """Returns [N] pairs of a float32 gradient, or None, and its variable.

        The loss is scaled on the way back only.

        Raises:
          RuntimeError: no graph is being built, or a session graph.
          TypeError: no loss, variables or options.
          ValueError: no variables, a loss that is no scalar, or another graph's.
        """
        caller = self.enter("compute_gradients")
        check_loss(loss, caller=caller)
        check_options(tf.gradients, options, caller=caller)
        variables = trained_variables(var_list, self.variables[0], caller=caller)
        if tf.executing_eagerly():
            raise RuntimeError(
                f"{caller}: needs a graph; call it inside a tf.function, or use a "
                "GradientTape and apply."
            )
        scaled = self.shared.scaled(tf.cast(loss, tf.float32))
        grads = tf.gradients(scaled, [as_tf_variable(v) for v in variables], **options)
        return list(zip(self.shared.unscaled_gradients(grads), variables, strict=True))


def check_eager(caller: str) -> None:
    """Refuses a graph that is being built.

    Raises:
      RuntimeError: inside of a ``tf.function`` or session graph.
    """
    if not tf.executing_eagerly():
        raise RuntimeError(
            f"{caller}: makes variables, and so must be made outside of the "
            "tf.function that uses it. In a session graph use tw_ampopt.Optimizer."
        )
