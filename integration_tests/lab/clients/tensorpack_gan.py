"""tensorpack 0.11's example DCGAN, with these packages' towers and builders.

``nox -s "clients(tensorpack_gan)" -- CHECKOUT``, with a checkout of tensorpack, imports
``examples/GAN`` unchanged and trains on two logical CPUs: by its GANTrainer, alone and
with the two towers whose costs it averages; by the same with our contexts, towers and
device setter; and with our builders, which average gradients of G, then of D. After
every step variables and slots must be tensorpack's, from which each run goes on, as
this network amplifies rounding 10,000 times in three steps. Without a checkout nothing
is run.
"""

import argparse
import os
import sys
from pathlib import Path

# Before TensorFlow is imported: tensorpack's layers need Keras 2.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
if __name__ == "__main__":  # Help and wrong options do not wait for TensorFlow.
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?")
    checkout = parser.parse_args().checkout
    if checkout is None:
        print("Nothing was run: no checkout of tensorpack was given, after --.")
        sys.exit()
    sys.path.insert(0, str(checkout.resolve() / "examples" / "GAN"))

import itertools
from functools import partial
from types import ModuleType

import DCGAN
import GAN
import numpy as np
import tensorflow as tf
import tensorpack
from tensorpack.callbacks import Callback, RunOp
from tensorpack.graph_builder import LeastLoadedDeviceSetter
from tensorpack.input_source import TensorInput
from tensorpack.tfutils import tower as their_towers
from tensorpack.tfutils.sesscreate import NewSessionCreator

from tw_builders import tensorpack as ours
from tw_core import session_config

v1 = tf.compat.v1
v1.disable_v2_behavior()
v1.enable_resource_variables()

K, ROWS, SIDE, LATENT = 2, 4, 64, 100  # towers; images of each; their size; latents
STEPS = 5
CPUS = [f"/cpu:{k}" for k in range(K)]
TOLERANCE = 5e-6  # in one step, of weights and slots of order one
MOVED = 5e-4  # or more, by the weights in all steps
DRAW = np.random.default_rng(0)
IMAGES = DRAW.integers(0, 256, [50, SIDE, SIDE, 3]).astype(np.float32)


# The examples, on this TensorFlow


def adapt_examples():
    """Gives the examples TensorFlow 1's names, seeds, and CPUs for GPUs."""
    names = ModuleType("tensorflow")
    vars(names)["__getattr__"] = lambda name: getattr(v1, name)
    normal = v1.truncated_normal_initializer
    names.truncated_normal_initializer = partial(normal, seed=1)
    names.random_uniform = lambda *args, **options: v1.random_uniform(
        *args, seed=2 + context().index, **options
    )
    GAN.tf = DCGAN.tf = names
    # tensorpack's own can hang where there are as few threads as towers.
    GAN.StagingInput = lambda given: given
    GAN.LeastLoadedDeviceSetter = on_cpus(LeastLoadedDeviceSetter)


def context():
    return their_towers.get_current_tower_context()


def on_cpus(setter):
    return lambda device, _: setter(device.replace("gpu", "cpu"), CPUS)


def take_over():
    """Has tensorpack's modules and the examples use our contexts and towers."""
    names = set(ours.__all__) & set(vars(their_towers))
    pairs = [(getattr(their_towers, name), getattr(ours, name)) for name in names]
    loaded = [m for n, m in sys.modules.items() if n.split(".")[0] == "tensorpack"]
    for module, (theirs, own) in itertools.product([*loaded, GAN], pairs):
        for name, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, name, own)
    GAN.DataParallelBuilder = ours.DataParallelBuilder
    GAN.LeastLoadedDeviceSetter = on_cpus(ours.LeastLoadedDeviceSetter)


def images_of_tower():
    """Returns the images of the current tower in this step."""
    [step] = [v for v in v1.local_variables() if v.op.name == "step"]
    rows = (step * K + context().index) * ROWS + tf.range(ROWS)
    return [tf.gather(tf.constant(IMAGES), tf.math.floormod(rows, len(IMAGES)))]


# Our builders in its trainer


