"""Checkpoints of a run with backups hold one step, though rounds go on meanwhile."""

import numpy as np
import tensorflow as tf
from syncrep_given import make, vector
from syncrep_threads import run_replicas

SAVES = 25
SIZE = 300_000


def build(task):
    """A model on both servers, whose every step takes 1 from all that it has."""

    def grads(_):
        made = [vector("a", SIZE), vector("b", SIZE)]
        assert len({variable.device for variable in made}) == 2
        return [(tf.ones([SIZE]), variable) for variable in made]

    return make(task, grads, aggregate=2, total_num_replicas=3)


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
