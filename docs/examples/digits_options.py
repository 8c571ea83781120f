"""Checks the digits example's options before anything is built."""

import json
import math
import os
import sys

import tensorflow as tf

import tw_core


def refuse(sentence):
    """Prints a sentence and exits with status 2, as argument parsers do."""
    print(sentence, file=sys.stderr)
    raise SystemExit(2)


def check_numbers(options, num_images):
    """Refuses numbers that are invalid for ``num_images`` images."""
    towers = len(options.devices) or options.towers
    for flag, number in {
        "--towers": towers,
        "--epochs": options.epochs,
        "--batch-size": options.batch_size,
    }.items():
        if number < 1:
            refuse(f"{flag} must be at least 1; got {number}.")
    if not 0 <= options.seed < 2**31:
        refuse(f"--seed must be from 0 to 2**31 - 1; got {options.seed}.")
    if not math.isfinite(options.learning_rate):
        refuse(f"--learning-rate must be finite; got {options.learning_rate}.")
    if options.batch_size % towers:
        refuse(
            f"--batch-size {options.batch_size} is not divisible by the {towers} "
            f"towers; every tower takes an equal shard: use a multiple of {towers}."
        )
    if options.batch_size > num_images:
        refuse(
            f"--batch-size {options.batch_size} is more than the {num_images} training "
            "images; choose a smaller one."
        )


def find_devices(options):
    """Returns a device per tower: those named, else the GPUs in turn, else CPUs."""
    if options.devices:
        _check_devices(options.devices)
        return list(options.devices)
    if not tf.config.list_physical_devices("GPU"):
        return tw_core.use_logical_cpus(options.towers)
    gpus = tw_core.devices.available_devices()
    return [gpus[k % len(gpus)] for k in range(options.towers)]


def check_writable(folder):
    """Refuses a folder that cannot be created or written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        refuse(f"--out {folder} cannot be written: {error}. Name another folder.")


def read_checkpoint(options, num_images):
    """Returns the state that the run in the output folder saved with its checkpoint."""
    path = options.out / "state.json"
    if not path.exists():
        refuse(
            f"--resume: {options.out} holds no checkpoint; train without --resume "
            "first, or name the folder of the earlier run with --out."
        )
    try:
        state = json.loads(path.read_text())
        index = options.out / f"{state['checkpoint']}.index"
        size = state.get("batch_size", options.batch_size)
        done = state["step"] // (num_images // options.batch_size)
        summary = options.out / "summary.json"
        text = summary.read_text() if summary.exists() else '{"history": {"loss": []}}'
        drawn = len(json.loads(text)["history"]["loss"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(f"--resume: {path} cannot be read: {error!r}. Train without --resume.")
    if not index.exists():
        refuse(f"--resume: {index} is missing. Train without --resume.")
    if size != options.batch_size:
        refuse(
            f"--resume: {options.out} was trained with --batch-size {size}; got "
            f"{options.batch_size}. Resume with the same batch size, or train without "
            "--resume."
        )
    if done > options.epochs:
        refuse(
            f"--resume: {options.out} has been trained for {done} epochs, and --epochs "
            f"is {options.epochs}, counted from the start; pass a larger number."
        )
    if done == options.epochs == drawn:
        print(
            f"--resume: {options.out} has been trained for all {done} epochs; its "
            "pictures and figures are unchanged. Train longer with --epochs."
        )
        raise SystemExit(0)
    return state


def _check_devices(devices):
    """Refuses missing devices: TensorFlow would silently train on others."""
    unknown = [device for device in devices if not _is_here(device)]
    if unknown:
        refuse(
            f"--devices: this process has no {', '.join(map(repr, unknown))}; it has "
            f"{', '.join(tw_core.devices.available_devices())}. Name these, or leave "
            "out --devices: without a GPU, --towers 2 makes two logical CPUs."
        )


def _is_here(device):
    try:
        name = tw_core.devices.canonical_device(device)
        tw_core.devices.check_devices([name])
    except ValueError:
        return False
    return name.startswith("/device:")  # another process's device begins with its job
