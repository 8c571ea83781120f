"""Handles find what a tower has by the names the model gave."""

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


def test_a_tensor_is_found_by_its_name_in_the_tower(func):
    assert func.towers[0].get_tensor("loss").name == "tower0/loss:0"
    assert func.towers[1].get_tensor("loss:0").name == "tower1/loss:0"
    assert func.towers[1]["loss"].name == "tower1/loss:0"


def test_an_input_is_found_by_the_name_in_the_signature(func, graph):
    image = graph.get_tensor_by_name("image:0")
    assert func.towers[1].get_tensor("image") is image
    assert func.towers[1].get_tensor("image:0") is image
    assert func.towers[1].get_tensor("k").name == "tower1/constant:0"


def test_an_input_goes_before_a_tensor_of_its_name(graph):
    def renames(x):
        return tf.identity(x + 1, name="x")

    func = TowerFunc(renames, [tf.TensorSpec([], name="x")])
    x = tf.constant(1.0)
    with TrainTowerContext("tower0"):
        func(x)
    assert func.towers[0].get_tensor("x") is x


def test_another_output_of_the_inputs_name_is_not_the_input(func):
    with pytest.raises(
        KeyError, match="no input 'image:1' and no tensor 'tower0/image"
    ):
        func.towers[0].get_tensor("image:1")


def test_a_missing_tensor_is_named_with_the_inputs(func):
    want = r"TowerHandle\('tower1'\): .*no tensor 'tower1/lost:0'; .*\['image', 'k'\]"
    with pytest.raises(KeyError, match=want):
        func.towers[1].get_tensor("lost")


def test_several_names_give_several_tensors(func):
    found = func.towers[0].get_tensors(["loss", "k"])
    assert [t.name for t in found] == ["tower0/loss:0", "tower0/Const:0"]


@pytest.mark.parametrize(
    ("which", "name"), [(0, "w:0"), (1, "tower1/w:0"), ("predict", "w:0")]
)
def test_a_variable_is_found_by_its_name_in_the_towers_scope(func, which, name):
    handle = func.towers[which]
    for found in (handle.get_variable("w"), *handle.get_variables(["w:0"])):
        assert isinstance(found, tf.Variable)
        assert found.name == name


def test_a_variable_is_found_in_brackets_where_no_tensor_has_the_name(func, graph):
    with TrainTowerContext("tower2", "own", index=1, total=2):
        func(graph.get_tensor_by_name("image:0"), tf.constant(0.0))
    assert func.towers["tower2"]["w"].name == "own/w:0"


def test_local_variables_are_found_too(graph):
    func = TowerFunc(lambda: v1.get_local_variable("count", []), [])
    with TrainTowerContext("tower0"):
        count = func()
    assert func.towers[0].get_variable("count") is count


def test_a_missing_variable_is_named_with_those_there_are(func):
    want = r"no variables 'tower1/b:0' in the graph, which has \['tower1/w:0', 'w:0'\]"
    with pytest.raises(KeyError, match=want):
        func.towers[1].get_variable("b")


def test_a_handle_knows_its_tower_inputs_and_outputs(func, graph):
    handle = func.towers[1]
    assert (handle.ns_name, handle.vs_name) == ("tower1", "tower1")
    assert handle.is_training
    assert handle.inputs[0] is graph.get_tensor_by_name("image:0")
    assert handle.outputs["loss"].name == "tower1/mul:0"
    assert repr(handle) == "TowerHandle('tower1')"


def test_a_handle_knows_what_its_tower_added_to_a_collection(func):
    for which in (0, 1, 2):
        handle = func.towers[which]
        assert handle.get_collection("mine") == [handle.outputs["loss"]]
        assert handle.get_collection(name="mine") == [handle.outputs["loss"]]


# All towers.


def test_handles_are_found_by_position_and_name(func):
    assert len(func.towers) == 3
    assert [h.ns_name for h in func.towers] == ["tower0", "tower1", "predict"]
    assert func.towers["tower1"] is func.towers[1]
    assert func.towers[-1] is func.towers["predict"]
    assert "tower1" in func.towers
    assert func.towers[1] in func.towers
    assert "tower9" not in func.towers


def test_handles_are_told_apart_by_what_they_are_for(func):
    assert [h.ns_name for h in func.towers.training()] == ["tower0", "tower1"]
    assert [h.ns_name for h in func.towers.inference()] == ["predict"]
    assert isinstance(func.towers[:1], TowerHandles)


def test_of_several_towers_of_one_name_the_latest_is_found():
    func = TowerFunc(lambda x: x + 1, [tf.TensorSpec([None], name="x")])

    @tf.function(autograph=False)
    def traced(x):
        with TrainTowerContext("tower0"):
            return func(x)

    traced(tf.zeros([2]))
    traced(tf.zeros([3]))
    assert func.towers["tower0"].inputs[0].shape == [3]
    assert len(func.towers) == 2


def test_a_missing_tower_is_named_with_those_there_are(func):
    with pytest.raises(
        KeyError, match=r"no tower 'tower9'; there are \['tower0', 'tow"
    ):
        func.towers["tower9"]
    with pytest.raises(IndexError):
        func.towers[9]


# In a function.


def test_a_function_finds_tensors_at_once_and_variables_after_the_trace():
    w = tf.Variable([1.0], name="w")
    func = TowerFunc(
        lambda x: tf.reduce_sum(x * w, name="loss"), [tf.TensorSpec([1], name="x")]
    )

    @tf.function(autograph=False)
    def traced(x):
        with TrainTowerContext("tower0"):
            loss = func(x)
        assert func.towers[-1].get_tensor("loss") is loss
        return loss

    assert traced(tf.constant([3.0])) == 3.0
    assert func.towers[-1].get_variable("w") is w


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
