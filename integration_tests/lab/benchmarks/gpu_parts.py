"""The parts of the benchmark ``gpu``, which runs each in a separate process.

python gpu_parts.py PART ROUNDS [PYTHON]

PYTHON is one with PyTorch. A table is written once it is raced, so that a killed part
keeps its earlier tables. On CPUs models and batches are tiny, and the figures are
meaningless: they only show that the program works.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parents[2]))

import keras
import numpy as np
import racing
import step
import tensorflow as tf
from networks import attended, seeded
from racing import DEVICE, Report, in_own_process, race_by
from training import MIRRORED, REPLICATED, SERVER

import tw_reduce
from tw_doctor._machine.measuring import ended
from tw_doctor._machine.race import seconds_of
from tw_doctor._tf_compat import read_profile
from tw_keras import TowerModel

SMALL = DEVICE == "cpu"
TOWERS, STEPS = 2, 20
KERAS, ONE, COMPILED = "Keras, one device", "one device", ", compiled"
OWN = (REPLICATED, "sharded", SERVER)
NEVER_SLOWER = 1.0
WITHIN = {"rtol": 1e-4, "atol": 1e-5} if SMALL else {"rtol": 1e-2, "atol": 1e-3}
Run = Callable[[int], Any]  # runs a number of steps, and returns when they are done


class Table:
    """Contenders of one table. One that fails is told, and the others race."""

    def __init__(self, report: Report, title: str, peer: str, less: int = 0) -> None:
        self.report, self.title, self.peer = report, title, peer
        self.steps = 2 if SMALL else STEPS
        # So many steps of a run of their own count not: what a run begins with.
        self.less = 0 if SMALL else less
        self.runs: dict[str, Run] = {}
        self.facts: dict[str, dict[str, Any]] = {}

    def add(self, name: str, make: Callable[[], tuple[Run, dict[str, Any]]]) -> None:
        """Makes a contender, which tells facts of its own, and runs it once."""
        try:
            run, facts = make()
            self.runs[name], self.facts[name] = run, facts
            run(self.steps)
        except Exception as error:  # whatever it is
            self.runs.pop(name, None)
            lines = str(error).strip().splitlines() or [""]
            said = f"{type(error).__name__}: {lines[0][:300]}"
            self.report.faults.append(f"{self.title}: {name}: {said}")
            print(f"FAILED {self.title}: {name}: {said}", flush=True)
        else:
            print(f"  {name}: {facts}", flush=True)

    def race(self, rounds: int, targets: dict[str, float]) -> None:
        """Races all, notes targets against the peer, and writes what there is."""
        if self.peer in self.runs:
            timers = {name: partial(self._timed, name) for name in self.runs}
            timings = race_by(self.title, timers, peer=self.peer, rounds=rounds)
            racing.print_table(timings, self.peer)
            for timing in timings:
                facts = self.facts[timing.name]
                facts |= counts_of(self.runs[timing.name], self.steps)
                own = {**asdict(timing), "peer": self.peer, **facts}
                self.report.rows.append(own)
            for name in [name for name in targets if name in self.runs]:
                self.report.compare(timings, name, self.peer, targets[name])
        write(self.report)

    def _timed(self, name: str) -> float:
        run, less = self.runs[name], self.less
        before = seconds_of(partial(run, less)) if less else 0.0
        return (seconds_of(partial(run, self.steps + less)) - before) / self.steps

    def count_launches(self, name: str, at_most: int) -> None:
        """Notes a target of the kernels and copies of a step, where they are known."""
        facts = self.facts.get(name, {})
        if "kernels" in facts:
            launches = facts["kernels"] + facts["copies"]
            self.report.target(f"{self.title}: {name}: launches", launches, at_most)
            write(self.report)


def write(report: Report) -> None:
    """Writes what a part has found so far."""
    notes = {"faults": report.faults, **report.notes}
    racing.save(report.name, rows=report.rows, targets=report.targets, **notes)


def counts_of(run: Run, steps: int) -> dict[str, float]:
    """Counts kernels and copies of a step on GPUs, and the milliseconds that are busy.

    Nothing where the profiler fails, or sees no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.profiler.experimental.start(folder)
            try:
                run(steps)
            finally:
                tf.profiler.experimental.stop()
            return counts_in(read_profile(Path(folder)), steps)
        except Exception as error:  # It is no part of what is timed.
            print(f"  the profiler failed: {error}", flush=True)
            return {}


