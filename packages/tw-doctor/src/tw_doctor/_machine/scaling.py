"""Weak scaling: images per second in training, with the same work for every tower.

The model and each tower's batch stay the same, however many towers there are. Each step
is compared with as many copies of the model that never reduce: they show what the
devices, the cores they share and their memory allow, which bounds any reduction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

import tw_core
import tw_reduce
from tw_core.devices import canonical_device
from tw_doctor._machine.measuring import ended
from tw_doctor._machine.race import Time, race
from tw_reduce import Reducer

_CLASSES, _RATE = 10, 0.01


@dataclass(frozen=True)
class Size:
    """The size of the convolutional network and of a tower's batch."""

    width: int  # channels of each layer
    side: int  # pixels
    batch: int  # images per tower
    layers: int = 6


CPU_SIZE, GPU_SIZE = Size(32, 16, 16), Size(256, 32, 256)


class Network(tf.Module):  # type: ignore[misc] # TensorFlow is untyped
    """Residual 3 x 3 convolutions, then a linear layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        w = size.width
        self.size = size
        self.kernels = [
            tf.Variable(tf.random.stateless_normal([3, 3, ins, w], [n, 0]) * 0.05)
            for n, ins in enumerate([3, *[w] * (size.layers - 1)])
        ]
        self.last = tf.Variable(tf.zeros([w, _CLASSES]))
        shape = [size.batch, size.side, size.side, 3]
        self.images = tf.Variable(
            tf.random.stateless_normal(shape, [0, 1]), trainable=False
        )
        self.labels = tf.Variable(tf.range(size.batch) % _CLASSES, trainable=False)

    def gradients(self) -> list[tf.Tensor]:
        """Returns the gradients of the mean loss over the tower's batch."""
        with tf.GradientTape() as tape:
            x = self.images.read_value()
            for kernel in self.kernels:
                y = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME"))
                x = x + y if x.shape == y.shape else y
            logits = tf.reduce_mean(x, [1, 2]) @ self.last
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                self.labels.read_value(), logits
            )
            loss = tf.reduce_mean(losses)
        return list(tape.gradient(loss, list(self.trainable_variables)))


def training_step(
    devices: Sequence[str], size: Size, reduce: Reducer | None
) -> Callable[[], Any]:
    """Returns a step of replicated training, which waits until its work is done.

    ``reduce`` makes mean gradients; None leaves each tower its own.
    """
    towers = tw_core.towers(devices)
    models = tw_core.replicate(towers, lambda tower: Network(size))

    def step() -> None:
        grads = tw_core.map_towers(
            lambda tower, model: model.gradients(), towers, models
        )
        for model, own in zip(models, reduce(grads) if reduce else grads, strict=True):
            for variable, grad in zip(model.trainable_variables, own, strict=True):
                with tf.device(variable.device):
                    variable.assign_sub(_RATE * grad)

    call = tf.function(step, autograph=False)
    return lambda: ended(call())


def measure_scaling(
    devices: Sequence[str], doing: Callable[[str], object], *, until: float
) -> dict[str, Any]:
    """Times training on 1, 2, 4, ... and all of the devices."""
    is_gpu = all("GPU" in canonical_device(device) for device in devices)
    size = GPU_SIZE if is_gpu else CPU_SIZE
    counts = [k for k in (1, 2, 4, 8, 16) if k < len(devices)] + [len(devices)]
    contenders: dict[tuple[int, bool], Callable[[], Any]] = {}
    for count in counts:
        doing(f"training steps of {count} towers")
        own = devices[:count]
        reduce = tw_reduce.mean(tw_reduce.all_reduce(own))
        contenders[count, True] = training_step(own, size, reduce)
        contenders[count, False] = training_step(own, size, None)
    times = race(
        contenders,
        (1, True),
        rounds=15,
        until=until,
        began=lambda name: doing(f"training steps of {name[0]} towers"),
        hopeless=float("inf"),
    )
    rows = [_row(count, size.batch, times) for count in counts]
    return {"size": vars(size), "rows": rows}


def _row(
    count: int, batch: int, times: dict[tuple[int, bool], Time]
) -> dict[str, float]:
    own, bound, one = times[count, True], times[count, False], times[1, True]
    return {
        "towers": count,
        "images_per_s": round(count * batch / own.seconds, 2),
        "bound_per_s": round(count * batch / bound.seconds, 2),  # without reducing
        "efficiency": round(one.ratio / own.ratio, 4),  # of K times one tower's rate
        "of_bound": round(bound.ratio / own.ratio, 4),
    }
