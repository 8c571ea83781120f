"""The programs of the gallery train over towers as plain Keras does on one device.

In short they see few rows, over four towers, of which some get none, and some over
fewer. With ``TOWERS_GALLERY=full``, as ``nox -s full -- gallery`` sets it, each trains
as it does for a user, those with dropout or float16 from five seeds.
"""

import os
import sys
from functools import cache, partialmethod

import pytest
from programs import keras_gallery
from programs.keras_gallery import (
    COMPRESSED,
    DETERMINISTIC,
    FOLDER,
    PROGRAMS,
    RANDOM,
    TOWERS,
    difference,
    distance,
    last_losses,
    losses,
    programs,
    train,
    train_model,
)

from tw_keras import TowerModel

FULL = os.environ.get("TOWERS_GALLERY") == "full"
SAME = 1e-6
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900 if FULL else 300)]


def settings(name):
    return {} if FULL else keras_gallery.DETERMINISTIC[name]


@cache
def on_one_device(name):
    return train_model(name, None, "float64", **settings(name))


DRAWING = {"contrastive", "gan", "vae"}  # XLA draws other random numbers in a step.
# In short all ten are not needed to see what one, two and three towers do.
FEWER = {
    "contrastive": [3],
    "digits": [2],
    "recurrent": [3],
    "regression": [1],
    "gan": [2],
    "vae": [3],
}
TRAINED = [
    (name, towers)
    for name in DETERMINISTIC
    for towers in (TOWERS if FULL else [*FEWER.get(name, []), 4])
]


@pytest.mark.parametrize(("name", "towers"), TRAINED)
def test_losses_and_weights_are_those_of_one_device(name, towers, capsys):
    many, trained = train_model(name, towers, "float64", **settings(name))
    one, weights = on_one_device(name)
    of_losses, of_weights = difference(many, one), distance(trained, weights)
    with capsys.disabled():
        if FULL:
            own = f"losses {of_losses:.1e}, weights {of_weights:.1e}"
            print(f"\n{name}.py, {towers} towers: {own}")
    assert of_losses < SAME
    assert of_weights < SAME


@pytest.mark.parametrize("name", sorted(DETERMINISTIC.keys() - DRAWING))
def test_compiled_by_xla_the_losses_are_those_of_one_device(name, monkeypatch):
    compiled = partialmethod(TowerModel.compile, jit_compile=True)
    monkeypatch.setattr(TowerModel, "compile", compiled)
    many = train(name, 2, "float64", **settings(name))
    assert difference(many, on_one_device(name)[0]) < SAME


@pytest.mark.skipif(FULL, reason="nox -s full -- gallery compares five seeds")
@pytest.mark.parametrize("name", (*RANDOM, *COMPRESSED))
def test_those_with_random_steps_learn(name):
    history = train(name, 3, **(RANDOM | COMPRESSED)[name])
    assert losses(history)[0][-1] < 0.99 * losses(history)[0][0]


@cache
def of_five_seeds(name):
    return last_losses(name, None)


@pytest.mark.skipif(not FULL, reason="takes minutes: nox -s full -- gallery")
@pytest.mark.parametrize("towers", TOWERS)
@pytest.mark.parametrize("name", RANDOM)
def test_those_with_random_steps_lie_within_the_spread_of_five_seeds(name, towers):
    one = of_five_seeds(name)
    assert one.min() <= last_losses(name, towers).mean() <= one.max()


GATHERS = ["from tw_core.synchronized import gather", "views = gather(views)"]


@pytest.mark.slow(by_day=True)
@pytest.mark.parametrize("name", PROGRAMS)
def test_two_lines_are_not_plain_keras_beside_those_that_gather(name):
    with programs():
        import gallery
    path = FOLDER / f"{name}.py"
    options = ", **own" if name in COMPRESSED else ""
    marked = gallery.marked_lines(path)
    assert [line for line in marked if "gather" in line] == (
        GATHERS if name == "contrastive" else []
    )
    assert [line for line in marked if "gather" not in line] == [
        "from tw_keras import TowerModel",
        f"model = TowerModel(make_model, devices(towers){options})",
    ]
    plain = gallery.plain_source(path)
    assert "    model = make_model()\n" in plain
    assert "tw_" not in plain
    assert "TowerModel" not in plain


@pytest.mark.slow(by_day=True)
def test_there_are_twelve_programs_and_the_page_lists_them():
    found = {path.stem for path in FOLDER.glob("*.py")} - {"gallery"}
    assert found == set(PROGRAMS)
    assert len(found) == 12
    page = FOLDER.parents[1] / "tutorials" / "gallery.md"
    text = page.read_text()
    assert [name for name in PROGRAMS if f"`{name}.py`" not in text] == []


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ([], "2 towers"),
        (["--towers", "3", "--float64"], "3 towers"),
        (["--plain"], "one device, plain Keras"),
    ],
)
def test_a_program_runs_with_its_options(arguments, where, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["regression.py", "--epochs", "2", *arguments])
    with programs():
        import gallery

        import regression

        monkeypatch.setattr(gallery.tw_core, "use_logical_cpus", lambda count: None)
        gallery.run(regression.main, regression.__file__)
    said = capsys.readouterr().out
    assert said.startswith(f"After 2 epochs on {where}:\n")
    assert "\n  val_loss" in said


def test_wrong_options_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["digits.py", "--towers", "0"])
    with programs(), pytest.raises(SystemExit):
        import gallery

        gallery.run(None, None)
    assert "--towers must be at least 1; got 0" in capsys.readouterr().err