def counts_in(space: Any, steps: int) -> dict[str, float]:
    """As ``counts_of``, from a profile."""
    counts = {"kernels": 0.0, "copies": 0.0, "copies from or to the host": 0.0}
    spans: list[tuple[int, int]] = []
    for plane in (own for own in space.planes if "/device:GPU" in own.name):
        for line in (own for own in plane.lines if own.name.startswith("Stream")):
            for event in line.events:
                name = plane.event_metadata[event.metadata_id].name
                counts[_kind_of(name)] += 1 / steps
                begin = line.timestamp_ns * 1000 + event.offset_ps
                spans.append((begin, begin + event.duration_ps))
    busy = end = 0
    for begin, until in sorted(spans):
        busy += max(0, until - max(begin, end))
        end = max(end, until)
    rounded = {name: round(count, 1) for name, count in counts.items()}
    return {**rounded, "busy_ms": round(busy / 1e9 / steps, 3)} if spans else {}


def _kind_of(name: str) -> str:
    if any(word in name for word in ("MemcpyH2D", "MemcpyD2H")):
        return "copies from or to the host"
    return "copies" if "Memcpy" in name else "kernels"


# Steps of functions.


def small_part(report: Report, rounds: int) -> None:
    """Races steps of 25 variables, and counts their launches."""
    table = steps_table(report, step.WORKS["small"](), rounds)
    table.count_launches(f"{REPLICATED}{COMPILED}", 200)


def kernels_part(report: Report, rounds: int) -> None:
    """Races steps of 161 variables of 64 x 64."""
    count = 4 if SMALL else 161
    widths = [64] * (count + 1)
    work = step.Work(f"{count} variables of 64 x 64", widths, 64, biases=False)
    steps_table(report, work, rounds)


def steps_table(report: Report, work: step.Work, rounds: int) -> Table:
    """Races steps with Keras's SGD with momentum, compiled by XLA and not."""
    racing.use_devices(TOWERS, tf32=True)
    table = Table(report, f"step, {work.name}, K = {TOWERS}", MIRRORED)
    want: list[Any] = []
    table.add(MIRRORED, partial(made, want, partial(mirrored, work)))
    for kind in (*OWN, "flat", ONE):
        for jit in (False, True)[: 1 if kind == "flat" else 2]:
            own = partial(our_step, work, kind, jit)
            table.add(f"{kind}{COMPILED * jit}", partial(made, want, own))
    compiled = {f"{kind}{COMPILED}": 0.6 for kind in OWN}
    table.race(rounds, {**dict.fromkeys(OWN, NEVER_SLOWER), **compiled})
    return table


def mirrored(work: step.Work) -> step.Built:
    return step.mirrored(work, TOWERS, with_keras=True)


def our_step(work: step.Work, kind: str, jit: bool) -> step.Built:
    towers = 1 if kind == ONE else TOWERS
    reduce = tw_reduce.all_reduce(racing.device_names(towers))
    own = REPLICATED if kind == ONE else kind
    options = {"reduce": reduce, "jit_compile": jit}
    return step.function_step(work, towers, own, with_keras=True, **options)


def made(want: list[Any], make: Callable[[], step.Built]) -> tuple[Run, dict[str, Any]]:
    """Makes a step, times its first call, and compares it with the first contender."""
    run, values = make()
    first = seconds_of(lambda: ended(run()))
    ended(run())
    want[:] = want or values()
    for got, wanted in zip(values(), want, strict=True):
        np.testing.assert_allclose(got, wanted, **WITHIN)

    def steps(count: int) -> None:
        for _ in range(count):
            run()
        ended(None)

    return steps, {"first_s": round(first, 2)}


