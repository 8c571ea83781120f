"""Plays several environments in parallel, and turns their steps into columns.

Rows are ordered by environment, then by time, so that a recurrent policy finds
each sequence contiguous.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from tasks import Discounts

Floats: TypeAlias = npt.NDArray[np.float32]
# (observations [N, ...], state [N, H], starts [N]) -> actions, log probabilities and
# values, [N] each, and the next state [N, H].
Act: TypeAlias = Callable[[Floats, Floats, Floats], tuple[Any, Floats, Floats, Floats]]


class HideColumns(gym.ObservationWrapper):
    """Shows only some columns of an observation, in quarters of their limits.

    The policy must infer hidden velocities from small differences.
    """

    def __init__(self, env: gym.Env, shown: Sequence[int]) -> None:
        super().__init__(env)
        self._shown = list(shown)
        box = env.observation_space
        self._limits = box.high[self._shown] / 4
        ones = np.full_like(self._limits, 4)
        self.observation_space = gym.spaces.Box(-ones, ones, dtype=np.float32)

    def observation(self, observation: Any) -> Any:
        return observation[self._shown] / self._limits


def make_envs(
    name: str, count: int, shown: Sequence[int] | None
) -> gym.vector.VectorEnv:
    """Makes ``count`` environments that restart in the step in which they end."""

    def make() -> gym.Env:
        env = gym.make(name, disable_env_checker=True)
        return HideColumns(env, shown) if shown else env

    mode = gym.vector.AutoresetMode.SAME_STEP
    return gym.vector.SyncVectorEnv([make] * count, autoreset_mode=mode)


class Collector:
    """Continues to play from where it stopped, batch after batch."""

    def __init__(
        self, envs: gym.vector.VectorEnv, *, state_size: int, seed: int
    ) -> None:
        self._envs = envs
        self._seen, _ = envs.reset(seed=seed)
        self._state = np.zeros((envs.num_envs, state_size), np.float32)
        self._starts = np.ones(envs.num_envs, np.float32)
        self._sums = np.zeros(envs.num_envs)
        self._steps = 0
        # Sums of rewards of all episodes that ended, in order
        self.returns: list[float] = []
        # The step, counted over all environments, at which each ended
        self.ended_at: list[int] = []

    def collect(
        self, act: Act, num_steps: int, discounts: Discounts
    ) -> dict[str, npt.NDArray[Any]]:
        """Plays ``num_steps`` steps in each environment."""
        steps = [self._step(act, discounts.gamma) for _ in range(num_steps)]
        columns = {
            name: np.stack([step[name] for step in steps], axis=1) for name in steps[0]
        }
        _, _, last, _ = act(self._seen, self._state, self._starts)
        columns["advantages"] = advantages_of(
            columns.pop("rewards"),
            columns["values"],
            columns.pop("ends"),
            last,
            discounts,
        )
        columns["returns"] = columns["advantages"] + columns["values"]
        return columns

    def _step(self, act: Act, gamma: float) -> dict[str, Any]:
        actions, log_probs, values, state = act(self._seen, self._state, self._starts)
        step = {
            "seen": self._seen.astype(np.float32),
            "starts": self._starts,
            "states": self._state,
            "actions": actions,
            "log_probs": log_probs,
            "values": values,
        }
        seen, rewards, ended, cut, info = self._envs.step(actions)
        rewards = rewards.astype(np.float32)
        self._count(rewards, ended | cut)
        if cut.any():
            # An episode that ran out of time continues with the estimated value.
            final = np.where(cut[:, None], _final(info, seen), seen).astype(np.float32)
            _, _, beyond, _ = act(final, state, np.zeros_like(self._starts))
            rewards = rewards + gamma * beyond * cut
        ends = (ended | cut).astype(np.float32)
        self._seen, self._state, self._starts = seen, state, ends
        return {**step, "rewards": rewards, "ends": ends}

    def _count(self, rewards: Floats, ends: npt.NDArray[np.bool_]) -> None:
        self._steps += len(rewards)
        self._sums += rewards
        self.returns += [float(total) for total in self._sums[ends]]
        self.ended_at += [self._steps] * int(ends.sum())
        self._sums[ends] = 0


def advantages_of(
    rewards: Floats, values: Floats, ends: Floats, last: Floats, discounts: Discounts
) -> Floats:
    """Estimates advantages (Schulman et al., "High-dimensional continuous control
    using generalized advantage estimation", 2016).

    Args:
      rewards: [N, T].
      values: [N, T].
      ends: [N, T], 1 where an episode ended with this step.
      last: [N], values after the last step.
      discounts: the discounts of the estimate.

    Returns:
      [N, T].
    """
    found = np.zeros_like(rewards)
    ahead, following = np.zeros_like(last), last
    for t in reversed(range(rewards.shape[1])):
        goes_on = 1 - ends[:, t]
        error = rewards[:, t] + discounts.gamma * following * goes_on - values[:, t]
        ahead = error + discounts.gamma * discounts.lam * goes_on * ahead
        found[:, t], following = ahead, values[:, t]
    return found


def _final(info: dict[str, Any], seen: Floats) -> Floats:
    rows = [
        new if old is None else old
        for old, new in zip(info["final_obs"], seen, strict=True)
    ]
    return np.stack(rows)
