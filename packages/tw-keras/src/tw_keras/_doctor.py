"""This package's check for ``tw-doctor``, which finds it through an entry point."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import tw_keras


def checks(devices: Sequence[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields the check's name and its function, which raises an error if it fails.

    ``devices``: the towers' devices, at least two.
    """
    yield "TowerModel", partial(_check_tower_model, devices)


def _check_tower_model(devices: Sequence[str]) -> None:
    import keras

    def make_model() -> Any:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        return keras.Sequential([keras.Input([2]), dense])

    model = tw_keras.TowerModel(make_model, devices)
    model.compile(keras.optimizers.SGD(0.25), "mse")
    rows = 4 * len(devices)
    x = np.tile(np.eye(2, dtype=np.float32), (rows // 2, 1))
    model.fit(x, np.zeros([rows, 1], np.float32), batch_size=rows, verbose=0)
    # Half of the rows are for each weight, so the gradient of mean((w x)^2) is w.
    for k, tower in enumerate(model.towers):
        got = tower.get_weights()[0]
        if not np.allclose(got, 0.75, rtol=2.0**-9):  # float16's rounding, twice
            raise AssertionError(f"variable 0 of tower {k} is {got} instead of 0.75")
