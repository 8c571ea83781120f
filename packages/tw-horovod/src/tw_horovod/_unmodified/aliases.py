"""Horovod's module names, each for a module of this package."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

VERSION = "0.28.1"
_OURS = "tw_horovod"
_MODULES = {
    "horovod.keras": f"{_OURS}.keras",
    "horovod.keras.callbacks": f"{_OURS}.keras.callbacks",
    "horovod.keras.elastic": f"{_OURS}.elastic",
    "horovod.tensorflow": _OURS,
    "horovod.tensorflow.compression": f"{_OURS}.compression",
    "horovod.tensorflow.elastic": f"{_OURS}.elastic",
    "horovod.tensorflow.functions": _OURS,
    "horovod.tensorflow.keras": f"{_OURS}.keras",
    "horovod.tensorflow.keras.callbacks": f"{_OURS}.keras.callbacks",
    "horovod.tensorflow.keras.elastic": f"{_OURS}.elastic",
    "horovod.tensorflow.mpi_ops": _OURS,
    "horovod.tensorflow.sync_batch_norm": _OURS,
}
# Horovod's modules that are not here, and what to use instead.
_INSTEAD = {
    "horovod.mxnet": "only TensorFlow programs run here",
    "horovod.ray": "start the program with tw-launch --horovod",
    "horovod.run": "start the program with tw-launch --horovod -np N",
    "horovod.runner": "start the program with tw-launch --horovod -np N",
    "horovod.spark": "start the program with tw-launch --horovod on each machine",
    "horovod.tensorflow.data": "use tf.data's own service",
    "horovod.torch": "use torch.nn.parallel.DistributedDataParallel",
}


def install() -> None:
    """Makes Horovod's modules importable: each is one of ours."""
    sys.meta_path.insert(0, _Finder())


def explain(name: str) -> str:
    """Describes why a name of Horovod is missing."""
    instead = _INSTEAD.get(name, "tw_horovod has the names that programs import")
    return f"{name}: not supported by tw_horovod: {instead}"


class _Finder(MetaPathFinder):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        if fullname in _MODULES:
            return ModuleSpec(fullname, _Alias(_MODULES[fullname]))
        if fullname.startswith("horovod."):
            raise ModuleNotFoundError(f"{explain(fullname)}.", name=fullname)
        return None


class _Alias(Loader):
    """Loads a module of ours, which keeps its own name."""

    def __init__(self, ours: str) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._ours)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import has replaced it.
        module.__spec__ = self._own
        for name, ours in _MODULES.items():
            parent, _, child = name.rpartition(".")
            if _MODULES.get(parent) == ours == self._ours:
                setattr(module, child, module)
