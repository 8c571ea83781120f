"""The part of a ``TowerModel`` that behaves as tower 0's model, an ordinary one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import keras

from tw_keras._copies.copies import Copies
from tw_keras._keras_compat import look_up

T = TypeVar("T")


class OfTower0(Generic[T]):
    """An attribute or a method of tower 0's model."""

    def __init__(self, before: Any = None) -> None:
        """Takes the value to return before the copies exist."""
        self._before = before

    def __set_name__(self, owner: type, name: str) -> None:
        self._name, self.__doc__ = name, f"Tower 0's ``{name}``."

    def __get__(self, model: Any, kind: Any = None) -> T:
        if model is None:
            return cast(T, self)
        main = _tower_0(model)
        return cast(T, self._before if main is None else getattr(main, self._name))

    def __set__(self, model: Any, value: Any) -> None:
        """Does nothing: Keras sets some attributes while it creates the object."""


def _tower_0(model: Any) -> Any:
    """Returns tower 0's model; None before the copies exist, when Keras reads some."""
    copies = vars(model).get("_copies")
    return None if copies is None else copies.main


# To mypy, which reads no types of Keras, a model of Keras has any attribute: it would
# accept a misspelt one. It sees a class instead, which lists what ``keras.Model`` has:
# it takes MYPY for true, and does not skip ``if 0`` as pyright does.
MYPY = False
if 0:

    class Model:
        """What a model has, and nothing below overrides or calls by another type."""

        activity_regularizer: Any
        add_loss: Callable[..., None]
        add_weight: Callable[..., keras.Variable]
        autocast: Any
        build: Callable[..., None]
        build_from_config: Callable[..., None]
        compile_from_config: Callable[..., None]
        compiled: bool
        compiled_loss: Any
        compiled_metrics: Any
        compute_dtype: str
        compute_mask: Callable[..., Any]
        compute_metrics: Callable[..., dict[str, Any]]
        compute_output_shape: Callable[..., Any]
        compute_output_spec: Callable[..., Any]
        dtype: str
        dtype_policy: Any
        from_config: Callable[..., Any]
        get_metrics_result: Callable[[], dict[str, Any]]
        get_state_tree: Callable[..., dict[str, Any]]
        get_weights: Callable[[], list[Any]]
        history: Any
        input_dtype: str
        input_spec: Any
        jit_compile: Any
        load_own_variables: Callable[[Any], None]
        metrics_names: list[str]
        metrics_variables: list[keras.Variable]
        name: str
        optimizer: Any
        path: str
        predict_function: Any
        run_eagerly: bool
        set_state_tree: Callable[..., None]
        stateless_call: Callable[..., Any]
        stateless_compute_loss: Callable[..., Any]
        steps_per_execution: int
        supports_jit: bool
        supports_masking: bool
        symbolic_call: Callable[..., Any]
        test_function: Any
        train_function: Any
        variable_dtype: str

        _flatten_metrics_in_order: Callable[..., Any]
        _get_metrics_result_or_logs: Callable[..., Any]

        def __init__(self, *, name: str | None) -> None: ...
        def compile(self, *args: Any, **kwargs: Any) -> None: ...
        def evaluate(self, *args: Any, **kwargs: Any) -> Any: ...
        def fit(self, *args: Any, **kwargs: Any) -> Any: ...
        def predict(self, *args: Any, **kwargs: Any) -> Any: ...
        def predict_on_batch(self, x: Any) -> Any: ...
        def reset_metrics(self) -> None: ...


if not MYPY:
    from keras import Model


