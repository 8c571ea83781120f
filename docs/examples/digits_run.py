"""One training run: its folder, checkpoint, progress bar, figures and end."""

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import digits_plots
import numpy as np
import tensorflow as tf
from digits_options import (
    check_numbers,
    check_writable,
    find_devices,
    read_checkpoint,
    refuse,
)
from tqdm import tqdm

import tw_core


class Program(NamedTuple):
    """A built training program, of either mode.

    step(images, labels) trains on a batch and returns the loss before it;
    predict(images) returns one label per image; copy() makes all towers equal to tower
    0. variables are tower 0's, its optimizer's included; owners are the copies of the
    model's variables, in their order, that the optimizer has slots for.
    """

    step: Callable
    predict: Callable
    copy: Callable
    variables: list
    owners: list
    optimizer: tf.compat.v1.train.Optimizer
    placed: tw_core.devices.Placement
    session: tf.compat.v1.Session | None


class Run:
    """Records a run's progress, shows it, and writes it to files."""

    def __init__(self, options, *, num_images):
        """Checks the options and chooses the devices, before anything is built."""
        check_numbers(options, num_images)
        self.towers = tw_core.towers(find_devices(options))
        self._checkpoint = (
            read_checkpoint(options, num_images) if options.resume else None
        )
        check_writable(options.out)
        self._options = options
        self._step = 0
        self._history = {"loss": [], "accuracy": []}
        self._losses = []
        self._interrupted = False
        self._started = time.perf_counter()
        self._timings = {}

    def describe(self, program):
        """Prints a summary of the program, and draws where its variables are."""
        options, built = self._options, self._built(program)
        self._timings["build_s"] = time.perf_counter() - self._started
        print(f"Built {len(self.towers)} towers, {options.mode} mode:")
        for name in ("builder", "reducer"):
            print(f"  {name:14} {built[name]}")
        for device, facts in built["devices"].items():
            print(
                f"  {device:14} {', '.join(facts['towers']) or 'no tower'}: "
                f"{facts['variables']} variables, {facts['bytes']:,} bytes"
            )
        digits_plots.draw_placement(
            program.placed,
            self.towers,
            title=f"{built['builder']}, {options.mode} mode",
            path=options.out / "placement.png",
            owned=built["builder"] == "sharded",
        )

    def restore_if_asked(self, program):
        """Resumes from the checkpoint in the output folder, with --resume."""
        if self._checkpoint is None:
            return
        state = self._checkpoint
        path = str(self._options.out / state["checkpoint"])
        with _saving(program) as (saver, saved):
            _check_same_model(path, saved)
            saver.restore(program.session, path)
        self._step, self._history = state["step"], state["history"]
        self._losses = state["losses"]
        print(f"Resuming from step {self._step}.")

    def batches(self, rows):
        """Yields the rows of each batch, in an order set by seed and epoch.

        Shows a progress bar; Ctrl-C ends the run after the present step.
        """
        options, size = self._options, self._options.batch_size
        self._per_epoch = len(rows) // size
        last = options.epochs * self._per_epoch
        self._first_step, self._started = self._step, time.perf_counter()
        previous = signal.signal(signal.SIGINT, self._interrupt)
        try:
            with self._progress_bar(last * size) as self._bar:
                while self._step < last and not self._interrupted:
                    epoch, position = divmod(self._step, self._per_epoch)
                    random = np.random.default_rng([options.seed, epoch])
                    yield random.permutation(rows)[position * size :][:size]
        finally:
            signal.signal(signal.SIGINT, previous)
        self._timings["train_s"] = time.perf_counter() - self._started

    def log_loss(self, loss):
        """Counts a step; if its loss is not finite, ends the run with an error."""
        self._step += 1
        self._losses.append(loss := float(loss))
        if not math.isfinite(loss):
            self._bar.close()
            raise SystemExit(
                f"The loss of step {self._step} is {loss}: this run has failed, and "
                "saved no checkpoint and no summary. Choose another --learning-rate; "
                f"it was {self._options.learning_rate:g}."
            )
        self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self._bar.update(self._options.batch_size)

    def ends_epoch(self):
        """Returns whether the last step ended an epoch."""
        return self._step % self._per_epoch == 0

    def log_guesses(self, guesses, labels):
        """Ends an epoch with the test images' guesses and labels, [rows] each."""
        self._history["loss"].append(float(np.mean(self._losses)))
        self._history["accuracy"].append(float(np.mean(guesses == labels)))
        self._losses = []

    def finish(self, program, steps):
        """Saves the checkpoint; after the last step also figures and pictures."""
        self._save(program)
        options = self._options
        if self._interrupted:
            print(
                f"\nInterrupted after step {self._step}; the checkpoint is in "
                f"{options.out}. Continue with --resume.",
                file=sys.stderr,
            )
            raise SystemExit(130)
        seconds = self._timings["train_s"]
        images = (self._step - self._first_step) * options.batch_size
        self._timings["images_per_s"] = images / seconds
        accuracy = self._history["accuracy"][-1] if self._history["accuracy"] else None
        settings = asdict(options)
        del settings["out"], settings["resume"]  # they do not change results
        summary = {"test_accuracy": accuracy, "history": self._history}
        summary |= {"built": self._built(program), "options": settings}
        _write_json(options.out / "summary.json", summary)
        _write_json(options.out / "timings.json", self._timings)
        digits_plots.draw_curves(self._history, path=options.out / "curves.png")
        if steps.steps:  # too few in a run that was resumed near its end
            steps.draw(options.out / "timeline.png")
        print(f"Test accuracy {accuracy:.4f}, {images / seconds:,.0f} images/s")
        print(f"Wrote {options.out}/: curves.png, placement.png, timeline.png, …")

    def _built(self, program):
        placed = program.placed
        options, names = self._options, {}
        places = {
            "sharded": "at each owner",
            "parameter-server": "at each variable",
        }
        for tower in self.towers:
            device = tw_core.devices.canonical_device(tower.device)
            names.setdefault(device, []).append(tower.name)
        return {
            "towers": len(self.towers),
            "builder": options.builder,
            "reducer": places.get(options.builder, options.reducer),
            "devices": {
                device: {
                    "towers": names.get(device, []),
                    "variables": len(placed.variables.get(device, {})),
                    "bytes": placed.bytes_on.get(device, 0),
                }
                for device in sorted({*names, *filter(None, placed.variables)})
            },
        }

    def _save(self, program):
        path = str(self._options.out / "model")
        with _saving(program) as (saver, _):
            path = saver.save(program.session, path, self._step, write_meta_graph=False)
        state = {"checkpoint": Path(path).name, "step": self._step}
        state |= {"batch_size": self._options.batch_size}
        state |= {"history": self._history, "losses": self._losses}
        _write_json(self._options.out / "state.json", state)

    def _progress_bar(self, num_images):
        return tqdm(
            total=num_images,
            initial=self._step * self._options.batch_size,
            unit="images",
            unit_scale=True,
            dynamic_ncols=True,
        )

    def _interrupt(self, *_):
        self._interrupted = True


