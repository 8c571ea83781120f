"""Model functions that remember their towers, and handles on the towers built.

As in tensorpack (``tensorpack/tfutils/tower.py``): the model function names a tensor
``"loss"``, the graph calls it ``"tower1/loss:0"``, and the handle of tower 1 finds it
as ``"loss"``.
"""

from collections.abc import Callable, Sequence
from typing import Any, overload

import tensorflow as tf

from tw_core._checks import check_list, check_text
from tw_core.contexts._base import BaseTowerContext, get_current_tower_context


class TowerHandle:
    """One built tower: finds its tensors, variables and collection items."""

    def __init__(
        self,
        context: BaseTowerContext,
        inputs: Sequence[Any],
        outputs: Any,
        input_names: Sequence[str] = (),
    ) -> None:
        """Keeps the inputs and outputs of a tower.

        Args:
          context: the tower, already entered.
          inputs: the tower function's arguments.
          outputs: its result.
          input_names: names under which ``get_tensor`` finds ``inputs``.

        Raises:
          TypeError: ``context`` is not a tower context, or inputs or names are not
            a list.
        """
        if not isinstance(context, BaseTowerContext):
            raise TypeError(
                f"TowerHandle: context must be a tower context; got {context!r}."
            )
        check_list(inputs=inputs, of="inputs", empty=True)
        check_list(input_names=input_names, of="names", empty=True)
        for name in input_names:
            check_text(input_names=name)
        self._context = context
        self._inputs = list(inputs)
        self._outputs = outputs
        self._by_input_name = dict(zip(input_names, inputs, strict=False))

    @property
    def inputs(self) -> list[Any]:
        """The tower function's arguments."""
        return list(self._inputs)

    @property
    def outputs(self) -> Any:
        """The tower function's result."""
        return self._outputs

    @property
    def ns_name(self) -> str:
        """The tower's name scope."""
        return self._context.ns_name

    @property
    def vs_name(self) -> str:
        """The scope of the tower's own variables, or ``""``."""
        return self._context.vs_name

    @property
    def is_training(self) -> bool:
        """Whether it is a training tower."""
        return self._context.is_training

    def get_tensor(self, name: str) -> tf.Tensor:
        """Finds an input, or a tensor by its name inside the tower.

        Args:
          name: of an input in the signature; or of a tensor without the tower's
            prefix, with or without ``":0"``. An input takes precedence over a
            tensor of the same name.

        Raises:
          KeyError: the tower has no such tensor.
          TypeError: ``name`` is not a string.
        """
        check_text(name=name)
        if name.removesuffix(":0") in self._by_input_name:
            return self._by_input_name[name.removesuffix(":0")]
        full_name = _full_name(self.ns_name, name)
        try:
            return self._context.graph.get_tensor_by_name(full_name)
        except (KeyError, ValueError) as error:
            raise KeyError(
                f"{self!r}: no input {name!r} and no tensor {full_name!r}; inputs are "
                f"{sorted(self._by_input_name)}."
            ) from error

    def get_tensors(self, names: Sequence[str]) -> list[tf.Tensor]:
        """Finds several tensors; see ``get_tensor``."""
        check_list(names=names, of="names", empty=True)
        return [self.get_tensor(name) for name in names]

    def get_variable(self, name: str) -> tf.Variable:
        """Finds a variable that the tower made or reuses.

        In a ``tf.function`` it finds the variables that the function read, once the
        trace is done.

        Args:
          name: without the tower's prefix, with or without ``":0"``.

        Raises:
          KeyError: no such variable, or several of this name, as with separately
            built models outside of session graphs.
          TypeError: ``name`` is not a string.
        """
        check_text(name=name)
        full_name = _full_name(self.vs_name, name)
        variables = _variables(self._context.graph)
        found = [v for v in variables if v.name == full_name]
        if len(found) != 1:
            known = sorted({v.name for v in variables})
            raise KeyError(
                f"{self!r}: {len(found) or 'no'} variables {full_name!r} in the graph, "
                f"which has {known}."
            )
        return found[0]

    def get_variables(self, names: Sequence[str]) -> list[tf.Variable]:
        """Finds several variables; see ``get_variable``."""
        check_list(names=names, of="names", empty=True)
        return [self.get_variable(name) for name in names]

    def __getitem__(self, name: str) -> Any:
        """Finds a tensor or, failing that, a variable by name."""
        try:
            return self.get_tensor(name)
        except KeyError:
            return self.get_variable(name)

    def get_collection(
        self, key: str | None = None, name: str | None = None
    ) -> list[Any]:
        """Lists the tower's additions to a collection.

        Args:
          key: the collection.
          name: the older name of ``key``; give one of the two.

        Raises:
          ValueError: neither or both were given.
          TypeError: the collection's name is not a string.
        """
        given = [k for k in (key, name) if k is not None]
        if len(given) != 1:
            raise ValueError(
                f"{self!r}.get_collection: pass key, or name, its older name, but not "
                f"both; got key={key!r}, name={name!r}."
            )
        return self._context.get_collection_in_tower(given[0])

    def __repr__(self) -> str:
        """Shows the tower's name."""
        return f"TowerHandle({self.ns_name!r})"