class AsTower0(Model):
    """Behaves as tower 0's model, which Keras saves, shows and copies."""

    _copies: Copies

    variables = OfTower0[list[keras.Variable]]()
    trainable_variables = OfTower0[list[keras.Variable]]()
    non_trainable_variables = OfTower0[list[keras.Variable]]()
    weights = OfTower0[list[keras.Variable]]()
    trainable_weights = OfTower0[list[keras.Variable]]()
    non_trainable_weights = OfTower0[list[keras.Variable]]()
    layers = OfTower0[list[keras.layers.Layer]]([])
    metrics = OfTower0[list[keras.metrics.Metric]]()
    losses = OfTower0[list[Any]]()
    loss = OfTower0[Any]()
    built = OfTower0[bool](False)
    input = OfTower0[Any]()
    output = OfTower0[Any]()
    inputs = OfTower0[Any]()
    outputs = OfTower0[Any]()
    input_shape = OfTower0[Any]()
    output_shape = OfTower0[Any]()

    export = OfTower0[Callable[..., None]]()
    summary = OfTower0[Callable[..., None]]()
    get_layer = OfTower0[Callable[..., keras.layers.Layer]]()
    to_json = OfTower0[Callable[..., str]]()
    count_params = OfTower0[Callable[[], int]]()
    get_config = OfTower0[Callable[[], dict[str, Any]]]()
    get_build_config = OfTower0[Callable[[], Any]]()
    save_own_variables = OfTower0[Callable[[Any], None]]()
    _obj_type = OfTower0[Callable[[], str]]()
    # For ``clone_model``.
    _layers = OfTower0[list[keras.layers.Layer]]([])
    _run_through_graph = OfTower0[Callable[..., Any]]()
    # A tf.train.Checkpoint of this equals one of the plain model.
    _trackable_children = OfTower0[Callable[..., Any]]()

    @property
    def trainable(self) -> bool:
        """Whether the model is trainable; set in every copy."""
        main = _tower_0(self)
        return main is None or bool(main.trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        if _tower_0(self) is not None:
            for model in self._copies.models.distinct:
                model.trainable = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls tower 0's copy, which also becomes part of a model built from this."""
        return self._copies.main(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Calls tower 0's copy."""
        return self._copies.main(*args, **kwargs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Computes tower 0's loss."""
        return self._copies.main.compute_loss(*args, **kwargs)

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns tower 0's compile config; None with an optimizer over towers."""
        with self._copies.without_wrapped():
            return self._copies.main.get_compile_config()  # type: ignore[no-any-return]

    def quantize(self, *args: Any, **kwargs: Any) -> None:
        """Refuses: each tower would be quantized separately."""
        raise NotImplementedError(
            "TowerModel: cannot be quantized; call quantize of model.towers[0], an "
            "ordinary model."
        )

    @property  # type: ignore[misc] # of ``object`` it can be set
    def __class__(self) -> Any:
        # ``keras.saving.save_model`` writes an object's ``__class__``, and callbacks
        # read the class's name: here those of tower 0. ``isinstance`` asks ``type``
        # too, and so accepts both that class and ``TowerModel``.
        main = _tower_0(self)
        return type(self) if main is None else type(main)

    def __repr__(self) -> str:
        return f"<TowerModel name={self.name}, built={self.built}>"

    def __dir__(self) -> list[str]:
        # Keras saves the attributes with these names, and must find tower 0's alone.
        return dir(self._copies.main)

    def __reduce__(self) -> Any:
        with self._copies.without_wrapped():
            return self._copies.main.__reduce__()

    def _lookup_dependency(self, *args: Any, **kwargs: Any) -> Any:
        return look_up(self._copies.main, *args, **kwargs)

    if not TYPE_CHECKING:  # To checkers a misspelt name is an error.

        def __getattr__(self, name: str) -> Any:
            # Only for names that nothing here defines: those of the user's class.
            if name.startswith("_") or "_copies" not in vars(self):
                raise AttributeError(f"TowerModel has no attribute {name!r}.")
            return getattr(self._copies.main, name)

    def __setattr__(self, name: str, value: Any) -> None:
        main = _tower_0(self)
        is_ours = main is None or name.startswith("_")
        is_ours = is_ours or name in vars(self) or hasattr(type(self), name)
        if is_ours or not hasattr(main, name):
            super().__setattr__(name, value)
            return
        for model in self._copies.models.distinct:
            setattr(model, name, value)
