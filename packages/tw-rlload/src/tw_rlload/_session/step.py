"""The step in a session graph: towers' losses, and averaged gradients applied.

``optimize`` runs it as it is; ``run_epochs`` runs copies of it in a loop. The objects
that ``build_graph`` returns have the attribute names of RLlib's policies, in its
versions with this optimizer and in later ones (up to 2.9.3, the last one checked).
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from tw_core import Tower, map_towers
from tw_core.internal import apply_pairs, list_pairs, tower_build
from tw_core.variables import Replicated, variable_origin
from tw_rlload._loading.plan import LoadPlan
from tw_rlload._loading.specs import WEIGHTS, ColumnSpec, DataVariables
from tw_rlload._training.gradients import Pairs, Update
from tw_rlload._training.loop import slice_rows

v1 = tf.compat.v1


class SessionStep:
    """One step of K towers, built in the default graph."""

    def __init__(
        self,
        towers: Sequence[Tower],
        specs: Sequence[ColumnSpec],
        variables: DataVariables,
        placeholders: Sequence[tf.Tensor],
        build_graph: Callable[..., Any],
        optimizer: Any,
        update: Update,
    ) -> None:
        """Builds losses and update. Without ``apply_fn`` towers share variables."""
        own_variables = update.apply_fn is not None
        has_weights = specs[-1] is WEIGHTS
        self._fed, self.inputs = _slice_step(towers, specs, variables)

        def build_loss(tensors: list[tf.Tensor]) -> Any:
            if has_weights:
                return build_graph(tensors[:-1], tensors[-1])
            return build_graph(tensors)

        whole = list(placeholders)
        if has_weights:
            whole.append(tf.ones(tf.shape(whole[0])[:1]))
        self.common_loss, built, updates = _build_losses(
            *(towers, whole, self.inputs, build_loss, optimizer),
            own_variables=own_variables,
        )
        self.losses, grad_list = [loss for loss, _ in built], [p for _, p in built]
        self.weights = None  # else [K], numbers of rows that are not pads
        if has_weights:
            self.weights = map_towers(
                lambda _, rows: tf.reduce_sum(rows[-1]), towers, self.inputs
            )
        owned = [[v for _, v in own] for own in grad_list]
        if not own_variables:
            _check_shared(owned)
        pairs = update.combine(
            *(grad_list, self.weights), bound=update.bound, own_variables=own_variables
        )
        # Reported losses are read before the update, whichever run fetches them.
        awaited = [*updates, *filter(tf.is_tensor, map(loss_of, self.losses))]
        if own_variables:  # apply_fn may not wait for all gradients by itself
            grads = [tf.identity(grad) for own in pairs for grad, _ in own]
            awaited.append(tf.group(*grads))
        with tf.control_dependencies(awaited):
            if own_variables:
                self.train_op = _checked_op(update.apply_once(pairs, owned, optimizer))
            else:
                self.train_op = apply_pairs(optimizer, pairs[0])
        self.fetches = [_fetches_of(loss) for loss in self.losses]

    def request(
        self, plan: LoadPlan, buffer: int, first: int
    ) -> tuple[dict[str, Any], dict[Any, Any]]:
        """Returns the fetches and feeds to train on the step at sequence ``first``."""
        fetches = {**self.fetches[-1], "train": self.train_op, "towers": self.fetches}
        count, length = plan.sequences_per_device_step, plan.sequence_length
        return fetches, {**self.own_feeds(), self._fed: (first, count, length, buffer)}

    def own_feeds(self) -> dict[Any, Any]:
        """Returns the losses' own placeholders and their current values."""
        feeds: dict[Any, Any] = {}
        for loss in self.losses:
            own = getattr(loss, "extra_compute_grad_feed_dict", None) or dict
            feeds.update(own() or {})
        return feeds


def _slice_step(
    towers: Sequence[Tower], specs: Sequence[ColumnSpec], variables: DataVariables
) -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
    """Slices a step's [K][C] rows, by a placeholder of four numbers, out of buffers."""
    with tf.device("/cpu:0"):
        # One feed for four numbers, since every feed takes time.
        fed = v1.placeholder(tf.int32, [4], "cut")
        *cut, buffer = tf.unstack(fed)  # first sequence, their number, their length

    def pick(tower: Tower) -> list[tf.Tensor]:
        branches = [
            partial(slice_rows, columns[tower.index], specs, *cut)
            for columns in variables
        ]
        if len(branches) == 1:
            return branches[0]()
        picked: list[tf.Tensor] = tf.switch_case(buffer, branches)
        return picked

    return fed, map_towers(pick, towers)


def _check_made_once(made: set[int], variables: Sequence[Any]) -> None:
    """Refuses variables of tower 0 that the common loss did not make."""
    new = {id(variable) for variable in v1.global_variables()} - made
    names = [str(variable.name) for variable in variables if id(variable) in new]
    if names:
        raise ValueError(
            "build_graph must find tower 0's variables again, as it is called for all "
            f"rows first; got new ones: {names}. Make them with "
            "tf.compat.v1.get_variable."
        )


