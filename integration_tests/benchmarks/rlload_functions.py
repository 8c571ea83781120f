"""The contenders of the benchmark rlload that are TensorFlow 2."""

from collections.abc import Callable
from functools import partial
from typing import Any

import tensorflow as tf
from racing import Contender, checked
from rlload_session import EPOCH
from rlload_works import RATE, Work
from training import Weights, values_of

import tw_core
import tw_rlload

v1 = tf.compat.v1


class Functions:
    """All contenders of TensorFlow 2."""

    def __init__(self, work: Work, want: list[Any]) -> None:
        self.work, (self.x, self.y), self.want = work, work.columns(), want

    def built(self) -> list[Contender]:
        makers = [
            self.epoch,
            self.range_and_slice,
            self.range_and_slice_inside,
            self.from_tensors,
        ]
        return [make() for make in makers]

    def epoch(self) -> Contender:
        work, model = self.work, Weights(self.work.weights())
        specs = {"x": tf.TensorSpec([None, *work.shape], work.dtype)}
        specs["y"] = tf.TensorSpec([None])
        batch = tw_rlload.DeviceBatch(
            tw_core.towers(["/cpu:0"]), specs, max_per_device_batch_size=work.step
        )
        function = tw_rlload.EpochFunction(
            batch,
            lambda own, inputs: work.loss(own.all, inputs["x"], inputs["y"]),
            [model],
            [v1.train.GradientDescentOptimizer(RATE)],
        )
        batch.load({"x": self.x, "y": self.y})

        def run() -> None:
            function.run_epochs(1)

        return self.checked(EPOCH, run, model)

    def range_and_slice(self) -> Contender:
        """A dataset of numbers, in Python, and a call a step that slices."""
        work, model = self.work, Weights(self.work.weights())
        sliced = tf.function(self.sliced_step_of(model))
        starts = tf.data.Dataset.range(0, work.rows, work.step)

        def run() -> None:
            for start in starts:
                sliced(start)

        return self.checked("tf.data range and slice", run, model)

    def range_and_slice_inside(self) -> Contender:
        """The same with the loop over the dataset inside of one function."""
        work, model = self.work, Weights(self.work.weights())
        sliced = self.sliced_step_of(model)
        starts = tf.data.Dataset.range(0, work.rows, work.step)

        @tf.function
        def epoch() -> None:
            for start in starts:
                sliced(start)

        return self.checked("tf.data range and slice, one call", epoch, model)

    def from_tensors(self) -> Contender:
        """A dataset of whole minibatches, in Python."""
        work, model = self.work, Weights(self.work.weights())
        step = tf.function(self.step_of(model))
        x = self.x.reshape(-1, work.step, *work.shape)
        rows = tf.data.Dataset.from_tensor_slices((x, self.y.reshape(-1, work.step)))
        rows = rows.prefetch(tf.data.AUTOTUNE)

        def run() -> None:
            for x, y in rows:
                step(x, y)

        return self.checked("tf.data from memory, prefetched", run, model)

    def sliced_step_of(self, model: Weights) -> Callable[[Any], None]:
        step, size = self.step_of(model), self.work.step
        x, y = tf.constant(self.x), tf.constant(self.y)
        return lambda start: step(x[start : start + size], y[start : start + size])

    def step_of(self, model: Weights) -> Callable[[Any, Any], None]:
        optimizer = v1.train.GradientDescentOptimizer(RATE)

        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = self.work.loss(model.all, x, y)
            grads = tape.gradient(loss, model.all)
            optimizer.apply_gradients(zip(grads, model.all, strict=True))

        return step

    def checked(self, name: str, run: Callable[[], None], model: Weights) -> Contender:
        read = partial(values_of, model)
        return checked(name, run, read, self.want, config="tf.function")
