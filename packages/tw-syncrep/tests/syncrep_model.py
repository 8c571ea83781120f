"""A model of the protocol, small enough that every order of its moves can be explored.

Two replicas, of which 0 is the chief, train over one server or two. What is one atomic
op on a server is one move here. Replicas crash and start again, servers restart, calls
get lost; the calls of a session that is gone are cancelled, or go on as orphans where
TensorFlow drops the cancellation. ``explore`` visits every state that can be reached
and raises ``Violation``, with the moves that led to it, for one that must not be.

Every rule in ``RULES`` can be left out by its name: the fault that it prevents must
then be found. docs/design/syncrep.md says how the rules are kept on real servers.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

T = TypeVar("T")

RULES = frozenset(
    {
        "fence rounds",  # a round that takes what is for a later incarnation fails
        "fence waits",  # a wait that finds another session of its replica fails
        "put back",  # what a fenced call took returns to its queue
        "bound rounds",  # a round's incarnation is its session's, not the table's
        "stamps",  # a batch keeps its stamp in the next session, and counts once
        "baton",  # no incarnation begins while a round changes variables
        "finish",  # a round that was cut off while it changed them counts as over
        "keep",  # who opens a run that the servers still hold initializes nothing
        "hold",  # no round changes variables during a save
    }
)
CHIEF = 0


class Violation(Exception):
    """A state that must not be reached."""


@dataclass(frozen=True)
class Setup:
    """What is explored.

    Attributes:
      servers: 1 or 2; the first has the run table.
      aggregate: gradients that make a round; 1 is a run with one backup.
      rounds: after which a replica makes no further step.
      faults: how many of them there may be.
      kinds: which: "crash", "orphan", "lost call", "restart", "save".
      rules: of ``RULES``, those that are kept.
    """

    servers: int = 1
    aggregate: int = 2
    rounds: int = 2
    faults: int = 1
    kinds: frozenset[str] = frozenset({"crash", "orphan", "lost call"})
    rules: frozenset[str] = RULES


class Ticket(NamedTuple):
    """Which replica's batch a gradient is of, and for what it was computed."""

    replica: int
    stamp: int
    round: int
    incarnation: int
    session: int


class Call(NamedTuple):
    """A call on the servers: how far it has come, and what it holds."""

    kind: str  # open, join, step, round or save
    replica: int
    session: int  # of the process that waits for it
    phase: str
    ticket: Ticket | None = None  # a step's
    number: int = 0  # a step's: its session in the run table
    incarnation: int = 0  # a round's and an open's
    round: int = 0
    accepted: tuple[Ticket, ...] = ()
    found: tuple[Ticket, ...] = ()  # of the accepted, on the second server
    read: tuple[tuple[Ticket, ...], ...] = ()  # what a save has read


class Replica(NamedTuple):
    """What a replica's process knows."""

    phase: str = "out"  # dead, out, joining, stepping or done
    session: int = 0
    number: int = 0
    stamp: int = 1


class World(NamedTuple):
    """The servers, the replicas, and the calls between them."""

    incarnation: int = 0
    drawn: int = 0  # numbers of incarnations that were given out
    round: int = 0
    numbers: tuple[int, ...] = (0, 0)  # of each replica's session
    counted: tuple[tuple[int, int], ...] = ((0, -1), (0, -1))  # last stamp, its round
    changing: int = 0  # 1 + the round that is being applied
    arrivals: tuple[Ticket, ...] = ()
    gradients: tuple[Ticket, ...] = ()  # on the second server
    tokens: tuple[int, ...] = (0, 0)
    applied: tuple[tuple[Ticket, ...], ...] = ((), ())  # to each server's variables
    cut_off: bool = False  # a round was, while it changed variables
    replicas: tuple[Replica, ...] = (Replica(), Replica())
    calls: frozenset[Call] = frozenset()
    faults: int = 0


Moves = Iterator[tuple[str, World]]


def explore(setup: Setup, *, at_most: int = 1_000_000) -> int:
    """Visits every state that can be reached, those with few moves first.

    Returns:
      How many there are.

    Raises:
      Violation: with the moves that led to it.
      RuntimeError: more states than ``at_most``.
    """
    start = World(faults=setup.faults)
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        world = todo.popleft()
        try:
            moves = list(_moves(world, setup))
            if not moves:
                _check_end(world, setup)
            for move, after in [*moves, *_faults(world, setup)]:
                _check(world, after, move)
                if after not in came_from:
                    came_from[after] = (world, move)
                    todo.append(after)
        except Violation as violation:
            raise Violation(f"{_story(world, came_from)}\n{violation}") from None
        if len(came_from) > at_most:
            raise RuntimeError(f"explore: more than {at_most} states in {setup}.")
    return len(came_from)


