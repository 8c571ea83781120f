"""tensorpack 0.11's own trainers, with these packages' builders in place of theirs.

Each trains on the digits, as does one device on the images of all towers: after every
step all weights, slots and moving averages must be equal, and so must the measurements
of its InferenceRunner and the names that its ModelSaver saves. A checkpoint that
tensorpack's own trainer wrote is restored, and the programs of the migration page print
the same weights. Run by ``nox -s "clients(tensorpack)"``.
"""

import argparse
import os

# Before TensorFlow is imported: tensorpack's layers are those of tf.compat.v1.layers,
# which need Keras 2.
os.environ["TF_USE_LEGACY_KERAS"] = "1"
if __name__ == "__main__":  # Help and wrong options do not wait for TensorFlow.
    argparse.ArgumentParser(description=__doc__).parse_args()


import functools
import itertools
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tensorflow as tf
import tensorpack
import tensorpack.models.batch_norm as batch_norm
from harness.docs_blocks import ROOT, blocks
from harness.processes import succeed
from sklearn.datasets import load_digits
from tensorpack import (
    BatchData,
    BatchNorm,
    ClassificationError,
    DataFromList,
    FullyConnected,
    InferenceRunner,
    MergeAllSummaries,
    ModelDesc,
    ModelSaver,
    MovingAverageSummary,
    RunUpdateOps,
    ScalarStats,
    ScheduledHyperParamSetter,
    TensorInput,
    TrainConfig,
    launch_train_with_config,
)
from tensorpack.callbacks import Callback, RunOp
from tensorpack.input_source import FeedfreeInput
from tensorpack.tfutils import tower as their_towers
from tensorpack.tfutils.collection import freeze_collection
from tensorpack.tfutils.sessinit import SessionInit
from tensorpack.tfutils.summary import add_moving_summary
from tensorpack.train import (
    AsyncMultiGPUTrainer,
    SimpleTrainer,
    SyncMultiGPUTrainerParameterServer,
    SyncMultiGPUTrainerReplicated,
)

from tw_builders import tensorpack as ours
from tw_core import session_config
from tw_reduce import packed, sum_balanced

v1 = tf.compat.v1
v1.disable_v2_behavior()
v1.enable_resource_variables()

K, ROWS = 2, 16  # towers; images of each in a step
STEPS, EPOCHS = 60, 3  # steps of an epoch
RATE, LATER_RATE = 0.02, 0.01  # the second one from the second epoch on
TRAINED = 1500  # the other 297 images are for validation
LEARNED = 0.15  # the validation error that every run must fall below
TOLERANCE = 1e-6  # of weights of order one, where sums differ in their order only
DEADLINE_S = 120  # of a program of the page
CPUS = [f"/cpu:{k}" for k in range(K)]
IMAGES, LABELS = load_digits(return_X_y=True)
IMAGES, LABELS = np.float32(IMAGES / 16), np.int32(LABELS)
OPTIMIZERS = {
    "momentum": functools.partial(v1.train.MomentumOptimizer, momentum=0.9),
    "Adam": v1.train.AdamOptimizer,
}
MOVING = ours.MOVING_SUMMARY_OPS_KEY


# The model and its images, in tensorpack's words


class Digits(ModelDesc):
    """Layers above, between and below the sizes at which gradients are packed."""

    def __init__(self, new_optimizer, synchronised=False):
        self.new_optimizer = new_optimizer
        self.statistics = "nccl" if synchronised else None

    def inputs(self):
        image = tf.TensorSpec([None, 64], tf.float32, "image")
        return [image, tf.TensorSpec([None], tf.int32, "label")]

    def build_graph(self, image, label):
        layer = FullyConnected("fc0", image, 300, kernel_initializer=normal(1))
        layer = BatchNorm("bn", layer, sync_statistics=self.statistics)
        layer = tf.nn.relu(layer)
        layer = FullyConnected("fc1", layer, 20, kernel_initializer=normal(2))
        layer = FullyConnected("fc2", layer, 10, kernel_initializer=normal(3))
        wrong = tf.logical_not(v1.nn.in_top_k(layer, label, 1))
        tf.cast(wrong, tf.float32, name="wrong")
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(
            logits=layer, labels=label
        )
        cost = tf.reduce_mean(each, name="cost")
        add_moving_summary(cost)
        add_own_moving_average(cost)
        return cost

    def optimizer(self):
        rate = v1.get_variable("learning_rate", initializer=RATE, trainable=False)
        v1.summary.scalar("rate", rate)
        return self.new_optimizer(rate)


