"""This package's part of ``tw-doctor``, which finds it by an entry point."""

import warnings

from tw_launch import is_exposed, read_tf_config


def describe_tf_config() -> str:
    """Describes this process's task, or raises as ``read_tf_config`` does."""
    task = read_tf_config()
    said = f"task {task.job}:{task.index} of {dict(task.addresses)}"
    if task.address is None:
        return said
    with warnings.catch_warnings(record=True) as unknown:
        warnings.simplefilter("always")
        is_open = is_exposed(int(task.address.rsplit(":", 1)[1]))
    if unknown:
        return f"{said}; whether others can reach {task.address} is unknown"
    state = "a server there is open to other machines" if is_open else "not open now"
    return f"{said}; {task.address}: {state}"
