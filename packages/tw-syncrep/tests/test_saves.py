"""Checkpoints of a run with backups hold one step, though rounds go on meanwhile.

A private module is imported, as a hold that others end takes a chief that stands still.
"""

import numpy as np
import pytest
import tensorflow as tf
from harness.replica_threads import run_replicas
from syncrep_given import make, vector

from tw_syncrep._session import holding

SAVES = 12
SIZE = 300_000


def build(task):
    """A model on both servers, whose every step takes 1 from all that it has."""

    def grads(_):
        made = [vector("a", SIZE), vector("b", SIZE)]
        assert len({variable.device for variable in made}) == 2
        return [(tf.ones([SIZE]), variable) for variable in made]

    return make(task, grads, aggregate=2, total_num_replicas=3)


@pytest.mark.slow
def test_no_checkpoint_mixes_two_steps(tmp_path):
    def drive(replica, model, session):
        saved = []
        while not session.should_stop():
            session.run(model.train)
            if replica == 0:
                saved.append(read(tf.train.latest_checkpoint(tmp_path)))
                if len(saved) == SAVES:
                    break
        return saved

    def read(path):
        reader = tf.train.load_checkpoint(path)
        names = ("a", "b", "global_step")
        return [np.unique(reader.get_tensor(name)).tolist() for name in names]

    saved = run_replicas(3, build, drive, folder=tmp_path)[0]
    torn = [found for found in saved if found[0] != found[1] or len(found[0]) > 1]
    assert not torn
    assert len({found[2][0] for found in saved}) > SAVES / 2, "no round went on"
    for a, _, (step,) in saved:
        assert a == [-float(step)]


def test_a_checkpoint_that_may_be_torn_is_removed_and_an_older_one_is_the_latest(
    tmp_path,
):
    with tf.Graph().as_default() as graph:
        tf.compat.v1.get_variable("v", [2])
        saver = tf.compat.v1.train.Saver()
        graph.add_to_collection(tf.compat.v1.GraphKeys.SAVERS, saver)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            for step in (3, 7):
                saver.save(session, str(tmp_path / "model.ckpt"), global_step=step)
    holding._withdraw(graph)
    assert tf.train.latest_checkpoint(str(tmp_path)) == str(tmp_path / "model.ckpt-3")
    assert not list(tmp_path.glob("model.ckpt-7*index"))
    assert saver.last_checkpoints == [str(tmp_path / "model.ckpt-3")]
