"""The tasks that the PPO example can learn, with the settings that learn them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Discounts:
    """How far ahead returns look.

    Attributes:
      gamma: discount of a step.
      lam: of generalised advantage estimation.
    """

    gamma: float
    lam: float


@dataclass(frozen=True)
class Weighting:
    """What the loss is made of.

    Attributes:
      clip: how far the probability ratio may leave 1.
      entropy: weight of the entropy.
      value: weight of the values' squared error.
    """

    clip: float
    entropy: float
    value: float


@dataclass(frozen=True)
class Task:
    """A task and its settings.

    Attributes:
      env: gymnasium's name.
      target: mean return of the last 100 episodes that counts as learnt.
      shown: columns of the observation that the policy sees; None for all.
      state: numbers of the recurrent state; 0 for a feed-forward policy.
      sequence: rows of a sequence.
      num_envs: environments side by side.
      num_steps: steps in each of them for a batch.
      epochs: passes over a batch.
      minibatches: steps of an epoch.
      rate: of learning at the start; falls to 0 linearly.
      discounts: of returns and advantages.
      weighting: of the loss.
    """

    env: str
    target: float
    shown: tuple[int, ...] | None
    state: int
    sequence: int
    num_envs: int
    num_steps: int
    epochs: int
    minibatches: int
    rate: float
    discounts: Discounts
    weighting: Weighting

    @property
    def minibatch(self) -> int:
        """Rows of a step."""
        return self.num_envs * self.num_steps // self.minibatches


TASKS = {
    "cartpole": Task(
        env="CartPole-v1",
        target=475.0,
        shown=None,
        state=0,
        sequence=1,
        num_envs=8,
        num_steps=64,
        epochs=10,
        minibatches=4,
        rate=1e-3,
        discounts=Discounts(gamma=0.98, lam=0.9),
        weighting=Weighting(clip=0.2, entropy=0.0, value=0.5),
    ),
    "acrobot": Task(
        env="Acrobot-v1",
        target=-100.0,
        shown=None,
        state=0,
        sequence=1,
        num_envs=16,
        num_steps=64,
        epochs=10,
        minibatches=8,
        rate=1e-3,
        discounts=Discounts(gamma=0.99, lam=0.94),
        weighting=Weighting(clip=0.2, entropy=0.0, value=0.5),
    ),
    "recurrent": Task(
        env="CartPole-v1",
        target=400.0,
        shown=(0, 2),
        state=32,
        sequence=8,
        num_envs=16,
        num_steps=64,
        epochs=10,
        minibatches=8,
        rate=1e-3,
        discounts=Discounts(gamma=0.98, lam=0.9),
        weighting=Weighting(clip=0.2, entropy=0.005, value=0.5),
    ),
}