def _story(world: World, came_from: dict[World, tuple[World, str] | None]) -> str:
    moves: list[str] = []
    while (step := came_from[world]) is not None:
        world, move = step
        moves.append(move)
    return "\n".join(reversed(moves))


# What must hold.


def _check(before: World, after: World, move: str) -> None:
    for applied in after.applied:
        batches = [(ticket.replica, ticket.stamp) for ticket in applied]
        if len(set(batches)) < len(batches):
            raise Violation(f"{move}: a batch is applied twice: {applied}")
    if sum(call.phase.startswith("apply") for call in after.calls) > 1:
        raise Violation(f"{move}: two rounds change the variables at once")
    pairs = zip(after.applied, before.applied, strict=True)
    if "restarts" not in move and any(len(now) < len(was) for now, was in pairs):
        raise Violation(f"{move}: steps that the servers held are lost")


def _check_end(world: World, setup: Setup) -> None:
    """Nothing moves any more: then nobody who lives may be waiting."""
    waiting = [n for n, replica in enumerate(world.replicas) if replica.phase != "done"]
    if waiting:
        raise Violation(f"replicas {waiting} wait for ever: {world}")
    if world.cut_off or "restart" in setup.kinds:
        return
    if setup.servers == 2 and world.applied[0] != world.applied[1]:
        raise Violation(f"the servers differ: {world.applied}")
    if len(world.applied[0]) != world.round * setup.aggregate:
        raise Violation(f"{world.round} rounds have applied {world.applied[0]}")


# What may happen.


def _moves(world: World, setup: Setup) -> Moves:
    for number in range(2):
        yield from _replica_moves(world, setup, number)
    movers = {"open": _open, "join": _join, "step": _step, "round": _round}
    for call in world.calls:
        mover = movers.get(call.kind, _save)
        orphan = "" if _is_heard(world, call) else "orphaned "
        for move, after in mover(world, setup, call):
            yield f"{orphan}{call.kind} of {call.replica}: {move}", after


def _replica_moves(world: World, setup: Setup, number: int) -> Moves:
    replica = world.replicas[number]
    if replica.phase == "dead":
        started = _renewed(replica)._replace(stamp=replica.stamp + 1)
        yield f"{number} starts", _with_replica(world, number, started)
    elif replica.phase == "out":
        kind = "open" if number == CHIEF else "join"
        if kind == "open" or world.incarnation:
            joining = replica._replace(phase="joining")
            call = Call(kind, number, replica.session, "begin")
            after = _with_replica(world, number, joining)
            yield f"{number} calls {kind}", _add(after, call)
    elif replica.phase != "done":
        kinds = {call.kind for call in _own_calls(world, number)}
        if not kinds & {"open", "join", "step"}:
            # It neither returns nor waits: the watchdog has its session replaced.
            renewed = _with_replica(world, number, _renewed(replica))
            for move, after in _drop(renewed, setup, _own_calls(world, number)):
                yield f"the watchdog of {number} renews its session{move}", after


def _faults(world: World, setup: Setup) -> Moves:
    if not world.faults:
        return
    hurt = world._replace(faults=world.faults - 1)
    for number, replica in enumerate(world.replicas):
        if "crash" in setup.kinds and replica.phase != "dead":
            dead = _with_replica(hurt, number, replica._replace(phase="dead"))
            for move, after in _drop(dead, setup, _own_calls(world, number)):
                yield f"{number} crashes{move}", after
    for call in world.calls if "lost call" in setup.kinds else ():
        if call.kind == "step" and _is_heard(world, call):
            yield f"the step of {call.replica} is lost", _end(hurt, call)
    for server in range(setup.servers) if "restart" in setup.kinds else ():
        yield f"server {server} restarts", _restart(hurt, server)
    if "save" in setup.kinds and "round" in {call.kind for call in world.calls}:
        session = world.replicas[CHIEF].session
        yield "the chief saves", _add(hurt, Call("save", CHIEF, session, "begin"))


def _drop(world: World, setup: Setup, calls: list[Call]) -> Moves:
    """Ends the calls of a session that is gone, or leaves some of them to go on."""
    if not calls:
        yield "", world
        return
    call, *others = calls
    for move, after in _drop(world, setup, others):
        yield move, _end(after, call)
        if "orphan" in setup.kinds:
            yield f"{move}; its {call.kind} goes on", after


