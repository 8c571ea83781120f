"""Views are saved, restored and started from checkpoints as variables of their own."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tw_core.flat_variables import FlatVariables

v1 = tf.compat.v1
SHAPES = {
    **{"net/a": (3,), "net/b": (2, 2), "net/in/c": (), "d": (4, 1)},
    **{"net/wide": (40, 40), "net/double": (5,), "net/in/doubles": (2, 3)},
}


def values(start):
    """What the variables hold: other numbers for another start."""
    return {
        name: start + np.arange(np.prod(shape)).reshape(shape)
        for name, shape in SHAPES.items()
    }


class Built:
    """Variables, flat or not; ``inside`` is called in the scope that makes them."""

    def __init__(self, *, flat, start=0.0, inside=lambda: None):
        self.graph = tf.Graph()
        with self.graph.as_default(), FlatVariables(4096 if flat else 0).scope():
            self.variables = {
                name: v1.get_variable(
                    name,
                    initializer=value.astype("f8" if "double" in name else "f4"),
                )
                for name, value in values(start).items()
            }
            inside()
        self.session = v1.Session(graph=self.graph)

    def initialised(self):
        with self.graph.as_default():
            self.session.run(v1.global_variables_initializer())
            assert not self.session.run(v1.report_uninitialized_variables()).size
        return self

    def saver(self, names=None):
        """Of all that trains, or of some."""
        own = names and [self.variables[name] for name in names]
        return v1.train.Saver(own or v1.trainable_variables())

    def save(self, folder, names=None):
        with self.graph.as_default():
            return self.saver(names).save(self.session, str(folder / "m"))

    def restore(self, path, names=None):
        with self.graph.as_default():
            self.saver(names).restore(self.session, path)

    def read(self):
        with self.graph.as_default():
            tensors = {n: v.read_value() for n, v in self.variables.items()}
        return self.session.run(tensors)


def check(got, want):
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


def some(found, names):
    return {name: found[name] for name in names}


def written(path):
    return {name: tuple(shape) for name, shape in tf.train.list_variables(path)}


FROM_TO = pytest.mark.parametrize("source", ["flat", "plain"])
INTO = pytest.mark.parametrize("target", ["flat", "plain"])


NAMES = st.lists(st.sampled_from(list(SHAPES)), min_size=1, unique=True)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.booleans(), st.booleans(), NAMES, st.integers(1, len(SHAPES)))
@example(True, True, ["net/b"], 1)
@example(False, True, list(SHAPES), len(SHAPES))
def test_any_subsets_go_from_graph_to_graph(
    tmp_path_factory, is_flat, gets_flat, saved, count
):
    first = Built(flat=is_flat).initialised()
    second = Built(flat=gets_flat, start=100.0)
    if saved != list(SHAPES):  # All that is restored needs no initializer.
        second.initialised()
    for built in (first, second):
        with built.graph.as_default():  # Other savers change nothing.
            every = v1.trainable_variables() + v1.global_variables()
            v1.train.Saver(list({id(v): v for v in every}.values()))
            built.saver(list(SHAPES)[:2])
    path = first.save(tmp_path_factory.mktemp("savers"), saved)
    assert written(path) == {name: SHAPES[name] for name in saved}
    restored = saved[:count]
    second.restore(path, restored)
    check(second.read(), values(100.0) | some(values(0.0), restored))


def test_a_saver_that_was_given_up_leaves_nothing_behind(tmp_path):
    first = Built(flat=True).initialised()
    wide = first.variables["net/wide"]
    with first.graph.as_default(), pytest.raises(ValueError, match="same name"):
        v1.train.Saver([first.variables["net/a"], wide, wide])
    with first.graph.as_default():
        flat = first.variables["net/a"].flat
        held = flat.gather_parts([0])["VARIABLE_VALUE"]()  # as by a saver that is kept
        assert [spec.name for spec in held.specs] == ["net/a"]
    assert written(first.save(tmp_path, ["net/b"])) == {"net/b": (2, 2)}


MAPS = {
    "scope to scope": ({"net/": "net/"}, [n for n in SHAPES if n != "d"]),
    "all": ({"/": "/"}, list(SHAPES)),
    "by name": ({"net/a": "net/a", "d": "d"}, ["net/a", "d"]),
}


@pytest.mark.parametrize("is_inside", [False, True], ids=["after", "in the scope"])
@FROM_TO
@INTO
@pytest.mark.parametrize("given_map", MAPS)
def test_variables_start_from_a_checkpoint(
    source, target, given_map, is_inside, tmp_path
):
    path = Built(flat=source == "flat").initialised().save(tmp_path)
    assigned, started = MAPS[given_map]

    def start():
        v1.train.init_from_checkpoint(path, assigned)

    inside = start if is_inside else lambda: None
    second = Built(flat=target == "flat", start=100.0, inside=inside)
    if not is_inside:
        with second.graph.as_default():
            start()
    second.initialised()
    check(second.read(), values(100.0) | some(values(0.0), started))


def test_a_view_starts_from_a_variable_of_another_name(tmp_path):
    path = Built(flat=False).initialised().save(tmp_path)
    second = Built(flat=True, start=100.0)
    one, other = (second.variables[name] for name in ("net/double", "net/in/c"))
    with second.graph.as_default():
        for checkpoint in (path, second.initialised().save(tmp_path / "other")):
            own = {"net/double": one, "net/in/c": other}
            v1.train.init_from_checkpoint(checkpoint, own)
        v1.train.init_from_checkpoint(path, {"net/in/c": other})
        with pytest.raises(ValueError, match=r"Shape of variable d:0 \(\(4, 1\)\)"):
            v1.train.init_from_checkpoint(path, {"net/a": second.variables["d"]})
        second.initialised()
    check(second.read(), values(100.0) | {"net/in/c": 0.0})


def test_a_saver_in_the_scope_is_refused():
    def save():
        with pytest.raises(
            RuntimeError, match=r"net/a:0.save: .*scope .* is left; ask"
        ):
            v1.train.Saver([v for v in v1.trainable_variables() if "net/a" in v.name])

    Built(flat=True, inside=save)