# Keras's fit.


def resnet(size: int, classes: int) -> keras.Model:
    """ResNet-50; on CPUs a convolution that has a batch normalisation."""
    inputs = keras.Input([size, size, 3])
    if not SMALL:
        return keras.applications.ResNet50(
            weights=None,
            input_tensor=inputs,
            classes=classes,
            classifier_activation=None,
        )
    x = keras.layers.Conv2D(4, 3)(inputs)
    x = keras.layers.GlobalAveragePooling2D()(keras.layers.BatchNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(classes)(x))


def transformer() -> keras.Model:
    """Four blocks of width 256 with four heads, over 64 tokens."""
    layers = keras.layers
    width, blocks = (8, 1) if SMALL else (256, 4)
    tokens = keras.Input([64], dtype="int32")
    x = attended(layers.Embedding(8000, width)(tokens), blocks, 4 * width)
    return keras.Model(tokens, layers.Dense(10)(x))


def images(rows: int, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal([rows, size, size, 3], np.float32)
    return x, random.integers(0, classes, rows)


def tokens() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    rows = 8 if SMALL else 64
    x = random.integers(0, 8000, [rows, 64]).astype(np.int32)
    return x, random.integers(0, 10, rows)


def compiled(kind: str, towers: int, make: Any, jit: bool | str) -> keras.Model:
    """Makes a model, and compiles it with Adam; ``kind`` is who trains it."""
    devices = racing.device_names(towers)

    def built(model: keras.Model) -> keras.Model:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss, jit_compile=jit)
        return model

    if kind == MIRRORED:
        with tf.distribute.MirroredStrategy(devices).scope():
            return built(seeded(make))
    if kind == KERAS:
        return built(seeded(make))
    return built(TowerModel(partial(seeded, make), devices, variables=kind))


def fit(
    model: Callable[[], keras.Model], data: tuple[Any, Any]
) -> tuple[Run, dict[str, Any]]:
    """Times the first step of a model's ``fit`` on one batch that stays in memory."""
    own = model()
    batches = tf.data.Dataset.from_tensors(data).cache()

    def steps(count: int) -> Any:
        own_batches = batches.repeat(count).prefetch(2)
        return own.fit(own_batches, shuffle=False, verbose=0).history["loss"]

    begun = time.perf_counter()
    [loss] = steps(1)
    if not math.isfinite(loss):
        raise AssertionError(f"the first loss is {loss}")
    return steps, {"first_s": round(time.perf_counter() - begun, 2), "loss": loss}


def fit_table(
    report: Report, title: str, contenders: dict[str, Any], peer: str, data: Any
) -> Table:
    """Makes a table of ``fit``; a contender is kind, towers, model, compilation."""
    table = Table(report, f"fit, {title}", peer, less=5)
    for name, own in contenders.items():
        table.add(name, partial(fit, partial(compiled, *own), data))
    return table


def one_part(report: Report, rounds: int) -> None:
    """Races ``fit`` of ResNet-50 on one GPU, compiled by XLA and not."""
    racing.use_devices(1, tf32=True)
    keras.mixed_precision.set_global_policy("mixed_float16")
    size, rows = (8, 8) if SMALL else (224, 128)
    make, data = partial(resnet, size, 1000), images(rows, size, 1000)
    for jit in (True, False):
        title = f"ResNet-50 at {size}, batch {rows}, mixed_float16, one device"
        contenders = {
            KERAS: (KERAS, 1, make, jit),
            "TowerModel": (REPLICATED, 1, make, jit),
        }
        title += ", XLA" if jit else ", no XLA"
        table = fit_table(report, title, contenders, KERAS, data)
        table.race(rounds, {"TowerModel": 1.05})


def resnet_part(report: Report, rounds: int) -> None:
    """Races ``fit`` of ResNet-50 over two towers."""
    size, rows = (8, 8) if SMALL else (64, 64)
    title = f"ResNet-50 at {size}, batch {rows}, float32"
    data = images(rows, size, 10)
    towers_table(report, title, partial(resnet, size, 10), data, rounds, 0.75)


