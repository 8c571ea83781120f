"""Compares RLlib 2.9.3's own tower stack with the one on the migration page.

Two PPO policies with equal weights take the same batch of CartPole and the same
minibatches; after every step the towers' losses and statistics and the policy's
weights must agree. Otherwise exits with status 1 and names the step where they diverge.

    nox -s "clients(rllib)" [-- --short]
"""

import os
import sys
from argparse import ArgumentParser
from types import ModuleType

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # RLlib's models are of Keras 2
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "__main__":  # Help and wrong options do not wait for TensorFlow.
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="one case, one epoch")
    options = parser.parse_args()

# Before RLlib, which otherwise switches back to TensorFlow 1's behaviour.
import tensorflow  # noqa: F401

# isort: split
import gymnasium as gym
import numpy as np
import tree
from harness.docs_blocks import ROOT, files
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.ppo_tf_policy import PPOTF1Policy
from ray.rllib.evaluation.rollout_worker import RolloutWorker
from ray.rllib.policy import dynamic_tf_policy_v2

PAGE = ROOT / "docs" / "migration" / "rllib.md"
ROWS, MINIBATCH = 512, 128
# What varies: hidden layers on both sides of what reducers pack, clipping, states.
CASES = {
    "feed-forward": {"model": {"fcnet_hiddens": [32, 256, 256]}},
    "clipped": {"model": {"fcnet_hiddens": [32, 256, 256]}, "grad_clip": 0.5},
    "lstm": {
        "model": {
            "fcnet_hiddens": [64],
            "use_lstm": True,
            "lstm_cell_size": 80,
            "max_seq_len": 8,
        },
        "grad_clip": 0.5,
    },
}


class Policy(PPOTF1Policy):
    """PPO on two CPUs, where RLlib's fake GPUs would share one."""

    devices = property(lambda self: ["/cpu:0", "/cpu:1"], lambda self, devices: None)


def main(*, short):
    original = dynamic_tf_policy_v2.TFMultiGPUTowerStack
    ours = stack_of_the_page()
    for name in ["clipped"] if short else CASES:
        workers = [make_worker(stack, CASES[name]) for stack in (original, ours)]
        compare(name, *workers, epochs=1 if short else 4)


def stack_of_the_page():
    """Runs the page's adapter, and returns its class."""
    module = ModuleType("tower_stack")
    exec(compile(files(PAGE)["tower_stack.py"], str(PAGE), "exec"), vars(module))
    return module.TowerStack


def make_worker(stack, training):
    dynamic_tf_policy_v2.TFMultiGPUTowerStack = stack
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .framework("tf", tf_session_args={"device_count": {"CPU": 2}})
        .rollouts(num_rollout_workers=0, rollout_fragment_length=ROWS)
        .resources(num_gpus=2, _fake_gpus=True)
        .debugging(seed=0)
        .training(
            train_batch_size=ROWS,
            sgd_minibatch_size=MINIBATCH,
            lr=3e-3,
            vf_clip_param=100.0,
            **training,
        )
    )
    config.validate()
    return RolloutWorker(
        env_creator=lambda context: gym.make("CartPole-v1"),
        default_policy_class=Policy,
        config=config,
    )


def compare(name, theirs, ours, *, epochs):
    batch = theirs.sample().policy_batches["default_policy"]
    policies = [worker.get_policy() for worker in (theirs, ours)]
    policies[1].set_weights(policies[0].get_weights())
    loaded = [policy.load_batch_into_buffer(batch.copy()) for policy in policies]
    check(f"{name}: rows per device", *loaded)
    size = MINIBATCH // 2
    offsets = np.random.default_rng(0).permuted(
        np.tile(np.arange(loaded[0] // size), (epochs, 1)), axis=1
    )
    furthest = {"statistics": 0.0, "weights": 0.0}
    for step, offset in enumerate(offsets.ravel() * size):
        got = [policy.learn_on_loaded_batch(int(offset)) for policy in policies]
        weights = [policy.get_weights() for policy in policies]
        for what, both in (("statistics", got), ("weights", weights)):
            apart = check(f"{name}: {what} after step {step}", *both)
            furthest[what] = max(furthest[what], apart)
    statistics = sorted(got[0]["tower_1"]["learner_stats"])
    print(
        f"{name}: {offsets.size} steps of 2 x {size} rows; furthest apart: {furthest}"
    )
    print(f"  statistics of 2 towers: {', '.join(statistics)}")


def check(what, wanted, got):
    """Ends the program where two structures differ; returns by how much at most."""
    wanted, got = (dict(tree.flatten_with_path(each)) for each in (wanted, got))
    if wanted.keys() != got.keys():
        only = sorted(wanted.keys() ^ got.keys())
        sys.exit(f"{what}: one stack alone gives {only}")
    apart = 0.0
    for path, value in wanted.items():
        if value is None and got[path] is None:
            continue
        off_by = float(np.max(np.abs(np.subtract(got[path], value))))
        if not np.allclose(got[path], value, rtol=1e-4, atol=1e-5):
            sys.exit(f"{what}: {'/'.join(map(str, path))} differs by up to {off_by}")
        apart = max(apart, off_by)
    return apart


if __name__ == "__main__":
    main(short=options.short)
