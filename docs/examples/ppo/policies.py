"""Policies and their PPO loss, in the form that tw-rlload's towers build.

Source: Schulman et al., "Proximal policy optimization algorithms", 2017.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tasks import Weighting

v1 = tf.compat.v1

COLUMNS = ("seen", "starts", "actions", "log_probs", "advantages", "returns")


@dataclass(frozen=True)
class Shape:
    """The sizes of a policy's observations, actions and state."""

    seen: int  # size of an observation
    actions: int  # number of actions
    hidden: int  # units of a layer
    state: int  # size of the recurrent state; 0 for a feed-forward policy
    steps: int  # rows of a sequence in training; 1 for a feed-forward policy


def placeholders(shape: Shape) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Makes the placeholders of the columns and of the states."""
    rows = [v1.placeholder(tf.float32, [None, shape.seen], "seen")]
    rows.append(v1.placeholder(tf.float32, [None], "starts"))
    rows.append(v1.placeholder(tf.int32, [None], "actions"))
    rows += [v1.placeholder(tf.float32, [None], name) for name in COLUMNS[3:]]
    if not shape.state:
        return rows, []
    return rows, [v1.placeholder(tf.float32, [None, shape.state], "states")]


class Network:
    """Action probabilities and values, from observations."""

    def __init__(
        self,
        seen: tf.Tensor,
        starts: tf.Tensor,
        states: Sequence[tf.Tensor],
        shape: Shape,
        *,
        steps: int,
    ) -> None:
        # [sequences, state], after each sequence's last row
        self.next_state = tf.zeros([tf.shape(seen)[0], 0])
        if states:
            cell = Cell(shape.hidden, shape.state)
            memory, self.next_state = cell.run(seen, starts, states[0], steps)
            seen = tf.concat([seen, memory], -1)
        actor, critic = (_tanh_layers(seen, shape.hidden, n) for n in ("pi", "v"))
        logits = dense(actor, shape.actions, "logits", gain=0.01)
        self.log_probs = tf.nn.log_softmax(logits)  # [rows, actions]
        self.value = dense(critic, 1, "value", gain=1.0)[:, 0]  # [rows]


class Acting:
    """The policy as it plays, with one row per sequence."""

    def __init__(self, shape: Shape) -> None:
        seen = v1.placeholder(tf.float32, [None, shape.seen])
        starts = v1.placeholder(tf.float32, [None])
        state = v1.placeholder(tf.float32, [None, shape.state])
        states = [state] if shape.state else []
        network = Network(seen, starts, states, shape, steps=1)
        noise = tf.random.uniform(tf.shape(network.log_probs), 1e-20)
        scores = network.log_probs - tf.math.log(-tf.math.log(noise))
        actions = tf.argmax(scores, -1, tf.int32)
        chosen = tf.gather(network.log_probs, actions, batch_dims=1)
        # Placeholders of observations, states and starts
        self.inputs = [seen, state, starts]
        # Actions, their log probabilities, values, next state
        self.outputs = [actions, chosen, network.value, network.next_state]


class PpoLoss:
    """One tower's policy and its loss, returned by ``build_graph``."""

    def __init__(
        self,
        inputs: Sequence[tf.Tensor],
        shape: Shape,
        weighting: Weighting,
        feeds: Mapping[tf.Tensor, float],
    ) -> None:
        rows = dict(zip(COLUMNS, inputs, strict=False))
        states = inputs[len(COLUMNS) :]
        network = Network(
            rows["seen"], rows["starts"], states, shape, steps=shape.steps
        )
        self._feeds = feeds
        gain, self._kl = _clipped_gain(network.log_probs, rows, weighting.clip)
        entropies = -tf.reduce_sum(tf.exp(network.log_probs) * network.log_probs, -1)
        self._entropy = tf.reduce_mean(entropies)
        error = tf.reduce_mean(tf.square(network.value - rows["returns"]))
        reward = gain + weighting.entropy * self._entropy
        self.loss = weighting.value * error - reward  # scalar

    def gradients(self, optimizer: Any) -> Any:
        return optimizer.compute_gradients(self.loss)

    def extra_compute_grad_feed_dict(self) -> Mapping[tf.Tensor, float]:
        return self._feeds

    def extra_compute_grad_fetches(self) -> dict[str, tf.Tensor]:
        return {"kl": self._kl, "entropy": self._entropy}


class Cell:
    """A gated recurrent unit (Cho et al., 2014)."""

    def __init__(self, hidden: int, state: int) -> None:
        self._hidden, self._state = hidden, state

    def run(
        self, seen: tf.Tensor, starts: tf.Tensor, state: tf.Tensor, steps: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Runs over consecutive sequences.

        Args:
          seen: [sequences * steps, ...].
          starts: [sequences * steps], 1 where an episode starts and the state is reset.
          state: [sequences, state], before each first row.
          steps: rows of a sequence.

        Returns:
          [sequences * steps, state], and the last of each sequence.
        """
        encoded = tf.tanh(dense(seen, self._hidden, "encoder"))
        encoded = tf.reshape(encoded, [-1, steps, self._hidden])
        kept = tf.reshape(1 - starts, [-1, steps, 1])
        states = []
        for t in range(steps):
            state = self._step(encoded[:, t], state * kept[:, t])
            states.append(state)
        return tf.reshape(tf.stack(states, 1), [-1, self._state]), state

    def _step(self, inputs: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
        both = tf.concat([inputs, state], -1)
        gates = tf.sigmoid(dense(both, 2 * self._state, "gates", gain=1.0))
        update, reset = tf.split(gates, 2, -1)
        both = tf.concat([inputs, reset * state], -1)
        new = tf.tanh(dense(both, self._state, "new", gain=1.0))
        return update * state + (1 - update) * new


def dense(
    inputs: tf.Tensor, units: int, name: str, *, gain: float = 2**0.5
) -> tf.Tensor:
    """A layer without an activation; the same variables for the same name."""
    with v1.variable_scope(name, reuse=v1.AUTO_REUSE):
        start = v1.orthogonal_initializer(gain)
        weights = v1.get_variable("w", [inputs.shape[-1], units], initializer=start)
        bias = v1.get_variable("b", [units], initializer=v1.zeros_initializer())
    return inputs @ weights + bias


def _tanh_layers(inputs: tf.Tensor, units: int, name: str) -> tf.Tensor:
    for layer in range(2):
        inputs = tf.tanh(dense(inputs, units, f"{name}{layer}"))
    return inputs


def _clipped_gain(
    log_probs: tf.Tensor, rows: Mapping[str, tf.Tensor], clip: float
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the clipped surrogate, and the policy's KL divergence."""
    chosen = tf.gather(log_probs, rows["actions"], batch_dims=1)
    change = chosen - rows["log_probs"]
    ratio, advantages = tf.exp(change), rows["advantages"]
    near = tf.clip_by_value(ratio, 1 - clip, 1 + clip)
    gain = tf.reduce_mean(tf.minimum(ratio * advantages, near * advantages))
    return gain, tf.reduce_mean(ratio - 1 - change)
