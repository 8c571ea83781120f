"""Logical devices: a canonical spelling, and the devices that this process has.

TensorFlow takes ``"gpu:0"``, ``"/gpu:0"``, ``"/device:GPU:0"`` and, for a device
of this process, the same after ``/job:localhost/replica:0/task:0``; ops and
variables report any of these.

Asking TensorFlow for its logical devices starts the eager context, which on a
GPU takes memory before a session's own configuration is read. So the devices
are counted from the physical ones and their configuration.
"""

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tw_core._checks import check_flag, check_whole_number
from tw_core._modes import builds_session_graph, without_autograph

DEVICES = (tf.config.LogicalDevice, tf.config.PhysicalDevice)


def device_name(device: Any) -> Any:
    """Returns the device string of a device of ``tf.config``; anything else as it is.

    Raises:
      ValueError: a physical device that is hidden, or divided into logical ones.
    """
    if isinstance(device, tf.config.LogicalDevice):
        return device.name
    if not isinstance(device, tf.config.PhysicalDevice):
        return device
    kind, number = device.device_type, 0
    for own in tf.config.get_visible_devices(kind):
        parts = len(tf.config.get_logical_device_configuration(own) or [None])
        if own == device and parts == 1:
            return f"/device:{kind}:{number}"
        if own == device:
            names = [f"/device:{kind}:{number + n}" for n in range(parts)]
            raise ValueError(
                f"{device.name} is divided into logical devices; pass those you want "
                f"of {names}."
            )
        number += parts
    raise ValueError(
        f"{device.name} is not visible to TensorFlow; pass one of "
        "tf.config.list_logical_devices(), or see tf.config.set_visible_devices."
    )


def parse_device(device: str) -> tf.DeviceSpec:
    """Parses a device string, refusing negative device numbers."""
    device = device_name(device)
    if not isinstance(device, str):
        raise ValueError(_no_device(device))
    try:
        spec = tf.DeviceSpec.from_string(device)
        negative = spec.device_index is not None and spec.device_index < 0
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(_no_device(device)) from error
    if negative:
        raise ValueError(_no_device(device))
    return spec


def canonical_device(device: str) -> str:
    """Spells a device canonically, so that two strings can be compared.

    Args:
      device: any spelling TensorFlow takes, such as ``"/gpu:0"``,
        ``"GPU:0"`` or ``"/job:localhost/replica:0/task:0/device:GPU:0"``.

    Returns:
      ``"/device:GPU:0"`` for a device of this process; with job, replica and
      task kept for any other; ``""`` for no device.

    Raises:
      ValueError: TensorFlow cannot read the string.

    >>> canonical_device("/job:localhost/replica:0/task:0/cpu:1")
    '/device:CPU:1'
    >>> canonical_device("/job:ps/task:1/cpu:0")
    '/job:ps/task:1/device:CPU:0'
    """
    spec = parse_device(device)
    if spec.job in (None, "localhost") and not spec.replica and not spec.task:
        spec = tf.DeviceSpec(
            device_type=spec.device_type, device_index=spec.device_index
        )
    return str(spec.to_string())


def host_of(device: str | None) -> str:
    """Names the first CPU of the task that a device belongs to.

    Args:
      device: any spelling TensorFlow takes; ``""`` or None for no device.

    >>> host_of("/job:worker/task:1/gpu:3")
    '/job:worker/task:1/device:CPU:0'
    >>> host_of("")
    '/device:CPU:0'
    """
    spec = parse_device(device or "")
    return str(spec.replace(device_type="CPU", device_index=0).to_string())


def repeated_devices(devices: Iterable[str]) -> list[str]:
    """Returns the devices that occur more than once, spelt canonically and sorted.

    >>> repeated_devices(["/gpu:1", "/cpu:0", "/device:GPU:1"])
    ['/device:GPU:1']
    """
    counts = Counter(canonical_device(device) for device in devices)
    return sorted((d for d, count in counts.items() if count > 1), key=by_number)


def by_number(device: str) -> tuple[int, str]:
    """Sorts devices of a kind by their numbers: 2 before 10."""
    return len(device), device


def available_devices() -> list[str]:
    """Lists this process's GPUs, or its logical CPUs where it has none.

    Returns:
      Device strings such as ``["/gpu:0", "/gpu:1"]`` or ``["/cpu:0"]``. More
      CPUs appear after ``use_logical_cpus(n)``.
    """
    gpus = count_logical_devices("GPU")
    if gpus:
        return [f"/gpu:{i}" for i in range(gpus)]
    return [f"/cpu:{i}" for i in range(count_logical_devices("CPU"))]