def normal(seed):
    return v1.random_normal_initializer(stddev=0.1, seed=seed)


def add_own_moving_average(cost):
    """Adds to the collection in every tower; in a predict tower it must not stay."""
    mean = v1.get_variable("mean", [], initializer=normal(4), trainable=False)
    update = v1.assign(mean, 0.9 * mean + 0.1 * cost)
    v1.add_to_collection(MOVING, tf.convert_to_tensor(update))


def images_of_tower():
    """The images of the current tower, or of all towers on one device."""
    context = their_towers.get_current_tower_context()
    count = K * ROWS // context.total
    start = position() + context.index * count
    rows = tf.math.floormod(start + tf.range(count), TRAINED)
    return [tf.gather(tf.constant(column), rows) for column in (IMAGES, LABELS)]


def position():
    """The variable that says how many images were taken; no tower's, and not saved."""
    (found,) = [v for v in v1.local_variables() if v.op.name == "position"]
    return found


def validation():
    measured = [ClassificationError("wrong", "error"), ScalarStats("cost")]
    return InferenceRunner(BatchData(rows_from(slice(TRAINED, None)), 33), measured)


def rows_from(part):
    rows = zip(IMAGES[part], LABELS[part], strict=True)
    return DataFromList([list(row) for row in rows], shuffle=False)


class Staged(FeedfreeInput):
    """Our StagingInput as a source for tensorpack's trainers.

    tensorpack's own can hang where there are as few threads as towers.
    """

    def _setup(self, inputs):
        images = tf.data.Dataset.from_tensor_slices(
            (IMAGES[:TRAINED], LABELS[:TRAINED])
        )
        self.staging = ours.StagingInput(images.repeat().batch(K * ROWS), CPUS)

    def _get_input_tensors(self):
        context = their_towers.get_current_tower_context()
        return list(self.staging.parts[context.index])

    def _get_callbacks(self):
        return [Staging(self.staging.hook())]


class Staging(Callback):
    """A hook as a callback; tensorpack's own HookToCallback needs TensorFlow 1."""

    def __init__(self, hook):
        self.hook = hook

    def _before_train(self):
        self.hook.after_create_session(v1.get_default_session(), None)

    def _before_run(self, context):
        return self.hook.before_run(context)


# Trainers: one device, and tensorpack's with our builders


class OneDevice(SimpleTrainer):
    """tensorpack's trainer of one tower, which takes the towers' images in turn."""

    def _setup_graph(self, input, get_cost_fn, get_opt_fn):
        with their_towers.TrainTowerContext(""):
            columns = [tf.split(tensor, K) for tensor in input.get_input_tensors()]
            optimizer = get_opt_fn()
            towers = []
            for k, inputs in enumerate(zip(*columns, strict=True)):
                # Moving averages are those of the first tower.
                frozen = [v1.GraphKeys.UPDATE_OPS, MOVING] if k else []
                with (
                    v1.variable_scope(v1.get_variable_scope(), reuse=k > 0),
                    freeze_collection(frozen),
                ):
                    cost = get_cost_fn(*inputs) / K
                towers.append(optimizer.compute_gradients(cost))
            self.train_op = self.apply(optimizer, towers)
        return []

    def apply(self, optimizer, towers):
        """Applies the mean of the towers' gradients."""
        columns = zip(*towers, strict=True)
        pairs = [(tf.add_n([g for g, _ in column]), column[0][1]) for column in columns]
        return optimizer.apply_gradients(pairs)


class OneDeviceInTurn(OneDevice):
    """Applies one tower's gradients after the other's, all computed before."""

    def apply(self, optimizer, towers):
        op = tf.group(*[g for pairs in towers for g, _ in pairs])
        for pairs in towers:
            with tf.control_dependencies([op]):
                op = optimizer.apply_gradients(pairs)
        return op


