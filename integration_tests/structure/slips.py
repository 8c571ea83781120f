"""Slips of users, each of which a checker must find: ``nox -s lint`` reads this.

Without an error in a line, what ignores it there is an error: mypy's settings and the
line below say so. Keras is not installed where types are checked, and with it pyright
knows as little: it takes any attribute of a ``TowerModel`` for one of its base.
"""
# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable
from typing import Any

import tw_ampopt
import tw_builders
import tw_core
import tw_ranks
import tw_rlload
from tw_keras import LocalSteps, TowerModel
from tw_reduce import compression, reducer_for_mode


def misspelt(make: Callable[[], Any], towers: list[Any], rows: Any) -> None:
    TowerModel(make, variables="shard")  # type: ignore[arg-type] # pyright: ignore
    TowerModel(make, data="all")  # type: ignore[arg-type] # pyright: ignore
    TowerModel(make, uneven="end")  # type: ignore[arg-type] # pyright: ignore
    TowerModel(make, loss_reduction="mean")  # type: ignore[arg-type] # pyright: ignore
    TowerModel(make, wire_dtype="float8")  # type: ignore[arg-type] # pyright: ignore
    TowerModel(make, device=2)  # type: ignore[call-arg] # pyright: ignore
    LocalSteps(4, state="mean")  # type: ignore[arg-type] # pyright: ignore
    tw_ranks.join(engine="gloo")  # type: ignore[arg-type] # pyright: ignore
    tw_core.map_towers(len, towers, trace="one")  # type: ignore[arg-type] # pyright: ignore
    reducer_for_mode("ncl", [])  # type: ignore[arg-type] # pyright: ignore
    tw_builders.SyncMultiGPUReplicatedBuilder([0], mode="ncl")  # type: ignore[arg-type] # pyright: ignore
    tw_ampopt.TowerOptimizer(towers, on_nonfinite="skip")  # type: ignore[arg-type] # pyright: ignore
    tw_rlload.EpochFunction(rows, len, [], [], trace="one")  # type: ignore[arg-type] # pyright: ignore
    model = TowerModel(make, 2)
    model.fitt(rows)  # type: ignore[attr-defined]
    model.fit(rows, epoch=2)  # type: ignore[arg-type] # pyright: ignore
    model.fit(rows, epochs="2")  # type: ignore[arg-type] # pyright: ignore
    model.evaluate(rows, verbose="quiet")  # type: ignore[arg-type] # pyright: ignore
    model.predict()  # type: ignore[call-arg] # pyright: ignore
    model.compile("sgd", jit_compile="always")  # type: ignore[call-overload] # pyright: ignore


def right(make: Callable[[], Any], rows: Any) -> list[float]:
    model = TowerModel(make, 2, reducer=compression.power_sgd(), group=tw_ranks.join())
    model.compile("sgd", "mse", metrics=["mae"], jit_compile="auto")
    model.compile(d_optimizer="sgd", g_optimizer="sgd", run_eagerly=True)
    history = model.fit(rows, rows, 32, epochs=2, verbose=0, callbacks=[])
    model.own = model.evaluate(rows, return_dict=True)
    return [model.optimizer.learning_rate, *history.history["loss"]]
