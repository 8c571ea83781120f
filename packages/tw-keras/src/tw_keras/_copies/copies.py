"""The copies of a model, with all that trains them: optimizers, a reducer, ranks."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tw_core import Tower
from tw_core.internal import follow_variables
from tw_core.ranks import RankGroup
from tw_keras import _checks
from tw_keras._copies import building
from tw_keras._copies.models import Models
from tw_keras._keras_compat import compiles_by_default, layers_of, state_of_layers
from tw_keras._over_ranks.agreement import take_of_rank_0
from tw_keras._over_ranks.ranks import Ranks
from tw_keras._over_ranks.sharded import ShardedStates
from tw_keras._update.memory import Memory
from tw_keras._update.over_towers import WrappedOptimizer, wrapped
from tw_keras._update.row import Row, Setting
from tw_keras._update.states import State
from tw_reduce import Reducer

_log = logging.getLogger(__name__)
Weigh = Callable[[Any, Any, Any], Any]


class Copies:
    """What a ``TowerModel`` trains: its models, their optimizers' state, other ranks.

    ``models``: the towers' copies, of which the first, ``main``, is saved. ``row``: an
    update, one per optimizer; ``setting``: what all updates have in common. ``memory``:
    a reducer's, and ``sharded``: the state of optimizers of which ranks have parts;
    ``states``: those of both that there are. ``assigned``: weights that a step assigns.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        towers: Sequence[Tower],
        variables: str,
        *,
        reducer: Reducer | None,
        weigh: Weigh | None,
        adds: bool,
        inline: bool | None,
        ranks: Ranks | None,
    ) -> None:
        """Calls ``make_model`` for every tower, or once where they share variables.

        The arguments are those of ``TowerModel``; ``adds``: losses are sums over rows,
        whatever ``compile`` says.
        """
        self.towers, self.variables, self.ranks = towers, variables, ranks
        self.weigh, self.adds, self.inline = weigh, adds, inline
        self.may_fall_back = False  # to steps without XLA
        self.train_batches: Any = None  # Keras's, while a fit goes on
        self.assigned: list[Any] = []  # tower 0's variables that train, by a step
        is_shared = variables == "parameter_server"
        self.models = Models(make_model, towers, is_shared=is_shared)
        self.main = self.models.main
        self._alone = alone = None if ranks is None else ranks.alone
        self.outer = None if alone is None else alone.settings.outer
        # The other ranks, if training steps exchange anything with them.
        self.ranks_in_steps = others = ranks if alone is None else None
        exchanges = None if others is None else others.exchanges
        self.memory = Memory(
            *(reducer, towers if others is None else towers[:1]),
            of_towers=self.models.counterparts,
            trained_of=lambda n, optimizer: self.row(n, optimizer).trained,
            group_of=self._group_of,
            group=None if ranks is None else ranks.group,
        )
        if alone is not None:
            alone.find, alone.find_state = self._averaged, self._averaged_state
        self.sharded = ShardedStates(exchanges, towers)
        has_shards = variables == "sharded" and exchanges and exchanges.group.size > 1
        with tf.init_scope(), tf.device("/cpu:0"):
            at_once = tf.Variable(True, trainable=False)
        self.setting = Setting(
            towers=towers,
            variables=variables,
            of_towers=self.models.counterparts,
            # For callbacks that read optimizers between batches.
            at_once=at_once,
            reducer=None if self.memory else reducer,
            memory=self.memory or None,
            exchanges=exchanges,
            shards=self.sharded if has_shards else None,
        )
        kinds: list[tuple[State, bool]] = [
            (self.sharded, bool(has_shards)),
            (self.memory, bool(self.memory)),
        ]
        self.states = [state for state, is_there in kinds if is_there]
        self._rows: dict[int, Row] = {}  # by optimizer
        if self.outer is not None:  # so that it is saved with tower 0
            setattr(self.main, _checks.OUTER, self.outer)
        self.make_equal()

    @property
    def is_plain(self) -> bool:
        """Whether a lone tower trains exactly as its plain model would."""
        return (
            len(self.towers) == 1
            and self.ranks is None
            and self.setting.reducer is None
            and not self.memory
            and self.variables != "parameter_server"  # maybe on another device
            and not any(isinstance(one, WrappedOptimizer) for one in self.optimizers)
        )

    def compiles(self, asked: bool | str) -> bool:
        """Returns whether XLA compiles steps; "auto": as Keras does, for GPUs."""
        kind_of = tf.DeviceSpec.from_string
        are_gpus = "GPU" in [kind_of(tower.device).device_type for tower in self.towers]
        # XLA cannot assign variables on another device.
        if asked == "auto" and not (are_gpus and self.variables != "parameter_server"):
            return False
        others = [layer for layer in layers_of(self.main) if not layer.supports_jit]
        if asked and others:
            names = ", ".join(layer.name for layer in others)
            _log.warning(
                "TowerModel: steps run without XLA, which cannot compile %s; "
                "compile(jit_compile=False) silences this",
                names,
            )
            return False
        # Keras itself does not where operations must be deterministic.
        return bool(compiles_by_default(self.main) if asked == "auto" else asked)

    @property
    def optimizers(self) -> list[Any]:
        """Tower 0's optimizers, which update all towers."""
        return _checks.optimizers_of(self.main)

    def compile(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Compiles every copy, all with tower 0's optimizers."""
        self._rows.clear()
        self.models.compile(*tf.nest.map_structure(wrapped, (args, options)))
        kind: Any = type(self.main)
        is_plain = kind.compute_loss is keras.Model.compute_loss
        if is_plain and not building.has_own_step(self.main):
            # Other steps may call a compiled loss themselves, and average.
            _checks.check_losses(_checks.reductions_of(self.main))
        self.adopt_optimizers()

    def adopt_optimizers(self) -> None:
        """Makes all towers use tower 0's optimizers."""
        optimizers = self.optimizers
        for name, value in list(vars(self.main).items()):
            if isinstance(value, keras.optimizers.Optimizer):
                for model in self.models.distinct[1:]:
                    setattr(model, name, value)
        reduces = self.setting.reducer is not None and self.ranks_in_steps is None
        reduces = reduces or bool(self.memory)
        _checks.check_optimizers(
            *(optimizers, self.variables),
            num_towers=len(self.towers),
            reduces=reduces,
        )
        for state in self.states:
            state.keep(optimizers)

    @contextmanager
    def without_wrapped(self) -> Iterator[None]:
        """Detaches an optimizer over towers while tower 0 is saved."""
        main, optimizer = self.main, self.optimizer
        if not isinstance(optimizer, WrappedOptimizer):
            yield
            return
        main.optimizer, main.compiled = None, False
        try:
            yield
        finally:
            main.optimizer, main.compiled = optimizer, True

    def check_eager(self) -> None:
        """Refuses eager steps of layers synchronised over ranks: they have no sums."""
        others = self.ranks_in_steps
        is_one = others is None or others.group.size == 1
        synchronized = [] if is_one else _checks.synchronized_layers_of(self.main)
        if synchronized:
            raise ValueError(
                f"TowerModel: {', '.join(synchronized)} are synchronised over ranks, "
                "which needs run_eagerly=False; or make them with synchronized=False."
            )

    def make_equal(self) -> None:
        """Copies tower 0's values, also of optimizers, to all, once all are built."""
        if not self.models.make_equal() or self.variables == "parameter_server":
            return
        for n, optimizer in enumerate(self.optimizers):
            row, is_main = self.row(n, optimizer), optimizer is self.optimizer
            if optimizer.built and is_main:
                row.build(self.main.trainable_variables)
            row.place.make_equal()

    @property
    def optimizer(self) -> Any:
        """The optimizer of ``compile``, which updates all of the model; or None."""
        return getattr(self.main, "optimizer", None)

    def row(self, number: int, optimizer: Any) -> Row:
        """Returns the stages of the updates by the n-th optimizer."""
        if id(optimizer) not in self._rows:
            self._rows[id(optimizer)] = Row(number, optimizer, self.setting)
        return self._rows[id(optimizer)]

    def build_optimizer(self) -> None:
        """Creates the state of the optimizer of ``compile``, placed for updates."""
        number = self.optimizers.index(self.optimizer)
        self.row(number, self.optimizer).build(self.main.trainable_variables)

    def _group_of(self, number: int) -> RankGroup | None:
        """Returns the group of the n-th optimizer's reducer with memory."""
        exchanges = self.setting.exchanges
        what = f"sums of a reducer, update {number}"
        return None if exchanges is None else exchanges.group_of(what)

    def settle(self, *, over_ranks: bool) -> None:
        """Moves accumulated gradients to where they are saved."""
        if self.setting.exchanges is not None:
            self.setting.exchanges.count_anew()
        for row in self._rows.values():
            row.settle(over_ranks=over_ranks)

    def _averaged(self) -> list[list[Any]]:
        """Returns [K][N] variables that ranks average; [1][N] if towers share them."""
        lists = self.models.counterparts(self.models.kept_equal())
        return lists[:1] if self.variables == "parameter_server" else lists

    def _averaged_state(self) -> list[list[Any]]:
        """Returns [K][M] variables of the optimizers; [1][M] if towers share them."""
        states = []
        for n, optimizer in enumerate(self.optimizers):
            if optimizer.built and not isinstance(optimizer, WrappedOptimizer):
                states.append(self.row(n, optimizer).place.states or [optimizer])
        return [
            [v for state in of_tower for v in state.variables]
            for of_tower in zip(*states, strict=True)
        ]

    def build_outer(self) -> None:
        """Creates the outer optimizer's state, before files are loaded into it."""
        alone = self._alone
        if alone is not None and self.outer and self.models.are_built and alone.follows:
            with tf.device(self.towers[0].device):
                follow_variables(self.outer, self._averaged()[0])

    def beside_models(self) -> list[tuple[Any, ...]]:
        """Returns [K] tuples of objects, apart from its model, that a tower may use."""
        of_rows = [row.place.states for row in self._rows.values()]
        states = [state for state in of_rows if len(state) == len(self.towers)]
        seeds, unlisted = building.global_seeds(), self.models.unlisted()
        return [
            ([state[k] for state in states], seeds, unlisted[k], by_row)
            for k, by_row in enumerate(self.models.states_by_row)
        ]

    def take_from_rank_0(self, number: int = 0) -> int:
        """Gives this rank's towers rank 0's values, including the optimizers'.

        Returns rank 0's ``number``.
        """
        if self.ranks is None or not self.models.are_built:
            return number
        group = self.ranks.group
        is_built = self.optimizer is not None and self.optimizer.built
        seeds, loaded = building.global_seeds(), int(self.sharded.has_loaded)
        has_built, loaded, number = take_of_rank_0(
            group, int(is_built), loaded, number, seeds=seeds
        )
        if has_built and not is_built:
            self.build_optimizer()
        self.build_outer()
        if loaded:
            self.sharded.scatter_loaded()
        variables = [*self.main.variables, *self.models.unlisted_state()]
        variables += [] if self.outer is None else self.outer.variables
        for n, optimizer in enumerate(self.optimizers):
            variables += self.row(n, optimizer).place.of_rank_0(group)
        had_begun = self.ranks.has_begun
        self.ranks.begin(list({id(v): v for v in variables}.values()))
        self.make_equal()
        if not had_begun:
            self.sharded.begin_anew()
        return number

    def take_state_of_ranks(self) -> None:
        """Makes non-trainable state equal on all towers of all ranks."""
        state = state_of_layers(self.main)
        state += [v for v in self.models.unlisted_state() if not v.trainable]
        if self.ranks is not None:
            synchronized = self.ranks_in_steps is not None
            synchronized &= bool(_checks.synchronized_layers_of(self.main))
            self.ranks.take_state(state, of_last=synchronized)
            # A rank whose data has ended has not received these.
            eager = getattr(self.main, "run_eagerly", False)
            eager = eager and self.ranks_in_steps is not None
            assigned = self.models.kept_equal() if eager else self.assigned
            self.ranks.take_state(assigned, of_last=True)
        if state or self.assigned:
            self.make_equal()

    def prepare(self, data: Any, method: str) -> bool:
        """Creates the first batch's variables from its specs, before a step is traced.

        A function that creates variables is traced twice. Returns whether there are
        new ones.
        """
        is_new = self.build(data, method)
        self.build_outer()
        lacks_state = self.optimizer is not None and not self.optimizer.built
        trained = self.main.trainable_variables if lacks_state else ()
        if trained and not building.has_own_step(self.main):
            self.build_optimizer()
        return is_new

    def build(self, data: Any, method: str) -> bool:
        """Creates a step's variables, outside of the step; returns if any are new."""
        is_new = self.models.build(data, method)
        if is_new:
            with tf.init_scope():
                self.make_equal()
        return is_new