def transformer_part(report: Report, rounds: int, *, tf32: bool = True) -> None:
    """Races ``fit`` of a transformer over two towers."""
    title = f"transformer of 4 layers, float32{'' if tf32 else ' without TF32'}"
    towers_table(report, title, transformer, tokens(), rounds, 0.55, tf32=tf32)


def towers_table(
    report: Report,
    title: str,
    make: Callable[[], keras.Model],
    data: tuple[np.ndarray, np.ndarray],
    rounds: int,
    at_most: float,
    *,
    tf32: bool = True,
) -> None:
    """Races ``fit`` over two towers, compiled as Keras decides, and not."""
    racing.use_devices(TOWERS, tf32=tf32)
    contenders = {
        MIRRORED: (MIRRORED, TOWERS, make, False),
        f"{REPLICATED}, auto": (REPLICATED, TOWERS, make, "auto"),
        REPLICATED: (REPLICATED, TOWERS, make, False),
        "sharded, auto": ("sharded", TOWERS, make, "auto"),
        KERAS: (KERAS, 1, make, "auto"),
    }
    table = fit_table(report, f"{title}, K = {TOWERS}", contenders, MIRRORED, data)
    targets = {f"{REPLICATED}, auto": at_most, REPLICATED: NEVER_SLOWER}
    table.race(rounds, targets)


def first_part(report: Report, rounds: int) -> None:
    """Races the first step of ``fit``, each in a fresh process, either one first."""
    kinds = (MIRRORED, REPLICATED)
    timings = race_by(
        f"first step of fit, ResNet-50, K = {TOWERS}",
        {kind: partial(in_own_process, first_step, kind) for kind in kinds},
        peer=MIRRORED,
        rounds=2,
    )
    report.add(timings, MIRRORED)
    for first, theirs, own in zip(
        kinds, *(timing.times_s for timing in timings), strict=True
    ):
        title = f"{timings[0].work}: {REPLICATED} / {MIRRORED}, {first} first"
        report.target(title, own / theirs, 0.6)
    write(report)


def first_step(kind: str) -> float:
    """Returns the seconds of the first step of ``fit``, in a process that is new."""
    racing.use_devices(TOWERS, tf32=True)
    size, rows = (8, 8) if SMALL else (64, 64)
    make = partial(compiled, kind, TOWERS, partial(resnet, size, 10), False)
    _, facts = fit(make, images(rows, size, 10))
    return float(facts["first_s"])


def torch_part(report: Report, rounds: int, python: str) -> None:
    """Times the step of PyTorch's DDP of the same ResNet-50, one rank on one GPU."""
    size, rows = (32, 2) if SMALL else (224, 128)
    program = str(Path(__file__).with_name("gpu_torch.py"))
    options = [
        DEVICE,
        str(size),
        str(rows),
        str(max(rounds, 2)),
        str(2 if SMALL else STEPS),
    ]
    done = subprocess.run(
        [python, program, *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(done.stdout + done.stderr)
        raise SystemExit(done.returncode)
    times = json.loads(done.stdout.splitlines()[-1])
    name = "PyTorch DDP"
    title = f"ResNet-50 at {size}, batch {rows}, float16, one device, PyTorch by itself"
    timers = {name: partial(times.pop, 0)}
    timings = race_by(title, timers, peer=name, rounds=len(times))
    report.add(timings, name)
    write(report)


PARTS: dict[str, Callable[..., None]] = {
    "one": one_part,
    "small": small_part,
    "kernels": kernels_part,
    "resnet": resnet_part,
    "transformer": transformer_part,
    "first": first_part,
    "float32": partial(transformer_part, tf32=False),
    "torch": torch_part,
}


def main(name: str, rounds: str, *python: str) -> None:
    """Runs a part."""
    report = Report(f"gpu-{name}")
    PARTS[name](report, int(rounds), *python)
    if report.faults:
        sys.exit("; ".join(report.faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