class TowerHandles(Sequence[TowerHandle]):
    """Handles in the order in which the towers were built."""

    def __init__(self, handles: Sequence[TowerHandle] = ()) -> None:
        """Holds ``handles``.

        Raises:
          TypeError: something that is not a ``TowerHandle``.
        """
        check_list(handles=handles, of="TowerHandle", empty=True)
        others = [h for h in handles if not isinstance(h, TowerHandle)]
        if others:
            raise TypeError(f"TowerHandles: must hold TowerHandle; got {others}.")
        self._handles = list(handles)

    def __len__(self) -> int:
        """Counts the towers."""
        return len(self._handles)

    def __contains__(self, which: object) -> bool:
        """Returns whether this handle, or a tower of this name, is among them."""
        return any(which in (handle, handle.ns_name) for handle in self._handles)

    @overload
    def __getitem__(self, which: int | str) -> TowerHandle: ...

    @overload
    def __getitem__(self, which: slice) -> "TowerHandles": ...

    def __getitem__(self, which: int | str | slice) -> "TowerHandle | TowerHandles":
        """Finds a handle by position or tower name (the latest of that name).

        Raises:
          KeyError: no tower of that name.
          IndexError: no tower at that position.
        """
        if isinstance(which, slice):
            return TowerHandles(self._handles[which])
        if isinstance(which, int):
            return self._handles[which]
        for handle in reversed(self._handles):
            if handle.ns_name == which:
                return handle
        names = [handle.ns_name for handle in self._handles]
        raise KeyError(f"TowerHandles: no tower {which!r}; there are {names}.")

    def training(self) -> "TowerHandles":
        """Picks the training towers."""
        return TowerHandles([h for h in self._handles if h.is_training])

    def inference(self) -> "TowerHandles":
        """Picks the inference towers."""
        return TowerHandles([h for h in self._handles if not h.is_training])


def _variables(graph: tf.Graph) -> list[tf.Variable]:
    """Lists a session graph's variables, or those that a function has read."""
    keys = tf.compat.v1.GraphKeys
    found = [
        variable
        for key in (keys.GLOBAL_VARIABLES, keys.LOCAL_VARIABLES, keys.MODEL_VARIABLES)
        for variable in graph.get_collection(key)
    ]
    used = getattr(graph, "variables", ())
    return list({id(variable): variable for variable in [*found, *used]}.values())


def _full_name(scope: str, name: str) -> str:
    return "/".join(filter(None, (scope, name if ":" in name else f"{name}:0")))


class TowerFunc:
    """Wraps a model function and remembers every tower that it builds.

    Wrapping a ``TowerFunc`` returns it unchanged.
    """

    _tower_fn: Callable[..., Any]
    _input_signature: tuple[Any, ...]
    _handles: list[TowerHandle]

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
            f"TowerFunc: every input needs a name of its own, without ':', '/' or "
            f"blanks; got {names}. Write e.g. "
            "tf.TensorSpec([None, 28, 28], tf.float32, name='image')."
        )