def _checked_op(returned: Any) -> Any:
    if not isinstance(returned, tf.Operation | tf.Tensor):
        raise TypeError(
            f"apply_fn must return the op that applies gradients; got {returned!r:.80} "
            f"({type(returned).__name__})."
        )
    return returned


def _check_shared(towers: Sequence[Sequence[Any]]) -> None:
    """Refuses variables, [K] lists, that are not the same objects in all towers."""
    variables = {id(v): v for tower in towers for v in tower}
    everywhere = set.intersection(*({id(v) for v in tower} for tower in towers))
    own = [
        str(getattr(variable, "name", variable))
        for key, variable in variables.items()
        if key not in everywhere
    ]
    if own:
        raise ValueError(
            f"All towers must share their variables; got different ones: {own}. Make "
            "them with tf.compat.v1.get_variable, or once, outside of build_graph."
        )


def loss_of(tower_loss: Any) -> tf.Tensor | None:
    """Returns a tower's scalar loss, or None if it has no such attribute."""
    for name in ("loss", "_loss"):
        loss: Any = getattr(tower_loss, name, None)
        if tf.is_tensor(loss) and loss.shape.rank == 0:
            return loss
    return None


def _build_losses(
    towers: Sequence[Tower],
    placeholders: Sequence[tf.Tensor],
    tower_inputs: Sequence[Sequence[tf.Tensor]],
    build_loss: Callable[..., Any],
    optimizer: Any,
    *,
    own_variables: bool,
) -> tuple[Any, list[tuple[Any, Pairs]], list[Any]]:
    """Builds the common loss, which makes the variables, then each tower's.

    With ``own_variables`` it makes tower 0's, and the other towers make theirs. Returns
    the common loss, [K] losses with gradients, and the towers' update ops (batch norm).
    """

    def scope_of(tower: Tower) -> AbstractContextManager[None]:
        return Replicated().scope(tower) if own_variables else nullcontext()

    def build(tower: Tower, inputs: Sequence[tf.Tensor]) -> tuple[Any, Pairs]:
        with scope_of(tower):
            loss = build_loss(list(inputs))
        pairs = _gradients_of(loss, optimizer)
        return loss, _without_other_towers(tower, pairs) if own_variables else pairs

    with (
        v1.variable_scope(
            v1.get_variable_scope(), reuse=v1.AUTO_REUSE, auxiliary_name_scope=False
        ),
        tower_build() if own_variables else nullcontext(),
    ):
        with tf.name_scope("tower"), scope_of(towers[0]):
            common = build_loss(list(placeholders))
        known = {id(update) for update in v1.get_collection(v1.GraphKeys.UPDATE_OPS)}
        made = {id(variable) for variable in v1.global_variables()}
        built = map_towers(build, towers, tower_inputs)
    if own_variables:
        _check_made_once(made, [variable for _, variable in built[0][1]])
    updates = v1.get_collection(v1.GraphKeys.UPDATE_OPS)
    return common, built, [update for update in updates if id(update) not in known]


def _without_other_towers(tower: Tower, pairs: Pairs) -> Pairs:
    # Without a list of variables, an optimizer differentiates by all in the graph.
    def is_others(variable: Any) -> bool:
        origin = variable_origin(variable)
        return (origin.tower if origin else 0) != tower.index

    return [(g, v) for g, v in pairs if g is not None or not is_others(v)]


def _gradients_of(tower_loss: Any, optimizer: Any) -> Pairs:
    """Returns a tower's gradients, from its ``gradients`` method."""
    kind = type(tower_loss).__name__
    gradients = getattr(tower_loss, "gradients", None)
    if not callable(gradients):
        raise TypeError(
            f"build_graph must return an object with gradients(optimizer); got {kind}."
        )
    who = f"{kind}.gradients"
    result = f"the result of {who}, for one optimizer and one loss,"
    if not _takes_loss(gradients):
        return list_pairs(result, gradients(optimizer))
    loss = loss_of(tower_loss)
    if loss is None:
        raise TypeError(
            f"{who} takes a loss as well as the optimizer, but {kind} has no scalar "
            "tensor `loss` (or `_loss`) to pass to it."
        )
    return list_pairs(result, gradients(optimizer, loss))


def _fetches_of(tower_loss: Any) -> dict[str, Any]:
    """Returns the fetches that a tower computes along with its gradients."""
    for name in ("_get_grad_and_stats_fetches", "extra_compute_grad_fetches"):
        fetches = getattr(tower_loss, name, None)
        if fetches:
            return dict(fetches() or {})
    return {}


def _takes_loss(gradients: Any) -> bool:
    try:
        inspect.signature(gradients).bind(None)
    except TypeError:
        return True
    return False
