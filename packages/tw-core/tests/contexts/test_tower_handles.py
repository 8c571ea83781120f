"""A tower function remembers its towers, whose handles find things by their names."""

from types import SimpleNamespace

import pytest
import tensorflow as tf

from tw_core import TrainTowerContext
from tw_core.contexts import PredictTowerContext, TowerFunc, TowerHandles

v1 = tf.compat.v1
SIGNATURE = [tf.TensorSpec([None, 3], tf.float32, "image"), tf.TensorSpec([], name="k")]


def model(image, k):
    w = v1.get_variable("w", [3, 1], initializer=v1.ones_initializer())
    loss = tf.reduce_sum(image @ w, name="loss") * k
    v1.add_to_collection("mine", loss)
    return {"loss": loss}


@pytest.fixture
def func(graph):
    """Two training towers, the second with variables of its own, and one more."""
    func = TowerFunc(model, SIGNATURE)
    image = v1.placeholder(tf.float32, [None, 3], name="image")
    with TrainTowerContext("tower0", index=0, total=2):
        func(image, tf.constant(1.0))
    with TrainTowerContext("tower1", "tower1", index=1, total=2):
        func(image, tf.constant(2.0, name="constant"))
    with (
        v1.variable_scope(v1.get_variable_scope(), reuse=True),
        PredictTowerContext("predict"),
    ):
        func(image, tf.constant(3.0))
    return func


# One tower.


def test_a_tensor_or_input_is_found_by_its_name_in_the_tower(func, graph):
    first, second, _ = func.towers
    image = graph.get_tensor_by_name("image:0")
    assert first.get_tensor("loss").name == "tower0/loss:0"
    assert second.get_tensor("loss:0").name == second["loss"].name == "tower1/loss:0"
    assert second.get_tensor("image") is second.get_tensor("image:0") is image
    assert second.get_tensor("k").name == "tower1/constant:0"
    found = first.get_tensors(["loss", "k"])
    assert [t.name for t in found] == ["tower0/loss:0", "tower0/Const:0"]
    renames = TowerFunc(lambda x: tf.identity(x, "x"), [tf.TensorSpec([], name="x")])
    with TrainTowerContext("tower2"):
        renames(image)
    assert renames.towers[0].get_tensor("x") is image  # before a tensor of its name


@pytest.mark.parametrize(
    ("which", "name"), [(0, "w:0"), (1, "tower1/w:0"), ("predict", "w:0")]
)
def test_a_variable_is_found_by_its_name_in_the_towers_scope(func, which, name):
    handle = func.towers[which]
    for own in (handle.get_variable("w"), *handle.get_variables(["w:0"])):
        assert isinstance(own, tf.Variable)
        assert own.name == name
    with TrainTowerContext("last", "own", index=1, total=2):
        func(handle.inputs[0], tf.constant(0.0))
    assert func.towers["last"]["w"].name == "own/w:0"  # no tensor has the name
    counts = TowerFunc(lambda: v1.get_local_variable("count", []), [])
    with TrainTowerContext("tower2"):
        count = counts()
    assert counts.towers[0].get_variable("count") is count


@pytest.mark.parametrize(
    ("find", "says"),
    [
        (lambda t: t[0].get_tensor("image:1"), "'image:1' and no tensor 'tower0/image"),
        (
            lambda t: t[1].get_tensor("a"),
            r"'tower1'\): .*'tower1/a:0'; .*\['image', 'k'",
        ),
        (
            lambda t: t[1].get_variable("b"),
            r"'tower1/b:0' .* has \['tower1/w:0', 'w:0'\]",
        ),
        (lambda t: t["tower9"], r"no tower 'tower9'; there are \['tower0', 'tow"),
        (lambda t: t[9], "index"),
    ],
)
def test_what_is_not_there_is_named_with_what_there_is(func, find, says):
    with pytest.raises((KeyError, IndexError), match=says):
        find(func.towers)


def test_a_handle_knows_its_towers_inputs_outputs_and_collections(func, graph):
    handle = func.towers[1]
    assert (handle.ns_name, handle.vs_name) == ("tower1", "tower1")
    assert handle.is_training
    assert handle.inputs[0] is graph.get_tensor_by_name("image:0")
    assert handle.outputs["loss"].name == "tower1/mul:0"
    assert repr(handle) == "TowerHandle('tower1')"
    for own in func.towers:
        added = own.outputs["loss"]
        assert own.get_collection("mine") == own.get_collection(name="mine") == [added]


# All towers.


def test_handles_are_found_by_position_and_name(func):
    assert len(func.towers) == 3
    assert [h.ns_name for h in func.towers] == ["tower0", "tower1", "predict"]
    assert func.towers["tower1"] is func.towers[1]
    assert func.towers[-1] is func.towers["predict"]
    assert "tower1" in func.towers
    assert func.towers[1] in func.towers
    assert "tower9" not in func.towers
    assert [h.ns_name for h in func.towers.training()] == ["tower0", "tower1"]
    assert [h.ns_name for h in func.towers.inference()] == ["predict"]
    assert isinstance(func.towers[:1], TowerHandles)


# In a function.


def test_a_function_finds_tensors_at_once_and_variables_after_the_latest_trace():
    w = tf.Variable([1.0], name="w")
    func = TowerFunc(
        lambda x: tf.reduce_sum(x * w, name="loss"), [tf.TensorSpec([None], name="x")]
    )

    @tf.function(autograph=False)
    def traced(x):
        with TrainTowerContext("tower0"):
            loss = func(x)
        assert func.towers[-1].get_tensor("loss") is loss
        return loss

    for size in (1, 2):
        assert traced(tf.ones([size])) == size
        assert func.towers["tower0"].inputs[0].shape == [size]
        assert func.towers["tower0"].get_variable("w") is w
    assert len(func.towers) == 2


def test_variables_of_one_name_are_refused_rather_than_guessed():
    replicas = [tf.Variable(1.0, name="w") for _ in range(2)]
    func = TowerFunc(lambda: replicas[0] + replicas[1], [])

    @tf.function(autograph=False)
    def traced():
        with TrainTowerContext("tower0"):
            return func()

    traced()
    with pytest.raises(KeyError, match=r"2 variables 'w:0' in the graph"):
        func.towers[0].get_variable("w")


# The function itself.


def test_a_function_remembers_towers_that_were_built_and_is_wrapped_once(graph):
    fail = []

    def both(image, k):
        if fail:
            raise KeyError("boom")
        return k, image

    func = TowerFunc(both, SIGNATURE)
    with TrainTowerContext("tower0"):
        assert func(1, 2) == (2, 1)
    assert func.towers[0].inputs == [1, 2]
    assert func.towers[0].outputs == (2, 1)
    again = TowerFunc(func, [])
    assert again is func
    assert again.input_signature == tuple(SIGNATURE)
    fail.append(True)
    with pytest.raises(KeyError, match="boom"), TrainTowerContext("tower1"):
        func(1, 2)
    with pytest.raises(RuntimeError, match="TowerFunc: call it under a tower context"):
        func(1, 2)
    assert len(func.towers) == 1


@pytest.mark.parametrize("name", ["a:0", "a/b", "a b", "", None, 3])
def test_an_input_name_that_would_not_be_found_is_refused(name):
    with pytest.raises(ValueError, match="TowerFunc: every input needs a name of its "):
        TowerFunc(print, [SimpleNamespace(name=name)])
