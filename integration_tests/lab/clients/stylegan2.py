"""A training loop in the shape of StyleGAN2's, with ``tw_ampopt.Optimizer``.

It trains G and D on two towers: lazy regularisation by optimizers that share slots,
path lengths with a mean in each tower, rounds that accumulate, loss scaling, a batch
that is not finite, and Gs, the moving average of G. After every step all of these are
compared with one device's, on which plain Adam applies NumPy's means in float64.

``nox -s "clients(stylegan2)" -- CHECKOUT``, with a checkout of NVlabs/stylegan2, also
trains with its own ``dnnlib.tflib.Optimizer``.
"""

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # Help and wrong options do not wait for TensorFlow.
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?")
    options = parser.parse_args()

import importlib
from functools import partial
from types import ModuleType

import numpy as np
import tensorflow as tf

from tw_ampopt import Optimizer
from tw_core import session_config, use_logical_cpus

v1 = tf.compat.v1
v1.disable_v2_behavior()
v1.enable_resource_variables()

K, ROWS, LATENT, PIXELS = 2, 4, 5, 16  # towers; images of a tower in a round; sizes
STEPS, BAD_STEP = 40, 7  # the second has an infinite pixel for D
INTERVALS = {"G": 4, "D": 16}
BETAS = [(0.0, 0.99), (0.5, 0.9)]  # the first are StyleGAN2's
SCALING = {"use_loss_scaling": True, "loss_scaling_init": 10, "loss_scaling_inc": 0.25}
SHAPES = {"G": [[LATENT, 6], [2, 6, PIXELS], [PIXELS]], "D": [[PIXELS, 7], [7], []]}
TOLERANCE = 1e-6  # of weights of order one; optimizers take gradients in float32


def make_networks():
    """Returns the variables of G and D, with the same values at every call."""
    draw = np.random.default_rng(0)
    return {
        network: [tf.Variable(draw.normal(size=shape)) for shape in shapes]
        for network, shapes in SHAPES.items()
    }


def generate(g, latents):
    """Returns images [n, PIXELS], and the latents of two layers [n, 2, 6]."""
    mapping, synthesis, bias = g
    mapped = tf.nn.softplus(latents @ mapping)
    both = tf.stack([mapped, tf.square(mapped)], axis=1)
    return tf.tanh(tf.einsum("nlz,lzp->np", both, synthesis)) + bias, both


def score(d, images):
    hidden, weights, bias = d
    return tf.linalg.matvec(tf.tanh(images @ hidden), weights) + bias


class Tower:
    """The placeholders and losses of one tower."""

    def __init__(self, networks):
        shapes = [[ROWS, LATENT], [ROWS, PIXELS], [2, PIXELS]]
        self.fed = [v1.placeholder(tf.float64, shape) for shape in shapes]
        latents, reals, noise = self.fed
        g, d = networks.values()
        fakes, scores = score(d, generate(g, latents)[0]), score(d, reals)
        [slopes] = tf.gradients(tf.reduce_sum(scores), [reals])  # arXiv:1801.04406
        losses = {
            "TrainG": tf.nn.softplus(-fakes),
            "RegG": self.path_loss(g, latents[:2], noise) * INTERVALS["G"],
            "TrainD": tf.nn.softplus(fakes) + tf.nn.softplus(-scores),
            "RegD": 5 * tf.reduce_sum(slopes**2, 1) * INTERVALS["D"],
        }
        self.losses = {name: tf.reduce_mean(loss) for name, loss in losses.items()}

    def path_loss(self, g, latents, noise):
        """Path length regularisation: arXiv:1912.04958, section 3.2."""
        images, styles = generate(g, latents)
        [slopes] = tf.gradients(tf.reduce_sum(images * noise), [styles])
        lengths = tf.sqrt(tf.reduce_mean(tf.reduce_sum(slopes**2, 2), 1))
        self.path_mean = tf.Variable(np.float64(0), trainable=False)
        moved = 0.99 * self.path_mean + 0.01 * tf.reduce_mean(lengths)
        with tf.control_dependencies([self.path_mean.assign(moved)]):
            return 2 * tf.square(lengths - moved)


class OneDevice:
    """Plain Adam, applied to the mean that NumPy takes over towers and rounds."""

    def __init__(self, _, share=None, minibatch_multiplier=None, **settings):
        adam = {key: own for key, own in settings.items() if key not in SCALING}
        self.adam = share.adam if share else v1.train.AdamOptimizer(**adam)
        self.log2 = share.log2 if share else tf.Variable(10.0, trainable=False)
        self.multiplier, self.towers, self.taken = minibatch_multiplier, [], []

    def get_loss_scaling_var(self, _):
        return self.log2

    def register_gradients(self, loss, variables):
        self.variables = variables
        self.towers += [tf.gradients(loss, variables, unconnected_gradients="zero")]

    def apply_updates(self):
        self.means = [v1.placeholder(v.dtype, v.shape) for v in self.variables]
        pairs = zip(self.means, self.variables, strict=True)
        good = [self.adam.apply_gradients(pairs), self.log2.assign_add(0.25)]
        self.ops = {True: good, False: self.log2.assign_sub(1.0)}
        return self.run

    def run(self, feeds):
        run = v1.get_default_session().run
        grads, rounds = run([self.towers, self.multiplier], feeds)
        self.taken += grads
        if len(self.taken) == rounds * K:
            means = [np.mean(own, axis=0) for own in zip(*self.taken, strict=True)]
            finite, self.taken = all(np.isfinite(own).all() for own in means), []
            run(self.ops[finite], feeds | dict(zip(self.means, means, strict=True)))