class Replicated(SyncMultiGPUTrainerReplicated):
    """tensorpack's replicated trainer, with an optimizer for each tower."""

    def __init__(self, builder, new_optimizer):
        super().__init__(list(range(K)))
        self._builder, self._new_optimizer = builder, new_optimizer

    def _setup_graph(self, input, get_cost_fn, get_opt_fn):
        tower_fn = self._make_get_grad_fn(input, get_cost_fn, get_opt_fn)
        grads = self._builder.call_for_each_tower(tower_fn)
        # The towers asked the memoised optimizer for their gradients; it is the first.
        optimizers = itertools.chain([get_opt_fn()], iter(self._new_optimizer, None))
        self.train_op, sync_op = self._builder.build(grads, lambda: next(optimizers))
        return [RunOp(sync_op, run_before=True, run_as_trigger=True)]


def replicated(mode):
    def make(model):
        builder = ours.SyncMultiGPUReplicatedBuilder(CPUS, average=True, mode=mode)
        return Replicated(builder, model.optimizer)

    return make


def parameter_server(ps_device):
    def make(_):
        trainer = SyncMultiGPUTrainerParameterServer(K, ps_device)
        trainer._builder = ours.SyncMultiGPUParameterServerBuilder(CPUS, ps_device)
        return trainer

    return make


class Asynchronous(AsyncMultiGPUTrainer):
    """tensorpack's asynchronous trainer, in which a step reads each variable once.

    Else a tower may read what another one has just written, and no step is like any
    other.
    """

    def __init__(self, model):
        super().__init__(K)
        self._builder = ours.AsyncMultiGPUBuilder(CPUS)

    def _setup_graph(self, input, get_cost_fn, get_opt_fn):
        with v1.variable_scope(v1.get_variable_scope(), caching_device="/cpu:0"):
            return super()._setup_graph(input, get_cost_fn, get_opt_fn)


def take_over():
    """Has tensorpack's modules ask these packages which tower is being built."""
    names = set(ours.__all__) & set(vars(their_towers))
    pairs = [(getattr(their_towers, name), getattr(ours, name)) for name in names]
    loaded = [m for n, m in sys.modules.items() if n.split(".")[0] == "tensorpack"]
    for module, (theirs, own) in itertools.product(loaded, pairs):
        for name, value in list(vars(module).items()):
            if value is theirs:
                setattr(module, name, own)


# A run


@dataclass
class Record(Callback):
    """What is compared of a run."""

    # The global variables after each step, by name
    steps: list = field(default_factory=list)
    # Share of the validation images that are classified wrongly, at the end
    error: float = 1.0
    cost: float = np.inf  # their cost
    predicted: float = 1.0  # the same share, by a predictor of the trainer
    summaries: int = 0  # how many there are
    # The global variables before the first step
    start: dict = field(default_factory=dict)

    def _setup_graph(self):
        self.variables = {v.op.name: v for v in v1.global_variables()}
        self.advance = position().assign_add(K * ROWS).op
        self.predict = self.trainer.get_predictor(["image", "label"], ["wrong"])
        self.summaries = len(v1.get_collection(v1.GraphKeys.SUMMARIES))

    def _before_train(self):
        self.start = self.trainer.sess.run(self.variables)

    def _trigger_step(self):
        self.steps.append(self.trainer.sess.run(self.variables))
        self.trainer.sess.run(self.advance)

    def _after_train(self):
        self.error = self.trainer.monitors.get_latest("error")
        self.cost = self.trainer.monitors.get_latest("validation_cost")
        (wrong,) = self.predict(IMAGES[TRAINED:], LABELS[TRAINED:])
        self.predicted = float(np.mean(wrong))


def train(
    make_trainer, optimizer, folder, *, restored=None, source=None, synchronised=False
):
    """Trains with one of tensorpack's trainers, and returns what it recorded."""
    with tf.Graph().as_default():
        v1.set_random_seed(0)
        local = [v1.GraphKeys.LOCAL_VARIABLES]
        zero = v1.zeros_initializer()
        v1.get_variable(
            "position", [], tf.int32, zero, trainable=False, collections=local
        )
        model, record = Digits(OPTIMIZERS[optimizer], synchronised), Record()
        config = TrainConfig(
            model=model,
            data=source or TensorInput(images_of_tower, size=STEPS),
            callbacks=[
                ScheduledHyperParamSetter("learning_rate", [(2, LATER_RATE)]),
                ModelSaver(checkpoint_dir=str(folder)),
                validation(),
                record,
            ],
            extra_callbacks=[
                MovingAverageSummary(),
                MergeAllSummaries(),
                RunUpdateOps(),
            ],
            monitors=[],
            session_config=session_config(num_cpus=K),
            session_init=restored,
            steps_per_epoch=STEPS,
            max_epoch=EPOCHS,
        )
        launch_train_with_config(config, make_trainer(model))
    return record


