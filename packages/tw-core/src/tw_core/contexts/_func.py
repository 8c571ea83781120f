"""A model function that remembers the towers it has built.

As in tensorpack (``tensorpack/tfutils/tower.py``): after the function has run in
several towers, its handles find the tensors and variables of each.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tw_core.checks import check_list, public
from tw_core.contexts._base import get_current_tower_context
from tw_core.contexts._handles import TowerHandle, TowerHandles


class TowerFunc:
    """Wraps a model function and remembers every tower that it builds.

    Wrapping a ``TowerFunc`` returns it unchanged.
    """

    _tower_fn: Callable[..., Any]
    _input_signature: tuple[Any, ...]
    _handles: list[TowerHandle]

    @public
    def __new__(
        cls, tower_fn: "Callable[..., Any] | TowerFunc", input_signature: Sequence[Any]
    ) -> "TowerFunc":
        """Wraps ``tower_fn``.

        Args:
          tower_fn: builds the model from its inputs; called under a tower
            context.
          input_signature: one object with a ``name`` per input, such as
            ``tf.TensorSpec``.

        Raises:
          TypeError: ``tower_fn`` is not callable, or ``input_signature`` is not a list.
          ValueError: an input without a name, two with the same name, or a
            name with a colon, a slash or a blank.
        """
        if isinstance(tower_fn, TowerFunc):
            return tower_fn
        if not callable(tower_fn):
            raise TypeError(
                f"TowerFunc: tower_fn must be a function that builds a tower from its "
                f"inputs; got {tower_fn!r}."
            )
        check_list(input_signature=input_signature, of="specs", empty=True)
        _check_input_names([getattr(spec, "name", None) for spec in input_signature])
        self = super().__new__(cls)
        self._tower_fn = tower_fn
        self._input_signature = tuple(input_signature)
        self._handles = []
        return self

    def __call__(self, *args: Any) -> Any:
        """Builds one tower; must run under a tower context.

        Returns:
          The wrapped function's result.

        Raises:
          RuntimeError: outside of a tower context.
          ValueError: the number of inputs is not the signature's.
        """
        context = get_current_tower_context()
        if context is None:
            raise RuntimeError(
                "TowerFunc: call it under a tower context, e.g. "
                "with TowerContext('tower0', is_training=True): ..."
            )
        names = [spec.name for spec in self._input_signature]
        if len(args) != len(names):
            raise ValueError(
                f"TowerFunc: takes one input per name of the signature, {names}; got "
                f"{len(args)}."
            )
        outputs = self._tower_fn(*args)
        self._handles.append(TowerHandle(context, args, outputs, names))
        return outputs

    @property
    def input_signature(self) -> tuple[Any, ...]:
        """The specs of the inputs."""
        return self._input_signature

    @property
    def towers(self) -> TowerHandles:
        """Handles on the towers built so far, in the order of building.

        In a ``tf.function`` every trace adds its own, and keeps its graph alive
        as long as this object lives; ``towers["tower0"]`` is the latest.
        """
        return TowerHandles(self._handles)


def _check_input_names(names: list[Any]) -> None:
    repeated = {name for name in names if names.count(name) > 1}
    unfit = [
        name
        for name in names
        if not isinstance(name, str) or not name or set(name) & set(":/ ")
    ]
    if repeated or unfit:
        raise ValueError(
            f"TowerFunc: every input needs a name of its own, without ':', '/' and "
            f"blanks; got {names}. Write e.g. "
            "tf.TensorSpec([None, 28, 28], tf.float32, name='image')."
        )