def _restart(world: World, server: int) -> World:
    """A server forgets all: every call fails, and the chief restores a checkpoint."""
    alive = tuple(
        replica if replica.phase == "dead" else _renewed(replica)
        for replica in world.replicas
    )
    world = world._replace(calls=frozenset(), applied=((), ()), replicas=alive)
    if server == 1:
        return world._replace(gradients=())
    fresh = World(drawn=world.drawn, replicas=alive, faults=world.faults)
    return fresh._replace(gradients=world.gradients)


# The calls. Each yields the next move of a call, where it has one.


def _open(world: World, setup: Setup, call: Call) -> Moves:
    if not _is_free(world, setup):
        return
    number, drawn = world.numbers[CHIEF] + 1, world.drawn + 1
    after = world._replace(
        incarnation=drawn, drawn=drawn, numbers=_put(world.numbers, CHIEF, number)
    )
    if "keep" not in setup.rules:
        after = after._replace(applied=((), ()))
    if world.changing and "finish" in setup.rules:
        after = after._replace(round=world.changing, cut_off=True)
    after = _end(_wake_all(after._replace(changing=0)), call)
    if _is_heard(after, call):
        rounds = Call("round", CHIEF, call.session, "begin", incarnation=drawn)
        after = _start_step(_add(after, rounds), setup, CHIEF, number)
    yield "begins an incarnation", after


def _join(world: World, setup: Setup, call: Call) -> Moves:
    number = world.numbers[call.replica] + 1
    after = world._replace(numbers=_put(world.numbers, call.replica, number))
    after = _end(after, call)
    if _is_heard(after, call):
        after = _start_step(after, setup, call.replica, number)
    yield "joins", after


def _start_step(world: World, setup: Setup, number: int, session: int) -> World:
    """Has a replica go on where the run stands, unless it has done its part."""
    replica = world.replicas[number]._replace(number=session, phase="stepping")
    if world.round >= setup.rounds:
        return _with_replica(world, number, replica._replace(phase="done"))
    ticket = Ticket(number, replica.stamp, world.round, world.incarnation, session)
    phase = "push" if setup.servers == 2 else "announce"
    call = Call("step", number, replica.session, phase, ticket, number=session)
    return _add(_with_replica(world, number, replica), call)


def _step(world: World, setup: Setup, call: Call) -> Moves:
    number, ticket = call.replica, call.ticket
    assert ticket is not None
    if call.phase == "push":
        after = world._replace(gradients=(*world.gradients, ticket))
        yield "pushes", _go_on(after, call, call._replace(phase="announce"))
    elif call.phase == "announce":
        stamp, in_round = world.counted[number]
        is_counted = "stamps" in setup.rules and ticket.stamp <= stamp
        after = world
        if not is_counted:
            after = world._replace(arrivals=(*world.arrivals, ticket))
        if is_counted and in_round != ticket.round:
            yield "has been counted", _return(world, setup, call)
        else:
            yield "arrives", _go_on(after, call, call._replace(phase="look"))
    elif call.phase == "look" or world.tokens[number]:
        after = world
        if call.phase == "wait":
            after = world._replace(tokens=_put(world.tokens, number, 0))
        if world.numbers[number] != call.number and "fence waits" in setup.rules:
            after = world if "put back" in setup.rules else after
            yield "is fenced", _fail(after, setup, call)
        elif (world.round, world.incarnation) != (ticket.round, ticket.incarnation):
            yield "returns", _return(after, setup, call)
        else:
            yield "waits", _go_on(after, call, call._replace(phase="wait"))


def _return(world: World, setup: Setup, call: Call) -> World:
    world = _end(world, call)
    if not _is_heard(world, call):
        return world
    replica = world.replicas[call.replica]
    world = _with_replica(
        world, call.replica, replica._replace(stamp=replica.stamp + 1)
    )
    return _start_step(world, setup, call.replica, replica.number)


