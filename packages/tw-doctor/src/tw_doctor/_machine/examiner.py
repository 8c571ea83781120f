"""The process that runs TensorFlow: it checks and measures, and reports each event.

It reads its job as one line of JSON, and writes a line for each event; anything that
TensorFlow prints goes to stderr. It ends with its parent: when its input is closed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

import tw_core
from tw_core.devices import canonical_device
from tw_core.internal import why_no_gpu
from tw_doctor._machine import facts as _facts
from tw_doctor._machine.checks import (
    Check,
    DoesNotFit,
    algorithms_that_fit,
    reducer_checks,
    sibling_checks,
)
from tw_doctor._machine.measuring import measure_copies, measure_reducers
from tw_doctor._machine.scaling import measure_scaling
from tw_reduce.internal import described_here

Tell = Callable[..., None]
# Shares of the time that is left once the checks are made.
_FOR_COPIES, _FOR_REDUCERS = 0.15, 0.8
_UNKNOWN_GPU_MIB = 2_048
_USED_OF_GPU = 0.8


def run(job: dict[str, Any], tell: Tell) -> None:
    """Does a job of ``Examination.job``, and reports events by ``tell``."""
    until = time.monotonic() + job["seconds"]
    devices = make_towers(job["device"], job["towers"])
    tell("towers", devices=[canonical_device(device) for device in devices])
    tell("facts", **_all_facts())
    failed = list(job["failed"])
    checks = [
        Check("TF_CONFIG", _facts.tf_config),
        *reducer_checks(devices),
        *sibling_checks(devices),
    ]
    for number, check in enumerate(checks):
        if check.name in job["done"]:
            continue
        tell("doing", what=check.name, share=number / len(checks), checks=True)
        status, said, seconds = _made(check)
        tell("check", name=check.name, status=status, said=said, seconds=seconds)
        if status != "ok":
            failed.append(check.algorithm)
    tell("checked")
    until = min(until, time.monotonic() + job["measure_for"])
    _measure(job["parts"], devices, failed, tell, until)
    tell("end")


def main() -> None:
    """Serves the parent that started this process."""
    events = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(event: str, **values: Any) -> None:
        events.write(json.dumps({"event": event, **values}) + "\n")

    try:
        run(job, tell)
    except DoesNotFit as reason:
        tell("broken", said=str(reason))
    except Exception as error:
        tell("broken", said=_sentence(error))
        raise
    finally:
        events.flush()
    # Without waiting for ops that still run in TensorFlow.
    sys.stderr.flush()
    os._exit(0)


def _measure(
    parts: Sequence[str],
    devices: Sequence[str],
    failed: Sequence[str],
    tell: Tell,
    until: float,
) -> None:
    def doing(what: str) -> None:
        tell("doing", what=what, checks=False)

    left = until - time.monotonic()
    if "copies" in parts:
        ends = time.monotonic() + _FOR_COPIES * left
        host = ["/cpu:0"] if "GPU" in canonical_device(devices[0]) else []
        rows = measure_copies([*host, *devices], doing, until=ends)
        tell("copies", rows=rows)
    algorithms = algorithms_that_fit(devices, failed)
    if "reducers" in parts and algorithms:
        ends = until - (1 - _FOR_REDUCERS) * left
        rows = measure_reducers(devices, algorithms, doing, until=ends)
        tell("reducers", rows=rows)
    if "scaling" in parts:
        tell("scaling", **measure_scaling(devices, doing, until=until))


def _made(check: Check) -> tuple[str, str, float]:
    """Runs a check; returns ``"ok"``, ``"unfit"`` or ``"wrong"``, why, and seconds."""
    begun = time.monotonic()
    status, said = "ok", ""
    try:
        check.run()
    except DoesNotFit as reason:
        status, said = "unfit", str(reason)
    except AssertionError as difference:
        status, said = "wrong", str(difference)
    except Exception as error:
        status, said = "wrong", _sentence(error)
    return status, said, round(time.monotonic() - begun, 3)


def make_towers(device: str, count: int | None) -> list[str]:
    """Makes devices for the towers: CPUs, or GPUs, divided if there are fewer."""
    gpus = tf.config.list_physical_devices("GPU")
    if device == "gpu" and not gpus:
        raise DoesNotFit(
            "--device gpu: TensorFlow sees no GPU here, so nothing was checked. "
            f"{why_no_gpu()}; or pass --device cpu"
        )
    if not gpus or device == "cpu":
        tf.config.set_visible_devices([], "GPU")
        return tw_core.use_logical_cpus(count or 2)
    count = count or max(2, len(gpus))
    per_gpu = -(-count // len(gpus))
    memory = _facts.gpu_memory()
    for n, gpu in enumerate(gpus):
        if per_gpu == 1:
            tf.config.experimental.set_memory_growth(gpu, True)
            continue
        free = memory[n]["free_mib"] if n < len(memory) else _UNKNOWN_GPU_MIB
        limit = int(_USED_OF_GPU * free / per_gpu)
        logical = [tf.config.LogicalDeviceConfiguration(memory_limit=limit)] * per_gpu
        tf.config.set_logical_device_configuration(gpu, logical)
    return [f"/gpu:{k}" for k in range(count)]


def _all_facts() -> dict[str, Any]:
    gpus = tf.config.get_visible_devices("GPU")
    details = [tf.config.experimental.get_device_details(gpu) for gpu in gpus]
    names = [str(detail.get("device_name", "GPU")) for detail in details]
    return {
        "made_on": described_here(tf.__version__, names),
        "versions": _facts.versions(tf.__version__),
        **_facts.system(),
        "logical_devices": [own.name for own in tf.config.list_logical_devices()],
        "gpus": names,
        "no_gpu": "" if tf.config.list_physical_devices("GPU") else why_no_gpu(),
        "gpu_memory": _facts.gpu_memory(),
        "links": _facts.links(),
        "tf_config": _or_fault(_facts.tf_config),
        "engine": _or_fault(partial(_facts.sibling_fact, "engine", "no tw-ranks")),
        "exposed": _facts.exposure(),
    }


def _or_fault(tell: Callable[[], str]) -> str:
    try:
        return tell()
    except AssertionError as fault:
        return f"wrong: {fault}"


def _sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:400]}"


def _end_with_parent() -> None:
    while os.read(0, 1 << 10):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
