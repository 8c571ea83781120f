"""Ranks send the gradients of ``fit`` in a narrow dtype, and add them in float32."""

import keras
import numpy as np
import pytest
from programs import rank_wire
from programs.rank_groups import Alone

from tw_ampopt import TowerOptimizer
from tw_core.testing import CPUS
from tw_keras import TowerModel
from tw_reduce import compression


@pytest.mark.slow
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_gradients_are_rounded_as_they_are_sent_and_nowhere_else(groups, wire, towers):
    wanted = rank_wire.by_numpy(wire)
    for weights in groups(2).call("rank_wire:fits", wire, towers):
        for own in weights:
            for got, want in zip(own, wanted, strict=True):
                np.testing.assert_array_equal(got, want)


class Recording(keras.layers.Layer):
    def build(self, shape):
        self.record = self.add_weight(shape=[], initializer="ones", dtype="float32")
        self.record.overwrite_with_gradient = True

    def call(self, inputs):
        return inputs * self.record


def recording():
    own = [Recording(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input([4]), *own])


def narrow(make=rank_wire.make, **options):
    given = {"group": Alone(), "wire_dtype": "float16", **options}
    return TowerModel(make, CPUS[:2], **given)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"group": None}, "wire_dtype='float16' needs a group of ranks"),
        ({"local_steps": 2}, "with local steps they send other things"),
        ({"variables": "sharded"}, "with sharded variables they send other things"),
        (
            {"reducer": compression.power_sgd()},
            "with reducer with memory they send other things",
        ),
    ],
    ids=lambda own: "" if isinstance(own, str) else next(iter(own)),
)
def test_a_dtype_is_refused_where_ranks_do_not_send_gradients_in_it(options, says):
    with pytest.raises(ValueError, match=says):
        narrow(**options)


def test_a_dtype_is_refused_with_an_optimizer_that_sends_what_it_accumulates():
    model = narrow()
    variables = [own.trainable_variables for own in model.towers]
    own = TowerOptimizer(variables, accumulation_steps=2)
    model.compile(own, "mse")
    with pytest.raises(ValueError, match="not used by TowerOptimizer, which sends"):
        model.fit((rank_wire.X[0, 0], rank_wire.IDS[0, 0]), rank_wire.Y[0, 0])


def test_a_dtype_is_refused_with_layers_whose_records_it_would_round():
    model = narrow(recording)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"record their largest.* wire_dtype, would"):
        model.fit(rank_wire.X[0, 0], rank_wire.Y[0, 0], verbose=0)