def first_gpus(count: int | None) -> list[str]:
    """Lists this process's first GPUs, or all, of which there must be one."""
    gpus = count_logical_devices("GPU")
    if count is not None:
        check_whole_number(devices=count, at_least=1)
    if not gpus:
        raise ValueError(
            f"devices={count} means GPUs, and this process has none. {why_no_gpu()}, "
            "or pass a list, such as tw_core.use_logical_cpus(2)."
        )
    if count is not None and count > gpus:
        raise ValueError(
            f"devices must be at most {gpus}, the number of GPUs that TensorFlow sees; "
            f"got {count}. Pass a list to have several towers on a GPU: [0, 0]."
        )
    return [f"/gpu:{i}" for i in range(gpus if count is None else count)]


def use_logical_cpus(count: int) -> list[str]:
    """Splits the CPU into ``count`` logical devices, for towers without GPUs.

    Sessions made without a configuration have them too; a session with its own
    ``ConfigProto`` needs ``session_config(num_cpus=count)``.

    Args:
      count: how many logical CPU devices this process is to have, at least 1.

    Returns:
      Their device strings, ``["/cpu:0", ...]``.

    Raises:
      TypeError: ``count`` is not a whole number.
      ValueError: ``count`` is below 1.
      RuntimeError: TensorFlow has already started with another number.
    """
    check_whole_number(count=count, at_least=1)
    if count_logical_devices("CPU") != count:
        _configure_cpus(count)
    return [f"/cpu:{i}" for i in range(count)]


def session_config(
    *, num_cpus: int | None = None, soft_placement: bool = True
) -> tf.compat.v1.ConfigProto:
    """Makes the configuration recommended for sessions that run towers.

    It keeps sums over towers fast and reproducible: TensorFlow's memory pass rewrites
    large sums into temporaries and single additions, which on CPU devices take twice
    the time and are not reproducible (``docs/design/tensorflow.md``).

    Args:
      num_cpus: logical CPU devices of the session; None leaves TensorFlow's
        own number, which is 1 unless ``use_logical_cpus`` set it.
      soft_placement: whether an op without a kernel for its device may move
        to another one, as v1 code with integer variables on GPUs needs.

    Returns:
      A new ``ConfigProto``: memory pass off, GPU memory allocated as needed, GPUs
      visible and divided as set in ``tf.config``.

    Raises:
      ValueError: ``num_cpus`` is below 1.
      TypeError: ``num_cpus`` is not a whole number, or ``soft_placement`` not a bool.
    """
    if num_cpus is not None:
        check_whole_number(num_cpus=num_cpus, at_least=1)
    check_flag(soft_placement=soft_placement)
    config = tf.compat.v1.ConfigProto(allow_soft_placement=soft_placement)
    config.gpu_options.allow_growth = True
    rewrites = config.graph_options.rewrite_options
    rewrites.memory_optimization = rewrites.NO_MEM_OPT
    config.device_count["CPU"] = num_cpus or count_logical_devices("CPU")
    _use_gpus_of_this_process(config)
    return config


@without_autograph
def check_devices(
    devices: Iterable[str],
    *,
    session: tf.compat.v1.Session | None = None,
) -> None:
    """Refuses devices that this process does not have, naming those it has.

    TensorFlow's soft placement would silently move their work to another device.
    Strings with a job are not checked: the cluster knows them, this process does not.

    Args:
      devices: device strings.
      session: the session that will run the graph; its devices count. Without
        one, the devices TensorFlow is configured with count.

    Raises:
      ValueError: one or more devices are unknown, or TensorFlow cannot read
        the string.
      TypeError: ``devices`` is not a list, or ``session`` is not a session.
    """
    specs = _specs(devices)
    if session is not None and not callable(getattr(session, "list_devices", None)):
        raise TypeError(f"session must be a session; got {session!r}.")
    _check_known(specs, session)


@without_autograph
def check_known_devices(devices: Iterable[str]) -> None:
    """Refuses unknown devices as ``check_devices`` does, where devices are known.

    A session graph runs on the devices of its session: without a default session of
    that graph nothing is checked. Elsewhere TensorFlow's configured devices count.

    Args:
      devices: device strings.

    Raises:
      TypeError: not a list.
      ValueError: one or more devices are unknown, or TensorFlow cannot read
        the string.
    """
    specs = _specs(devices)
    if not builds_session_graph():
        _check_known(specs, None)
        return
    session = tf.compat.v1.get_default_session()
    with tf.init_scope():  # out of function bodies, into the session's graph
        graph = tf.compat.v1.get_default_graph()
    if session is not None and session.graph is graph:
        _check_known(specs, session)


