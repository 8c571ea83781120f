"""The tasks that the PPO example can learn, with the settings that learn them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Discounts:
    """The discounts of returns and advantages."""

    gamma: float  # discount of a step
    lam: float  # of generalised advantage estimation


@dataclass(frozen=True)
class Weighting:
    """The weights of the loss's terms."""

    clip: float  # maximum distance of the probability ratio from 1
    entropy: float  # weight of the entropy
    value: float  # weight of the values' squared error


@dataclass(frozen=True)
class Task:
    """A task and its settings."""

    env: str  # gymnasium's name
    target: float  # mean return of the last 100 episodes that counts as learnt
    # Columns of the observation that the policy sees; None for all
    shown: tuple[int, ...] | None
    state: int  # size of the recurrent state; 0 for a feed-forward policy
    sequence: int  # rows of a sequence
    num_envs: int  # environments in parallel
    num_steps: int  # steps in each of them for a batch
    epochs: int  # passes over a batch
    minibatches: int  # steps of an epoch
    rate: float  # initial learning rate; falls to 0 linearly
    discounts: Discounts  # of returns and advantages
    weighting: Weighting  # of the loss

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
