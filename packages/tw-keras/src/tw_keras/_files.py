"""Files of models and, beside them, of reducers' memory.

A file is written beside its place and then moved there, so that a kill leaves the old
one whole. Memory belongs to weights of one checksum: a kill between the two moves
leaves files that do not belong together, and are told apart when they are read. A model
is worth more than a reducer's memory, so a damaged memory costs a warning only.
"""

import io
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

Arrays = dict[str, Any]
_WEIGHTS, _CONTENT = "weights", "content"  # Members with checksums.
_SUFFIXES = (".keras", ".h5", ".hdf5", ".weights.json")


def is_remote(path: Any) -> bool:
    """Returns whether TensorFlow, not the operating system, reads a path."""
    return "://" in str(path) or str(path).startswith(("/gcs/", "/cns/", "/cfs/"))


def companion_of(filepath: Any) -> str:
    """Returns the path, beside a model's file, of its reducer's memory."""
    return f"{os.fspath(filepath)}.reducer.npz"


@contextmanager
def written_beside(filepath: Any, *, overwrite: bool) -> Iterator[Any]:
    """Yields a path to write to; the files written there then take their places.

    Where that is not possible, or Keras asks before it overwrites, the path itself.
    """
    path = Path(os.path.realpath(os.fspath(filepath)))  # What a link refers to.
    is_file = path.name.endswith(_SUFFIXES) and not path.is_dir()
    may_write = path.parent.is_dir() and os.access(path.parent, os.W_OK)
    asks = path.exists() and not overwrite
    if is_remote(filepath) or not (is_file and may_write) or asks:
        yield filepath
        return
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # Left by a kill.
    partial.mkdir()
    try:
        yield str(partial / path.name)
        written = [own.name for own in partial.iterdir()]
        for name in sorted(written, key=lambda name: name == path.name):  # It is last.
            if path.with_name(name).exists():
                shutil.copymode(path.with_name(name), partial / name)
            os.replace(partial / name, path.with_name(name))
        if Path(companion_of(path)).name not in written:
            Path(companion_of(path)).unlink(missing_ok=True)  # Of older weights.
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_memory(
    filepath: Any, arrays: Mapping[str, Any], weights: Sequence[Any]
) -> None:
    """Writes a reducer's memory beside a file of these weights; nothing if empty."""
    companion = companion_of(filepath)
    if not arrays:
        if tf.io.gfile.exists(companion):
            tf.io.gfile.remove(companion)
        return
    checksums = {_WEIGHTS: _checksum_of(weights), _CONTENT: _checksum(arrays)}
    members: Arrays = {**arrays, **{k: np.array(own) for k, own in checksums.items()}}
    written = io.BytesIO()  # GFile cannot be written out of order.
    np.savez(written, **members)
    with tf.io.gfile.GFile(f"{companion}.partial", "wb") as file:
        file.write(written.getvalue())
    tf.io.gfile.rename(f"{companion}.partial", companion, overwrite=True)


def read_memory(filepath: Any, weights: Sequence[Any]) -> tuple[Arrays, str]:
    """Returns a reducer's memory saved beside a file of these weights.

    Without one that can be used it is empty; the second result then says why, with
    "%s" for the path; "" if there is no file.
    """
    companion = companion_of(filepath)
    if not tf.io.gfile.exists(companion):
        return {}, ""
    try:
        with tf.io.gfile.GFile(companion, "rb") as file:
            content = file.read()
        with zipfile.ZipFile(io.BytesIO(content)) as members:
            sizes = [own.file_size for own in members.infolist()]
        if sum(sizes) > len(content):  # Nothing that we write is compressed.
            raise ValueError(f"has members of {sum(sizes)} bytes")
        with np.load(io.BytesIO(content)) as file:
            if int(file[_WEIGHTS]) != _checksum_of(weights):
                return {}, "%s was saved with other weights"
            arrays = dict(file)
        del arrays[_WEIGHTS]
        if int(arrays.pop(_CONTENT)) != _checksum(arrays):
            raise ValueError("its checksum differs")
        if not all(re.match(r"\d+/", name) for name in arrays):
            raise ValueError(f"has members {sorted(arrays)}")
    except Exception as error:  # A damaged file may raise anything.
        return {}, f"%s is damaged ({str(error).replace('%', '%%') or 'it is empty'})"
    floats = [own for own in arrays.values() if own.dtype.kind in "fc"]
    if not all(np.isfinite(own).all() for own in floats):
        return {}, "%s has NaN or infinite numbers"
    return arrays, ""


def _checksum_of(weights: Sequence[Any]) -> int:
    return _checksum({str(n): own.numpy() for n, own in enumerate(weights)})


def _checksum(arrays: Mapping[str, Any]) -> int:
    """Returns a checksum of names, shapes, dtypes and values."""
    total = 0
    for name, array in sorted(arrays.items()):
        header = repr((name, array.shape, str(array.dtype))).encode()
        total = zlib.crc32(header, total)
        total = zlib.crc32(np.ascontiguousarray(array).tobytes(), total)
    return total