@contextmanager
def _saving(program):
    """Makes a saver of tower 0's variables by names that both modes share."""
    with program.session.graph.as_default() if program.session else nullcontext():
        yield tf.compat.v1.train.Saver(_named(program)), _named(program)


def _named(program):
    """Names tower 0's variables; TensorFlow numbers slots differently in each mode."""
    names = {id(v): v.name.split(":")[0] for v in program.variables}
    slots = {}
    for variable, owner in zip(program.variables, program.owners):
        for slot in program.optimizer.get_slot_names():
            held = program.optimizer.get_slot(owner, slot)
            slots[id(held)] = f"{names[id(variable)]}/{slot}"
    return {(names | slots)[id(v)]: v for v in program.variables}


def _check_same_model(path, wanted):
    found = {name: list(shape) for name, shape in tf.train.list_variables(path)}
    needed = {name: v.shape.as_list() for name, v in wanted.items()}
    if found != needed:
        differ = {
            n for n in found.keys() | needed.keys() if found.get(n) != needed.get(n)
        }
        listed = "; ".join(
            f"{n}: {found.get(n, 'missing')} in the checkpoint, "
            f"{needed.get(n, 'missing')} in this model"
            for n in sorted(differ)
        )
        refuse(
            f"--resume: {path} is a checkpoint of another model: {listed}. Resume with "
            "the options that it was trained with, or train from scratch."
        )


def _write_json(path, values):
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(values, indent=2) + "\n")
    draft.replace(path)