class Restored(SessionInit):
    """Restores a checkpoint of tensorpack's own trainer."""

    def __init__(self, path):
        self.path = path

    def _setup_graph(self):
        self.saver = v1.train.Saver(ours.assignment_map(self.path))

    def _run_init(self, sess):
        self.saver.restore(sess, self.path)


# What is compared


def difference(record, reference):
    """The largest difference of any variable after any step."""
    if len(record.steps) != len(reference.steps) or len(record.steps) != STEPS * EPOCHS:
        return np.inf
    if any(own.keys() != other.keys() for own, other in both_steps(record, reference)):
        return np.inf
    return max(
        np.abs(own[name] - other[name]).max()
        for own, other in both_steps(record, reference)
        for name in own
    )


def both_steps(record, reference):
    return zip(record.steps, reference.steps, strict=True)


def faults_of(record, reference, folder):
    """Says what of a run is not as one device has it."""
    saved = {name for name, _ in tf.train.list_variables(str(folder))}
    wanted = {
        f"weights differ by {difference(record, reference):.1e}": (
            difference(record, reference) <= TOLERANCE
        ),
        f"validation: {record.error}, {record.cost} in place of {reference.error}, "
        f"{reference.cost}": (
            record.error == reference.error
            and abs(record.cost - reference.cost) <= TOLERANCE
        ),
        f"predicted {record.predicted}": np.isclose(record.predicted, record.error),
        f"learned no better than {record.error}": record.error < LEARNED,
        f"{record.summaries} summaries": record.summaries == reference.summaries,
        f"saved {sorted(saved)}": saved == set(reference.steps[-1]),
    }
    return [fault for fault, holds in wanted.items() if not holds]


class Report:
    """Prints a line per run, and remembers whether all were as they must be."""

    def __init__(self):
        self.failed = False

    def row(self, name, record, reference, folder):
        faults = faults_of(record, reference, folder)
        self.line(
            f"{name}: {len(record.steps)} steps, largest difference "
            f"{difference(record, reference):.1e}, validation error "
            f"{record.error:.1%}",
            faults,
        )

    def line(self, text, faults):
        self.failed |= bool(faults)
        print(f"{text}: {'; '.join(faults) or 'ok'}", flush=True)


def compare_builders(report, folder, references):
    """Trains with our builders in tensorpack's trainers."""
    packs = packed(functools.partial(sum_balanced, devices=CPUS))
    trainers = {
        "replicated, mode gpu": (replicated("gpu"), OneDevice),
        "replicated, packed": (replicated(packs), OneDevice),
        "parameter server, cpu": (parameter_server("cpu"), OneDevice),
        "parameter server, gpu": (parameter_server("gpu"), OneDevice),
        "asynchronous": (Asynchronous, OneDeviceInTurn),
    }
    for optimizer, (name, (make, one)) in itertools.product(
        OPTIMIZERS, trainers.items()
    ):
        where = folder / f"{name} {optimizer}"
        record = train(make, optimizer, where)
        report.row(f"{name}, {optimizer}", record, references[one, optimizer], where)


def compare_synchronised(report, folder):
    """Normalises by the whole batch, as one device does that is not split."""
    batch_norm.get_sync_bn_mean_var = ours.get_sync_bn_mean_var
    reference = without_cost(
        train(lambda _: SimpleTrainer(), "momentum", folder / "whole")
    )
    trainers = {"replicated": replicated("gpu"), "server": parameter_server("cpu")}
    for name, make in trainers.items():
        where = folder / f"synchronised {name}"
        record = without_cost(train(make, "momentum", where, synchronised=True))
        apart = difference(record, reference)
        faults = [] if apart <= TOLERANCE else ["not the whole batch"]
        report.line(f"synchronised, {name}: largest difference {apart:.1e}", faults)