class Averaging(GAN.GANTrainer):
    """Averages the gradients of G, then those of D, where GANTrainer averages costs."""

    def __init__(self, builder, input, model):
        self.builder, self.model = builder, model
        self.optimizers, self.sync_ops = [], []
        super().__init__(input, model, num_gpu=K)

    def _build_multigpu_gan_trainer(self, input, model, num_gpu):
        self.tower_func = GAN.TowerFunc(self.gradients, model.get_input_signature())
        towers = self.builder.call_for_each_tower(
            lambda: self.tower_func(*input.get_input_tensors())
        )
        of_g, of_d = zip(*towers, strict=True)
        g_min = self.minimize(of_g)
        with tf.control_dependencies([g_min]):
            self.train_op = self.minimize(of_d)

    def gradients(self, *inputs):
        """Builds a tower; returns its gradients of G and D."""
        self.model.build_graph(*inputs)
        scope = f"{context().vs_name}/" if context().vs_name else ""
        self.model.collect_variables(f"{scope}gen", f"{scope}discrim")
        compute = self.model.get_optimizer().compute_gradients
        g = compute(self.model.g_loss, var_list=self.model.g_vars)
        return g, compute(self.model.d_loss, var_list=self.model.d_vars)

    def minimize(self, grads):
        numbers = itertools.count()
        built = self.builder.build(list(grads), lambda: self.optimizer(next(numbers)))
        if not isinstance(built, tuple):
            return built
        train_op, sync_op = built
        self.sync_ops.append(sync_op)
        self.register_callback(RunOp(sync_op, run_before=True, run_as_trigger=False))
        return train_op

    def optimizer(self, k):
        """Returns tower k's optimizer, of G and D alike; the first is the example's."""
        if k == len(self.optimizers):
            make = self.model.optimizer if k else self.model.get_optimizer
            self.optimizers.append(make())
        return self.optimizers[k]


# A run


class Record(Callback):
    """Keeps the variables after each step, and goes on from those of a reference."""

    def __init__(self, reference):
        self.reference, self.steps = reference, []

    def _setup_graph(self):
        # Two updates of D's moving averages race in every step, as in the example.
        self.variables = {
            v.op.name: v
            for v in v1.global_variables()
            if v.op.name.startswith(("gen/", "discrim/"))
            and not ("discrim/" in v.op.name and "/EMA" in v.op.name)
        }
        [step] = [v for v in v1.local_variables() if v.op.name == "step"]
        self.advance = step.assign_add(1).op

    def _before_train(self):
        self.start = self.trainer.sess.run(self.variables)

    def _trigger_step(self):
        session = self.trainer.sess
        self.steps.append(session.run(self.variables))
        session.run(self.advance)
        if self.reference is not None:
            wanted = self.reference.steps[len(self.steps) - 1]
            for name, variable in self.variables.items():
                variable.load(wanted[name], session)
            session.run(getattr(self.trainer, "sync_ops", []))


def train(make, reference=None):
    """Trains with a trainer of (input, model), and returns what was recorded."""
    with tf.Graph().as_default():
        v1.set_random_seed(0)
        local, zero = [v1.GraphKeys.LOCAL_VARIABLES], v1.zeros_initializer()
        v1.get_variable("step", [], tf.int32, zero, trainable=False, collections=local)
        model, record = DCGAN.Model(SIDE, ROWS, LATENT), Record(reference)
        trainer = make(TensorInput(images_of_tower, size=STEPS), model)
        trainer.train_with_defaults(
            callbacks=[record],
            monitors=[],
            session_creator=NewSessionCreator(config=session_config(num_cpus=K)),
            steps_per_epoch=STEPS,
            max_epoch=1,
        )
    return record


def difference(record, reference):
    """Returns the largest difference of any variable before and after any step."""
    pairs = [
        (record.start, reference.start),
        *zip(record.steps, reference.steps, strict=True),
    ]
    if any(own.keys() != other.keys() for own, other in pairs):
        return np.inf
    return max(np.abs(own[n] - other[n]).max() for own, other in pairs for n in own)


def main():
    """Returns 1 if any run differs from tensorpack's."""
    tensorpack.utils.logger._logger.setLevel("ERROR")
    adapt_examples()
    several = partial(GAN.GANTrainer, num_gpu=K)
    alone, reference = train(GAN.GANTrainer), train(several)
    start, end = reference.start, reference.steps[-1]
    moved = max(np.abs(end[n] - start[n]).max() for n in start if n.endswith("W"))
    print(f"{len(start)} variables; in {STEPS} steps weights move by {moved:.1e}")
    failed = moved < MOVED
    take_over()
    server, copies = (
        ours.SyncMultiGPUParameterServerBuilder(CPUS, "cpu"),
        ours.SyncMultiGPUReplicatedBuilder(CPUS, average=True, mode="gpu"),
    )
    runs = {
        "GANTrainer": (GAN.GANTrainer, alone),
        "GANTrainer of two towers": (several, reference),
        "parameter server": (partial(Averaging, server), reference),
        "replicated": (partial(Averaging, copies), reference),
    }
    for name, (make, wanted) in runs.items():
        apart = difference(train(make, wanted), wanted)
        print(f"{name}: largest difference {apart:.1e}", flush=True)
        failed |= not apart <= TOLERANCE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