def count_logical_devices(device_type: str) -> int:
    """Counts a type's logical devices, ``"CPU"`` say, without starting the runtime."""
    total = 0
    for physical in tf.config.get_visible_devices(device_type):
        configured = tf.config.get_logical_device_configuration(physical)
        total += len(configured) if configured else 1
    return total


def _no_device(device: object) -> str:
    return (
        f"{device!r} is not a TensorFlow device string; write e.g. '/gpu:0', '/cpu:1' "
        "or '/job:worker/task:0/gpu:0'."
    )


def _configure_cpus(count: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    try:
        tf.config.set_logical_device_configuration(cpu, logical)
    except RuntimeError as error:
        raise RuntimeError(
            f"use_logical_cpus: TensorFlow has already started with "
            f"{count_logical_devices('CPU')} logical CPUs; asked for {count}. Call it "
            "before the first tensor, variable or session."
        ) from error


def _use_gpus_of_this_process(config: tf.compat.v1.ConfigProto) -> None:
    """Gives a session the GPUs, whole or divided, that are set in ``tf.config``."""
    gpus = tf.config.list_physical_devices("GPU")
    visible = [gpu for gpu in gpus if gpu in tf.config.get_visible_devices("GPU")]
    divided = [tf.config.get_logical_device_configuration(gpu) for gpu in visible]
    if gpus and not visible:
        config.device_count["GPU"] = 0
    elif visible != gpus:
        numbers = ",".join(str(gpus.index(gpu)) for gpu in visible)
        config.gpu_options.visible_device_list = numbers
    if any(divided):
        for parts in divided:
            config.gpu_options.experimental.virtual_devices.add(
                memory_limit_mb=[part.memory_limit for part in parts or ()]
            )


def _specs(devices: Iterable[str]) -> dict[str, tf.DeviceSpec]:
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise TypeError(f"devices must be a list of device strings; got {devices!r}.")
    return {device: parse_device(device) for device in map(device_name, devices)}


def _check_known(
    specs: dict[str, tf.DeviceSpec], session: tf.compat.v1.Session | None
) -> None:
    known = _devices_of(session)
    unknown = [device for device, spec in specs.items() if not _is_known(spec, known)]
    if unknown:
        kinds = {specs[device].device_type for device in unknown}
        advice = "Use known ones"
        if "GPU" in kinds and not any("GPU" in own for own in known):
            advice = why_no_gpu()
        raise ValueError(
            f"Unknown devices {unknown}; known are {known}. {advice}, or call "
            "tw_core.use_logical_cpus(n) before TensorFlow starts to have n logical "
            "CPUs."
        )


def why_no_gpu() -> str:
    """Says why TensorFlow sees no GPU, and what to install."""
    if tf.config.list_physical_devices("GPU"):
        return (
            "The GPUs are hidden, or the session has none: see "
            "tf.config.set_visible_devices and ConfigProto.device_count"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides all GPUs from TensorFlow: unset it"
    why = "it was installed without CUDA"
    if tf.test.is_built_with_gpu_support():  # whose libraries may be missing
        why += ", or the machine has no GPU or driver (see nvidia-smi)"
    return f"TensorFlow sees no GPU: {why}. Run pip install 'tensorflow[and-cuda]'"


def _is_known(spec: tf.DeviceSpec, known: Sequence[str]) -> bool:
    if spec.job is not None or spec.device_type is None:
        return True
    name = f"/device:{spec.device_type}:"
    if spec.device_index is None:
        return any(device.startswith(name) for device in known)
    return f"{name}{spec.device_index}" in known


def _devices_of(session: tf.compat.v1.Session | None) -> list[str]:
    """Lists a session's devices; without one, those that TensorFlow will make."""
    if session is None:
        return [
            f"/device:{kind}:{i}"
            for kind in ("CPU", "GPU")
            for i in range(count_logical_devices(kind))
        ]
    # A string without a job means any task of the session's cluster.
    specs = [tf.DeviceSpec.from_string(d.name) for d in session.list_devices()]
    names = {f"/device:{spec.device_type}:{spec.device_index}" for spec in specs}
    return sorted((name for name in names if ":XLA" not in name), key=by_number)