def without_cost(record):
    """Leaves out the average of the cost, which is that of the first tower's rows."""
    for step in record.steps:
        del step["mean"]
    return record


def compare_tensorpack(report, folder, references):
    """Trains with tensorpack's own builders, where these give what one device gives."""
    trainers = {
        "replicated": lambda _: SyncMultiGPUTrainerReplicated(K, mode="gpu"),
        "parameter server": lambda _: SyncMultiGPUTrainerParameterServer(K, "gpu"),
    }
    for name, make in trainers.items():
        record = train(make, "momentum", folder / name)
        reference = references[OneDevice, "momentum"]
        report.row(
            f"tensorpack's own {name}, momentum", record, reference, folder / name
        )


def compare_staged(report, folder, references):
    """Trains from our staging areas, in which towers share each batch."""
    record = train(replicated("gpu"), "momentum", folder, source=Staged())
    reference = references[OneDevice, "momentum"]
    report.row("from StagingInput, momentum", record, reference, folder)


def write_checkpoint(folder):
    """Has tensorpack's own replicated trainer save what Adam has come to."""
    train(lambda _: SyncMultiGPUTrainerReplicated(K, mode="gpu"), "Adam", folder)
    return tf.train.latest_checkpoint(str(folder))


def compare_restored(report, folder, checkpoint):
    """Restores that checkpoint into our builder, and trains on."""
    record = train(replicated("gpu"), "Adam", folder, restored=Restored(checkpoint))
    reader = tf.train.load_checkpoint(checkpoint)
    names = sorted(reader.get_variable_to_shape_map())
    wrong = [
        name
        for name in names
        if name != "learning_rate"  # which a callback has set
        and not np.array_equal(
            record.start[name.removeprefix("apply_gradients/")], reader.get_tensor(name)
        )
    ]
    faults = [f"{wrong} were not restored"] if wrong else []
    if "apply_gradients/beta1_power" not in names:
        faults.append(f"tensorpack saved {names}")
    if record.error >= LEARNED:
        faults.append(f"forgot: {record.error}")
    report.line(f"tensorpack's checkpoint of {len(names)} variables", faults)


# The migration page


def page_programs():
    """The page's programs: before, the same with the imports changed, and after."""
    page = blocks(ROOT / "docs" / "migration" / "tensorpack.md")
    before = next(block.code for block in page if block.is_before)
    before = before.replace(":class: before\n", "")
    ported = before.replace(
        "tf.disable_v2_behavior()",
        "tf.disable_v2_behavior()\ntf.enable_resource_variables()",
    )
    for module in ("tensorpack.graph_builder.training", "tensorpack.tfutils.tower"):
        ported = ported.replace(f"from {module}", "from tw_builders.tensorpack")
    after = next(block.code for block in page if block.info == "python")
    return {"before": before, "with other imports": ported, "after": after}


def weights_of(program):
    """Runs a program and reads the weights that it has come to."""
    command = [sys.executable, "-c", f"{program}\nprint('=', np.ravel(two_towers))"]
    said = [
        line
        for line in succeed(command, deadline_s=DEADLINE_S).splitlines()
        if line.startswith("= [")
    ]
    return np.array([float(word) for word in said[-1][3:-1].split()])


def compare_page(report):
    weights = {name: weights_of(code) for name, code in page_programs().items()}
    apart = {
        name: float(np.abs(found - weights["before"]).max())
        for name, found in weights.items()
    }
    faults = [f"differ by {apart}"] if max(apart.values()) > TOLERANCE else []
    report.line(f"the page's programs, {len(weights['before'])} weights", faults)


def main():
    tensorpack.utils.logger._logger.setLevel("ERROR")
    report = Report()
    compare_page(report)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        references = {
            (one, optimizer): train(
                lambda _, one=one: one(),
                optimizer,
                folder / f"{one.__name__} {optimizer}",
            )
            for one, optimizer in itertools.product(
                (OneDevice, OneDeviceInTurn), OPTIMIZERS
            )
        }
        compare_tensorpack(report, folder, references)
        checkpoint = write_checkpoint(folder / "theirs")
        take_over()
        compare_builders(report, folder, references)
        compare_synchronised(report, folder)
        compare_staged(report, folder / "staged", references)
        compare_restored(report, folder / "restored", checkpoint)
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
