"""The variables of a loss scale, updated by a rule.

One scale serves all towers: it lives on one host, and every tower reads it.
"""

import tensorflow as tf

from tw_ampopt._loss_scale.rules import LossScale
from tw_ampopt._variables import graphs_around, make_state
from tw_core.modes import orders_effects

_LOG2 = "log2"
_LOG2_ITSELF = 0  # the other keys are the signs 1 and -1
_VARIABLE_NAMES = {_LOG2: "loss_scaling_var"}  # the older system's name


class LossScaleVariables:
    """A rule with its state in variables."""

    def __init__(self, rule: LossScale, *, device: str, local: bool) -> None:
        """Makes the state.

        Args:
          rule: how the scale moves.
          device: where the scalars live.
          local: whether a session graph's saver leaves them out.
        """
        self._rule = rule
        # Scaling and unscaling must see the same value. Where nothing orders a read
        # against updates, the graph (of a session, or of wrap_function) reads once,
        # and its branches and loops take what it has read.
        self._reads: dict[tf.Graph, dict[int, tf.Tensor]] = {}
        self.state = {
            key: make_state(
                value, name=_VARIABLE_NAMES.get(key, key), device=device, local=local
            )
            for key, value in rule.initial().items()
        }

    @property
    def log2(self) -> tf.Variable | None:
        """The variable that holds the scale's log2; None without scaling."""
        return self.state.get(_LOG2)

    @property
    def counts(self) -> list[tf.Variable]:
        """The state apart from the log2."""
        return [variable for key, variable in self.state.items() if key != _LOG2]

    def scale(self) -> tf.Tensor | None:
        """Returns the scale as a float32 scalar; None without scaling."""
        return self._two_to_the(1)

    def inverse(self) -> tf.Tensor | None:
        """Returns 1 / scale as a float32 scalar; None without scaling."""
        return self._two_to_the(-1)

    def update(self, good: tf.Tensor) -> list[tf.Operation]:
        """Updates the state after an update of the model.

        Args:
          good: bool scalar, whether every gradient was finite.

        Returns:
          The assignments.
        """
        if self.log2 is None:
            return []
        with tf.device(self.log2.device):
            state = {key: variable.read_value() for key, variable in self.state.items()}
            return [
                self.state[key].assign(value, read_value=False)
                for key, value in self._rule.next(state, good).items()
            ]

    def reset_counts(self) -> None:
        """Assigns to the counts the values that the rule starts with."""
        for key, start in self._rule.initial().items():
            if key != _LOG2:
                self.state[key].assign(start)

    def _two_to_the(self, sign: int) -> tf.Tensor | None:
        if self.log2 is None:
            return None
        if orders_effects():
            # Read at every use: an update may come between, even one in a function
            # that is not traced again.
            with tf.device(self.log2.device):
                return self._rule.scale(sign * self.log2.read_value())
        made = self._made_in(tf.compat.v1.get_default_graph())
        with tf.control_dependencies(None), tf.device(self.log2.device):
            if _LOG2_ITSELF not in made:
                made[_LOG2_ITSELF] = self.log2.read_value()
            if sign in made:
                return made[sign]
            scale = self._rule.scale(sign * made[_LOG2_ITSELF])
        if scale.graph is made[_LOG2_ITSELF].graph:
            made[sign] = scale
        return scale

    def _made_in(self, graph: tf.Graph) -> dict[int, tf.Tensor]:
        enclosing = list(graphs_around(graph))
        # The others are finished; those of wrap_function are not to be kept.
        self._reads = {g: self._reads[g] for g in enclosing if g in self._reads}
        nearest = next((g for g in enclosing if g in self._reads), graph)
        return self._reads.setdefault(nearest, {})