def make_optimizers(optimizer, betas, rate, multiplier):
    """Returns those of both losses and of lazy regularisation, by name."""
    made = {}
    for network, interval in INTERVALS.items():
        c = interval / (interval + 1)
        settings = {"learning_rate": rate * c, "minibatch_multiplier": multiplier}
        settings |= {"beta1": betas[0] ** c, "beta2": betas[1] ** c, "epsilon": 1e-8}
        main = optimizer(f"Train{network}", **settings, **SCALING)
        reg = optimizer(f"Reg{network}", share=main, **settings, **SCALING)
        made |= {f"Train{network}": main, f"Reg{network}": reg}
    return made


def train(optimizer, betas):
    """Returns [steps] of the values of each copy of G and D, and of all else."""
    draw, history, copies, towers = np.random.default_rng(1), [], [], []
    with v1.Session(graph=tf.Graph(), config=session_config()) as session:
        rate, size = v1.placeholder(tf.float32, []), v1.placeholder(tf.int32, [])
        optimizers = make_optimizers(optimizer, betas, rate, size // (K * ROWS))
        for k in range(K):
            alone = optimizer is OneDevice
            with tf.device("/cpu:0" if alone else f"/cpu:{k}"):
                if not (alone and copies):
                    copies.append(make_networks())
                towers.append(Tower(copies[-1]))
            for name, loss in towers[k].losses.items():
                optimizers[name].register_gradients(loss, copies[-1][name[-1]])
        ops = {name: own.apply_updates() for name, own in optimizers.items()}
        # Ours share one; StyleGAN2's optimizers each have their own.
        logs = [own.get_loss_scaling_var(loss.device) for own in optimizers.values()]
        logs = list({log.name: log for log in logs}.values())
        pairs = list(zip(copies[0]["G"], make_networks()["G"], strict=True))
        beta = 0.5 ** (tf.cast(size, tf.float64) / 100)
        average = [gs.assign(g + (gs - g) * beta) for g, gs in pairs]
        rest = [*(gs for _, gs in pairs), *(tower.path_mean for tower in towers)]
        rest.append(tf.add_n([log - 10.0 for log in logs]))
        values = [*([*own["G"], *own["D"]] for own in copies), rest]
        session.run(v1.global_variables_initializer())
        for step in range(STEPS):
            rounds = 1 if step < STEPS // 2 else 3
            for name, op in ops.items():
                if name.startswith("Reg") and step % INTERVALS[name[-1]]:
                    continue
                for _ in range(rounds):
                    feeds = {rate: 2e-4 * min(step, 10), size: rounds * K * ROWS}
                    for tower in towers:
                        feeds |= {own: draw.normal(size=own.shape) for own in tower.fed}
                    if (name, step) == ("TrainD", BAD_STEP):
                        feeds[towers[-1].fed[1]][0] = np.inf
                    op(feeds) if callable(op) else session.run(op, feeds)
            session.run(average, feeds)
            history.append(session.run(values))
    return history


def their_optimizer(checkout):
    """Imports ``dnnlib.tflib.Optimizer``, for which TensorFlow is 1.15."""
    theirs = ModuleType("tensorflow")
    vars(theirs)["__getattr__"] = lambda name: getattr(v1, name)
    theirs.contrib = ModuleType("tensorflow.contrib")
    theirs.VERSION = "1.15.0"  # without NCCL
    theirs.Variable = tf.Variable  # v1's is not a base of resource variables
    modules = {"tensorflow": theirs, "tensorflow.contrib": theirs.contrib}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules |= modules
    sys.path.insert(0, str(checkout.resolve()))
    found = importlib.import_module("dnnlib.tflib.optimizer")
    sys.modules |= before
    return found.Optimizer


def difference(history, reference):
    """Returns the largest difference of any value of any copy after any step."""
    return max(
        np.abs(a - b).max()
        for (*copies, rest), (one, alone) in zip(history, reference, strict=True)
        for got, want in [(rest, alone), *((copy, one) for copy in copies)]
        for a, b in zip(got, want, strict=True)
    )


def main(checkout):
    """Returns 1 if any run differs from one device's."""
    use_logical_cpus(K)
    adam, simple = "tensorflow.compat.v1.train.AdamOptimizer", "tw_ampopt.SimpleAdam"
    runs = {"Adam": Optimizer, "SimpleAdam": partial(Optimizer, tf_optimizer=simple)}
    if checkout is None:
        print("dnnlib.tflib.Optimizer was not run: no checkout was given, after --.")
    else:
        runs["dnnlib.tflib, Adam"] = partial(
            their_optimizer(checkout), tf_optimizer=adam
        )
    failed = False
    for betas in BETAS:
        reference = train(OneDevice, betas)
        for name, optimizer in runs.items():
            apart = difference(train(optimizer, betas), reference)
            print(f"{name}, betas {betas}: largest difference {apart:.1e}", flush=True)
            failed |= not apart <= TOLERANCE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(options.checkout))