def _round(world: World, setup: Setup, call: Call) -> Moves:
    is_older = world.incarnation != call.incarnation
    if call.phase == "begin":
        begun = call._replace(phase="collect", round=world.round)
        if "bound rounds" not in setup.rules:
            yield (
                "begins",
                _go_on(world, call, begun._replace(incarnation=world.incarnation)),
            )
        elif is_older:
            yield "is fenced", _fail(world, setup, call)
        else:
            yield "begins", _go_on(world, call, begun)
    elif call.phase == "collect" and world.arrivals:
        ticket, *rest = world.arrivals
        after = world._replace(arrivals=tuple(rest))
        if ticket.incarnation > call.incarnation and "fence rounds" in setup.rules:
            if "put back" in setup.rules:
                after = world._replace(arrivals=(*rest, ticket))
            yield "is fenced", _fail(after, setup, call)
        else:
            decided = _decide(world, setup, call, ticket)
            yield "takes a ticket", _go_on(after, call, decided)
    elif call.phase == "lock" and _is_free(world, setup):
        if is_older and "baton" in setup.rules:
            yield "is fenced", _fail(world, setup, call)
            return
        counted = world.counted
        for ticket in call.accepted:
            counted = _put(counted, ticket.replica, (ticket.stamp, call.round))
        after = world._replace(changing=call.round + 1, counted=counted)
        phase = "gather" if setup.servers == 2 else "apply 0"
        yield "takes the baton", _go_on(after, call, call._replace(phase=phase))
    elif call.phase == "gather" and world.gradients:
        ticket, *rest = world.gradients
        after = world._replace(gradients=tuple(rest))
        found = call.found + (ticket,) * (ticket in call.accepted)
        gathered = call._replace(found=found)
        if len(found) == len(call.accepted):
            gathered = call._replace(phase="apply 0", found=())
        yield "takes a gradient", _go_on(after, call, gathered)
    elif call.phase.startswith("apply"):
        server = int(call.phase[-1])
        applied = tuple(sorted((*world.applied[server], *call.accepted)))
        after = world._replace(applied=_put(world.applied, server, applied))
        phase = "end" if server == setup.servers - 1 else "apply 1"
        yield call.phase, _go_on(after, call, call._replace(phase=phase))
    elif call.phase == "end":
        after = world._replace(round=call.round + 1, changing=0)
        after = _end(_wake_all(after), call)
        if _is_heard(after, call):
            next_round = Call(*call[:3], "begin", incarnation=call.incarnation)
            after = _add(after, next_round)
        yield "ends", after


def _decide(world: World, setup: Setup, call: Call, ticket: Ticket) -> Call:
    """Accepts a ticket or drops it."""
    is_current = (ticket.round, ticket.incarnation) == (call.round, call.incarnation)
    has_slot = all(other.replica != ticket.replica for other in call.accepted)
    is_new = ticket.stamp > world.counted[ticket.replica][0]
    if not (is_current and has_slot and (is_new or "stamps" not in setup.rules)):
        return call
    accepted = tuple(sorted((*call.accepted, ticket)))
    if len(accepted) < setup.aggregate:
        return call._replace(accepted=accepted)
    return call._replace(phase="lock", accepted=accepted)


def _save(world: World, setup: Setup, call: Call) -> Moves:
    if call.phase == "begin":
        if "hold" not in setup.rules or _is_free(world, setup):
            yield "holds", _go_on(world, call, call._replace(phase="read"))
    elif len(call.read) < setup.servers:
        read = (*call.read, world.applied[len(call.read)])
        yield "reads", _go_on(world, call, call._replace(read=read))
    elif len(set(call.read)) > 1:
        raise Violation(f"a checkpoint is torn: {call.read}")
    else:
        yield "ends", _end(world, call)


# Small changes.


def _is_free(world: World, setup: Setup) -> bool:
    """Returns whether nobody holds the baton."""
    holding = {"baton": ("gather", "apply 0", "apply 1", "end"), "hold": ("read",)}
    held = [phase for rule in setup.rules for phase in holding.get(rule, ())]
    return not any(call.phase in held for call in world.calls)


def _is_heard(world: World, call: Call) -> bool:
    replica = world.replicas[call.replica]
    return replica.session == call.session and replica.phase != "dead"


def _own_calls(world: World, number: int) -> list[Call]:
    """Lists the calls that a replica's process waits for."""
    return [c for c in world.calls if c.replica == number and _is_heard(world, c)]


def _fail(world: World, setup: Setup, call: Call) -> World:
    """Ends a call with an error; whoever waits for it has its session replaced."""
    world = _end(world, call)
    if not _is_heard(world, call):
        return world
    for own in _own_calls(world, call.replica):
        world = _end(world, own)
    replica = _renewed(world.replicas[call.replica])
    return _with_replica(world, call.replica, replica)


def _renewed(replica: Replica) -> Replica:
    return replica._replace(phase="out", session=replica.session + 1)


def _wake_all(world: World) -> World:
    return world._replace(tokens=(1, 1))  # two tokens say no more than one


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _with_replica(world: World, number: int, replica: Replica) -> World:
    return world._replace(replicas=_put(world.replicas, number, replica))


def _add(world: World, call: Call) -> World:
    return world._replace(calls=world.calls | {call})


def _end(world: World, call: Call) -> World:
    return world._replace(calls=world.calls - {call})


def _go_on(world: World, call: Call, changed: Call) -> World:
    return _add(_end(world, call), changed)
