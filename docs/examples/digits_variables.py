"""The variables of the digits example: whose they are, and which lie in a flat one."""

from contextlib import contextmanager

import tensorflow as tf

import tw_core
from tw_core.flat_variables import FlatVariables, pack_gradients


class GraphVariables:
    """The towers' variables in a session graph.

    Where ``below_bytes`` is not 0, those of fewer bytes lie in flat ones, and have
    their gradients there.
    """

    def __init__(self, policy, towers, below_bytes):
        """Makes none yet.

        Args:
          policy: ``tw_core.Shared`` or ``tw_core.Replicated``.
          towers: of both kinds, [K].
          below_bytes: 0 for no flat variables.
        """
        self._policy = policy
        flats = [FlatVariables(below_bytes) for _ in towers]
        shares = isinstance(policy, tw_core.Shared)
        self._flats = flats[:1] * len(towers) if shares else flats

    @contextmanager
    def scope(self, tower):
        """Makes or finds the variables of ``get_variable`` code."""
        with self._flats[tower.index].scope(), self._policy.scope(tower):
            yield

    def gradients(self, tower, loss):
        """Returns (gradient, variable) of what the optimizer is to update."""
        own = self._policy.trainable_variables(tower)
        return pack_gradients(list(zip(tf.gradients(loss, own), own, strict=True)))

    def trained(self, tower):
        """Lists what the optimizer updates: flat variables, then the others."""
        flat = self._flats[tower.index]
        views = {id(view) for view in flat.views}
        own = self._policy.trainable_variables(tower)
        return [*flat.variables, *(v for v in own if id(v) not in views)]


class FunctionVariables(GraphVariables):
    """As ``GraphVariables``, for a ``tf.function``."""

    def __init__(self, policy, towers, below_bytes, call_model):
        """Makes the variables, which flat ones must be before a step is traced.

        Args:
          policy, towers, below_bytes: as for ``GraphVariables``.
          call_model: runs the ``get_variable`` code once.
        """
        super().__init__(policy, towers, below_bytes)
        self._policy = tw_core.VariableStore(policy)
        for tower in towers:

            @tf.function(autograph=False)
            def make(tower=tower):
                with self._policy.scope(tower):
                    call_model()

            with self._flats[tower.index].scope():
                make.get_concrete_function()

    @contextmanager
    def scope(self, tower):
        """Finds the variables, reading each flat one once."""
        with self._policy.scope(tower), self._flats[tower.index].reading():
            yield

    def gradients(self, tower, loss):
        """Returns (gradient, variable) of what the optimizer is to update."""
        own = self.trained(tower)
        return list(zip(tf.gradients(loss, own), own, strict=True))
