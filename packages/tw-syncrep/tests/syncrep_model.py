"""A model of the protocol, small enough that every order of its moves can be explored.

Two replicas, of which 0 is the chief, train over one server or two. What is one atomic
op on a server is one move here. Replicas crash and start again, or never do; servers
restart, calls get lost; the calls of a session that is gone are cancelled, or go on as
orphans where TensorFlow drops the cancellation. A process that was replaced continues.
Waits time out, in vain or because nothing else moves: replicas are evicted, and take
the chief's office over. ``explore`` visits every state that can be reached and raises
``Violation``, with the moves that led to it, for one that must not be.

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
        "release",  # who begins an incarnation ends the holds that were asked for
        "withdraw",  # a save whose hold another has ended is none
        "claim",  # who restores ends the incarnation first, and none takes over
        "own office",  # who waits for rounds that it should run itself takes over too
        "step down",  # a chief that another took over from goes on as a replica
        "tell",  # the chief hears of an eviction
        "come back",  # who arrives or joins is waited for again
        "lives",  # a process whose number a later one has taken joins no more
        "take at once",  # who opens takes its number together with the office
        "draw first",  # a process has its life before, and not by, its first join
    }
)
CHIEF = 0
TIMEOUTS = frozenset({"evict", "takeover"})


class Violation(Exception):
    """A state that must not be reached."""


@dataclass(frozen=True)
class Setup:
    """What is explored.

    Kinds of faults are "crash", "gone" (a crash without a restart), "orphan", "lost
    call", "restart", "save", "twin" (a process is replaced, and continues); "evict" and
    "takeover" when nothing calls for it.
    """

    servers: int = 1  # or 2; the first has the run table
    aggregate: int = 2  # gradients that make a round; 1 is a run with one backup
    rounds: int = 2  # after which a replica makes no further step
    faults: int = 1  # at most
    kinds: frozenset[str] = frozenset({"crash", "orphan", "lost call"})
    order: tuple[str, ...] = ()  # of several faults, where only this one is explored
    rules: frozenset[str] = RULES  # those that are kept

    @property
    def is_elastic(self) -> bool:
        """Whether replicas are evicted, and take over, where nothing else moves."""
        return bool(self.kinds & {*TIMEOUTS, "gone"})


class Ticket(NamedTuple):
    """Which replica's batch a gradient is of, and for what it was computed."""

    replica: int = 0
    stamp: int = 0
    round: int = 0  # or NOTICE
    incarnation: int = 0
    session: int = 0


NOTICE = -1  # the round of a ticket that only has the chief look again
ORPHAN = -1
_LOST = ("dead", "gone", "replaced")


class Call(NamedTuple):
    """A call on the servers: how far it has come, and what it holds."""

    kind: str  # open, join, step, round, save, evict or takeover
    replica: int
    process: int  # that waits for it, or ORPHAN
    phase: str
    ticket: Ticket = Ticket()  # a step's
    life: int = 0  # an open's and a join's: its process's; 0 begins one
    number: int = 0  # an open's: its restore; a join's: the latest life, as it looked
    incarnation: int = 0  # a round's; the one that an evict and a takeover judged by
    round: int = 0  # the same
    is_evicted: bool = False  # a step's, when it announced
    is_released: bool = False  # a save's, by another
    accepted: tuple[Ticket, ...] = ()
    found: tuple[Ticket, ...] = ()  # of the accepted, on the second server
    read: tuple[tuple[Ticket, ...], ...] = ()  # what a save has read


class Process(NamedTuple):
    """What a replica's process knows."""

    replica: int
    phase: str = "out"  # dead, gone, out, joining, stepping, done or replaced
    life: int = 0
    stamp: int = 1
    is_acting: bool = False  # as the chief


class World(NamedTuple):
    """The servers, the processes, and the calls between them."""

    incarnation: int = 0  # 0: none, or variables are being restored
    drawn: int = 0  # numbers of incarnations that were given out
    round: int = 0
    chief: int = CHIEF
    lives: tuple[int, ...] = (0, 0)  # the latest of each replica
    sessions: tuple[int, ...] = (0, 0)  # the last of each replica
    counted: tuple[tuple[int, int], ...] = ((0, -1), (0, -1))  # last stamp, its round
    arrived: tuple[tuple[int, int], ...] = ((-1, 0), (-1, 0))  # round, incarnation
    evicted: tuple[int, ...] = (0, 0)  # 1 + the round that did not wait for it
    changing: int = 0  # 1 + the round that is being applied
    arrivals: tuple[Ticket, ...] = ()
    gradients: tuple[Ticket, ...] = ()  # on the second server
    tokens: tuple[int, ...] = (0, 0)
    applied: tuple[tuple[Ticket, ...], ...] = ((), ())  # to each server's variables
    restored: tuple[int, ...] = (0, 0)  # by which restore; -1: without values
    cut_off: bool = False  # a round was, while it changed variables
    taken_back: int = 0  # how often an older process took its number back
    processes: tuple[Process, ...] = ()
    calls: tuple[Call, ...] = ()
    faults: int = 0


Moves = Iterator[tuple[str, World]]


def explore(setup: Setup, *, at_most: int = 1_000_000) -> int:
    """Visits every state that can be reached, those with few moves first; counts them.

    Raises ``Violation`` with the moves that led to it.
    """
    processes = tuple(_new_process(World(processes=()), setup, n) for n in range(2))
    start = World(faults=setup.faults, processes=processes)
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    todo = deque([start])
    while todo:
        world = todo.popleft()
        try:
            moves = list(_moves(world, setup))
            if not moves and setup.is_elastic:
                moves = list(_timeouts(world, setup, TIMEOUTS))
            if not moves:
                _check_end(world, setup)
            for move, after in [*moves, *_faults(world, setup)]:
                _check_steps(world, after, move)
                if after not in came_from:
                    _check(after, move, setup)
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


def _check_steps(before: World, after: World, move: str) -> None:
    if after.applied is before.applied:
        return
    for applied in after.applied:
        batches = [(ticket.replica, ticket.stamp) for ticket in applied]
        if len(set(batches)) < len(batches):
            raise Violation(f"{move}: a batch is applied twice: {applied}")
    pairs = zip(after.applied, before.applied, strict=True)
    is_reset = "restarts" in move or "restores" in move
    if not is_reset and any(len(now) < len(was) for now, was in pairs):
        raise Violation(f"{move}: steps that the servers held are lost")


def _check(world: World, move: str, setup: Setup) -> None:
    changing = [call for call in world.calls if call.phase.startswith("apply")]
    if len(changing) > 1:
        raise Violation(f"{move}: two rounds change the variables at once")
    if changing and len(set(world.restored[: setup.servers])) > 1:
        raise Violation(f"{move}: a round changes half-restored variables")
    if world.drawn > 2 + 2 * setup.faults:
        raise Violation(f"{move}: the office changes for ever")
    if world.taken_back > 1:
        raise Violation(f"{move}: an older process has taken its number back again")


def _check_end(world: World, setup: Setup) -> None:
    """Nothing moves any more: then nobody who lives may be waiting."""
    over = ("done", "gone", "replaced")
    waiting = [n for n, p in enumerate(world.processes) if p.phase not in over]
    if waiting and (world.incarnation or world.processes[CHIEF].phase != "gone"):
        raise Violation(f"processes {waiting} wait for ever: {world}")
    for number in range(2):
        phases = {p.phase for p in world.processes if p.replica == number}
        if phases == {"replaced"}:
            raise Violation(f"nobody is left of replica {number}: {world}")
        # One that is evicted as it arrives comes back with its next step, if any.
        is_back = world.arrived[number][0] >= world.evicted[number]
        if "done" in phases and world.evicted[number] and is_back:
            raise Violation(f"{number} arrives, and is not waited for: {world}")
    if world.cut_off or world.changing or "restart" in setup.kinds:
        return
    if setup.servers == 2 and world.applied[0] != world.applied[1]:
        raise Violation(f"the servers differ: {world.applied}")
    most = world.round * setup.aggregate
    least = world.round if setup.is_elastic else most
    if not least <= len(world.applied[0]) <= most:
        raise Violation(f"{world.round} rounds have applied {world.applied[0]}")
    if setup.kinds == {"takeover"} and setup.aggregate == 2:
        # Who took over has wasted no batch but one each time.
        made = world.processes[world.chief].stamp - 1
        count = sum(ticket.replica == world.chief for ticket in world.applied[0])
        if made - count > world.drawn - 1:
            raise Violation(f"{made} batches were made, {count} count: {world}")


# What may happen.


def _moves(world: World, setup: Setup) -> Moves:
    for place in range(len(world.processes)):
        yield from _process_moves(world, setup, place)
    for call in world.calls:
        whose = f"{call.kind} of {call.process}"
        if call.process == ORPHAN:
            whose = f"orphaned {call.kind} of {call.replica}"
        for move, after in _MOVERS[call.kind](world, setup, call):
            yield f"{whose}: {move}", after


def _process_moves(world: World, setup: Setup, place: int) -> Moves:
    process = world.processes[place]
    if process.phase == "dead":
        started = _new_process(world, setup, process.replica)
        yield f"{place} starts", _with_process(world, place, started)
    elif process.phase == "out":
        yield from _ask_for_number(world, setup, place)
        for kind in _ways_in(world, setup, process):
            after = _with_process(world, place, process._replace(phase="joining"))
            if kind == "open":
                after = _release_holds(after, setup)
            call = Call(kind, process.replica, place, "begin", life=process.life)
            yield f"{place} calls {kind}", _add(after, call)
    elif process.phase in ("joining", "stepping"):
        kinds = {call.kind for call in _own_calls(world, place)}
        if not kinds & {"open", "join", "step"}:
            # It neither returns nor waits: the watchdog has its session replaced.
            renewed = _with_process(world, place, process._replace(phase="out"))
            for move, after in _drop(renewed, setup, _own_calls(world, place)):
                yield f"the watchdog of {place} renews its session{move}", after


def _ask_for_number(world: World, setup: Setup, place: int) -> Moves:
    """A process of two asks before it begins a session; it may also not know whom."""
    process = world.processes[place]
    replica, life = process.replica, process.life
    if not life or not _has_twins(world, replica):
        return
    if life > world.lives[replica]:
        taken = world._replace(lives=_put(world.lives, replica, life))
        yield f"{place} takes its number", taken
    elif life < world.lives[replica] and "lives" in setup.rules:
        replaced = process._replace(phase="replaced")
        yield f"{place} finds itself replaced", _with_process(world, place, replaced)


def _new_process(world: World, setup: Setup, replica: int) -> Process:
    """Starts a process; the lives and stamps of a replica's grow with time."""
    before = [p for p in world.processes if p.replica == replica]
    life = 1 + max((p.life for p in before), default=0)
    stamp = 1 + max((p.stamp + 2 * setup.rounds for p in before), default=0)
    return Process(replica, stamp=stamp, life=life * ("draw first" in setup.rules))


def _ways_in(world: World, setup: Setup, process: Process) -> list[str]:
    """Lists the calls with which a new session may begin."""
    is_chief = process.replica == CHIEF
    if not world.incarnation or -1 in world.restored:
        return ["open"] * is_chief
    if world.chief == process.replica:
        return ["open" if is_chief or process.is_acting else "join"]
    if process.is_acting and "step down" not in setup.rules:
        return ["open"]
    acting = [p for p in world.processes if p.replica == world.chief]
    # Who was heard from lately may be lost all the same.
    is_lost = all(p.phase in _LOST for p in acting)
    return ["join"] + ["open"] * (is_chief and is_lost)


def _timeouts(world: World, setup: Setup, kinds: frozenset[str]) -> Moves:
    """Has the watchdogs of those who wait do something about it."""
    position = (world.round, world.incarnation)
    waits = [c for c in world.calls if c.phase == "wait" and c.process != ORPHAN]
    for call in waits if world.incarnation else ():
        place, number, other = call.process, call.replica, 1 - call.replica
        if call.ticket[2:4] != position:
            continue
        judged = Call("evict", number, place, "begin", round=world.round)
        judged = judged._replace(incarnation=world.incarnation)
        own = _own_calls(world, place)
        begun = {c.kind for c in own if c.kind != "round" or not _is_older(world, c)}
        is_missing = world.arrived[other] != position and not world.evicted[other]
        if "evict" in kinds - begun and is_missing:
            yield f"{place} misses {other} in round {world.round}", _add(world, judged)
        may = world.chief == other or "own office" in setup.rules
        if "takeover" in kinds - begun and "round" not in begun and may:
            after = _release_holds(world, setup)
            take_over = judged._replace(kind="takeover")
            yield f"{place} misses the chief", _add(after, take_over)


def _faults(world: World, setup: Setup) -> Moves:
    if not world.faults:
        return
    kinds = setup.kinds
    if setup.order:
        kinds &= {setup.order[-world.faults]}
    hurt = world._replace(faults=world.faults - 1)
    for place, process in enumerate(world.processes):
        if process.phase in _LOST:
            continue
        for kind, phase in (("crash", "dead"), ("gone", "gone")):
            lost = _with_process(hurt, place, process._replace(phase=phase))
            if kind in kinds:
                for move, after in _drop(lost, setup, _own_calls(world, place)):
                    yield f"{place} is {phase}{move}", after
        if "twin" in kinds and process.phase == "stepping":
            twin = _new_process(world, setup, process.replica)
            after = hurt._replace(processes=(*world.processes, twin))
            yield f"{len(world.processes)} replaces {place}, which lives", after
    for call in world.calls:
        if call.process == ORPHAN:
            continue
        if "lost call" in kinds and call.kind == "step":
            yield f"the step of {call.process} is lost", _end(hurt, call)
        if "lost call" in kinds and call.kind == "takeover":
            unheard = _go_on(hurt, call, call._replace(process=ORPHAN))
            yield f"the reply to the takeover of {call.process} is lost", unheard
        if "save" in kinds and call.kind == "round":
            save = Call("save", call.replica, call.process, "begin")
            yield f"{call.process} saves", _add(hurt, save)
    for server in range(setup.servers) if "restart" in kinds else ():
        yield f"server {server} restarts", _restart(hurt, server)
    for move, after in _timeouts(hurt, setup, kinds & TIMEOUTS):
        yield f"{move}, too early", after


def _drop(world: World, setup: Setup, calls: list[Call]) -> Moves:
    """Ends the calls of a session that is gone, or leaves some of them to go on."""
    if not calls:
        yield "", world
        return
    call, *others = calls
    for move, after in _drop(world, setup, others):
        yield move, _end(after, call)
        if "orphan" in setup.kinds:
            orphan = _go_on(after, call, call._replace(process=ORPHAN))
            yield f"{move}; its {call.kind} goes on", orphan


def _restart(world: World, server: int) -> World:
    """A server forgets all, and every call fails."""
    alive = tuple(
        process if process.phase in _LOST else process._replace(phase="out")
        for process in world.processes
    )
    world = world._replace(
        calls=(),
        processes=alive,
        applied=_put(world.applied, server, ()),
        restored=_put(world.restored, server, -1),
    )
    if server == 1:
        return world._replace(gradients=())
    kept = ("drawn", "gradients", "applied", "restored", "processes", "faults")
    return World(**{field: getattr(world, field) for field in kept})


# The calls. Each yields the next move of a call, where it has one.


def _open(world: World, setup: Setup, call: Call) -> Moves:
    if call.phase == "restore":
        for server in range(setup.servers):
            if world.restored[server] != call.number:
                restored = _put(world.restored, server, call.number)
                applied = _put(world.applied, server, ())
                after = world._replace(restored=restored, applied=applied)
                yield f"restores server {server}", after
        if set(world.restored[: setup.servers]) != {call.number}:
            return
    if not _is_free(world, setup):
        return
    needs_values = -1 in world.restored or (world.drawn and not world.incarnation)
    if call.phase == "begin" and not _is_own(world, setup, call):
        yield "is refused", _fail(world, call, "replaced")
    elif call.phase == "begin" and needs_values:
        after = world
        if "claim" in setup.rules:
            after = world._replace(incarnation=0, chief=call.replica)
        number = max(world.restored) + 1
        restoring = call._replace(phase="restore", number=number)
        yield "begins to restore", _go_on(after, call, restoring)
    else:
        after = _begin(world, setup, call.replica)
        if "take at once" in setup.rules:
            life = call.life or world.lives[call.replica] + 1
            after = after._replace(lives=_put(after.lives, call.replica, life))
        if "keep" not in setup.rules:
            after = after._replace(applied=((), ()))
        joining = Call("join", *call[1:3], "begin", life=call.life)
        joining = joining._replace(incarnation=after.drawn)
        after = _go_on(after, call, joining)
        if not _has_twins(world, call.replica):  # Nobody comes in between.
            after = _finish_join(after, setup, joining)
        yield "begins an incarnation", after


def _begin(world: World, setup: Setup, chief: int) -> World:
    """Begins an incarnation, under the baton."""
    drawn = world.drawn + 1
    after = world._replace(incarnation=drawn, drawn=drawn, chief=chief)
    if world.changing and "finish" in setup.rules:
        after = after._replace(round=world.changing, cut_off=True)
    return _wake_all(after._replace(changing=0))


def _take_over(world: World, setup: Setup, call: Call) -> Moves:
    if not _is_free(world, setup):
        return
    if (world.round, world.incarnation) != (call.round, call.incarnation):
        yield "comes too late", _end(world, call)
        return
    after = _end(_begin(world, setup, call.replica), call)
    if world.chief != call.replica:
        evicted = _put(world.evicted, world.chief, world.round + 1)
        after = after._replace(evicted=evicted)
    if call.process != ORPHAN:
        after = _start_rounds(after, call.replica, call.process, after.incarnation)
    yield "begins an incarnation", after


def _start_rounds(world: World, number: int, place: int, incarnation: int) -> World:
    acting = world.processes[place]._replace(is_acting=True)
    rounds = Call("round", number, place, "begin", incarnation=incarnation)
    return _add(_with_process(world, place, acting), rounds)


def _evict(world: World, setup: Setup, call: Call) -> Moves:
    position, other = (call.round, call.incarnation), 1 - call.replica
    if call.phase == "tell":
        notice = Ticket(call.replica, 0, NOTICE, world.incarnation)
        told = (notice,) if "tell" in setup.rules else ()
        after = world._replace(arrivals=(*world.arrivals, *told))
        yield "tells the chief", _end(after, call)
    elif _is_free(world, setup):
        is_same = (world.round, world.incarnation) == position
        if is_same and world.arrived[other] != position:
            after = world._replace(evicted=_put(world.evicted, other, call.round + 1))
            yield f"marks {other}", _go_on(after, call, call._replace(phase="tell"))
        else:
            yield "comes too late", _end(world, call)


def _join(world: World, setup: Setup, call: Call) -> Moves:
    if call.phase == "begin" and not _is_own(world, setup, call):
        yield "is refused", _fail(world, call, "replaced")
    elif call.phase == "begin" and _has_twins(world, call.replica):
        looked = call._replace(phase="join", number=world.lives[call.replica])
        yield "looks", _go_on(world, call, looked)
    else:
        yield "joins", _finish_join(world, setup, call)


def _finish_join(world: World, setup: Setup, call: Call) -> World:
    replica, place = call.replica, call.process
    number, latest = world.sessions[replica] + 1, world.lives[replica]
    life = call.life or latest + 1
    is_later = life > (call.number if call.phase == "join" else latest)
    after = world._replace(
        sessions=_put(world.sessions, replica, number),
        lives=_put(world.lives, replica, life if is_later else latest),
        taken_back=world.taken_back + (life < latest),
    )
    if "come back" in setup.rules:
        after = after._replace(evicted=_put(world.evicted, replica, 0))
    after = _end(after, call)
    if place == ORPHAN:
        return after
    joined = world.processes[place]._replace(life=life, is_acting=False)
    after = _with_process(after, place, joined)
    if call.incarnation:
        after = _start_rounds(after, replica, place, call.incarnation)
    return _start_step(after, setup, place, number)


def _is_own(world: World, setup: Setup, call: Call) -> bool:
    """Returns whether no later process has taken the number of a call's."""
    is_latest = not call.life or call.life >= world.lives[call.replica]
    return is_latest or "lives" not in setup.rules


def _start_step(world: World, setup: Setup, place: int, session: int) -> World:
    """Has a process go on where the run stands, unless it has done its part."""
    process = world.processes[place]._replace(phase="stepping")
    if world.round >= setup.rounds:
        return _with_process(world, place, process._replace(phase="done"))
    position = (world.round, world.incarnation)
    ticket = Ticket(process.replica, process.stamp, *position, session)
    phase = "push" if setup.servers == 2 else "announce"
    call = Call("step", process.replica, place, phase, ticket)
    return _add(_with_process(world, place, process), call)


def _step(world: World, setup: Setup, call: Call) -> Moves:
    number, ticket = call.replica, call.ticket
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
            phase = "note" if setup.is_elastic else "look"
            is_evicted = bool(world.evicted[number])
            announced = call._replace(phase=phase, is_evicted=is_evicted)
            yield "arrives", _go_on(after, call, announced)
    elif call.phase == "note":
        after = world._replace(arrived=_put(world.arrived, number, ticket[2:4]))
        is_back = call.is_evicted and world.sessions[number] == ticket.session
        if is_back and "come back" in setup.rules:
            after = after._replace(evicted=_put(world.evicted, number, 0))
        looking = call._replace(phase="look", is_evicted=False)
        yield "notes it", _go_on(after, call, looking)
    else:
        yield from _wait(world, setup, call)


def _wait(world: World, setup: Setup, call: Call) -> Moves:
    number = call.replica
    is_fenced = world.sessions[number] != call.ticket.session
    is_fenced = is_fenced and "fence waits" in setup.rules
    is_over = (world.round, world.incarnation) != call.ticket[2:4]
    # Of two who wait under one number, a watchdog wakes whose token the other took.
    is_woken = (is_fenced or is_over) and _has_twins(world, number)
    after = world
    if call.phase == "wait":
        after = world._replace(tokens=_put(world.tokens, number, 0))
        if not world.tokens[number] and not is_woken:
            return
    if is_fenced:
        yield "is fenced", _fail(world if "put back" in setup.rules else after, call)
    elif is_over:
        yield "returns", _return(after, setup, call)
    else:
        yield "waits", _go_on(after, call, call._replace(phase="wait"))


def _return(world: World, setup: Setup, call: Call) -> World:
    world = _end(world, call)
    if call.process == ORPHAN:
        return world
    process = world.processes[call.process]
    process = process._replace(stamp=process.stamp + 1)
    world = _with_process(world, call.process, process)
    return _start_step(world, setup, call.process, call.ticket.session)


def _round(world: World, setup: Setup, call: Call) -> Moves:
    is_older = _is_older(world, call)
    if call.phase == "begin":
        begun = call._replace(phase="collect", round=world.round)
        if "bound rounds" not in setup.rules:
            begun = begun._replace(incarnation=world.incarnation)
        elif is_older:
            yield "is fenced", _supersede(world, setup, call)
            return
        yield "begins", _go_on(world, call, begun)
    elif call.phase == "collect" and world.arrivals:
        ticket, *rest = world.arrivals
        after = world._replace(arrivals=tuple(rest))
        if ticket.incarnation > call.incarnation and "fence rounds" in setup.rules:
            if "put back" in setup.rules:
                after = world._replace(arrivals=(*rest, ticket))
            yield "is fenced", _supersede(after, setup, call)
        else:
            decided = _decide(world, setup, call, ticket)
            yield "takes a ticket", _go_on(after, call, decided)
    elif call.phase == "lock" and _is_free(world, setup):
        if is_older and "baton" in setup.rules:
            yield "is fenced", _supersede(world, setup, call)
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
        if call.process != ORPHAN:
            next_round = Call(*call[:3], "begin", incarnation=call.incarnation)
            after = _add(after, next_round)
        yield "ends", after


def _decide(world: World, setup: Setup, call: Call, ticket: Ticket) -> Call:
    """Accepts a ticket or drops it."""
    is_current = (ticket.round, ticket.incarnation) == (call.round, call.incarnation)
    has_slot = all(other.replica != ticket.replica for other in call.accepted)
    is_new = ticket.stamp > world.counted[ticket.replica][0]
    accepted = call.accepted
    if is_current and has_slot and (is_new or "stamps" not in setup.rules):
        accepted = tuple(sorted((*accepted, ticket)))
    brought = {ticket.replica for ticket in accepted}
    possible = sum(n in brought or not world.evicted[n] for n in range(2))
    enough = min(max(possible, 1), setup.aggregate)
    phase = "lock" if len(accepted) >= enough else "collect"
    return call._replace(phase=phase, accepted=accepted)


def _supersede(world: World, setup: Setup, call: Call) -> World:
    """Ends a round of an older incarnation."""
    if world.chief == call.replica or "step down" not in setup.rules:
        return _fail(world, call)
    return _end(world, call)  # Its process goes on as a replica.


def _save(world: World, setup: Setup, call: Call) -> Moves:
    if call.phase == "begin":
        if "hold" not in setup.rules or call.is_released or _is_free(world, setup):
            yield "holds", _go_on(world, call, call._replace(phase="read"))
    elif call.process == ORPHAN:
        return  # Nobody reads, and nobody ends the hold.
    elif len(call.read) < setup.servers:
        read = (*call.read, world.applied[len(call.read)])
        yield "reads", _go_on(world, call, call._replace(read=read))
    elif len(set(call.read)) == 1:
        yield "ends", _end(world, call)
    elif call.is_released and "withdraw" in setup.rules:
        yield "withdraws what it has saved", _end(world, call)
    else:
        raise Violation(f"a checkpoint is torn: {call.read}")


_MOVERS = {
    "open": _open,
    "join": _join,
    "step": _step,
    "round": _round,
    "save": _save,
    "evict": _evict,
    "takeover": _take_over,
}


# Small changes.

_CHANGING = ("gather", "apply 0", "apply 1", "end")


def _is_free(world: World, setup: Setup) -> bool:
    """Returns whether nobody holds the baton."""
    for call in world.calls:
        if call.phase in _CHANGING and "baton" in setup.rules:
            return False
        if call.phase == "read" and not call.is_released and "hold" in setup.rules:
            return False
    return True


def _is_older(world: World, call: Call) -> bool:
    """Returns whether a call is for another incarnation than the present one."""
    return call.incarnation != world.incarnation


def _release_holds(world: World, setup: Setup) -> World:
    """Ends the holds that have been asked for."""
    for call in world.calls if "release" in setup.rules else ():
        if call.kind == "save" and call.process == ORPHAN:
            world = _end(world, call)
        elif call.kind == "save":
            world = _go_on(world, call, call._replace(is_released=True))
    return world


def _has_twins(world: World, number: int) -> bool:
    """Returns whether several processes run under a number, and may meet."""
    return sum(process.replica == number for process in world.processes) > 1


def _own_calls(world: World, place: int) -> list[Call]:
    """Lists the calls that a process waits for."""
    return [call for call in world.calls if call.process == place]


def _fail(world: World, call: Call, phase: str = "out") -> World:
    """Ends a call with an error; whoever waits for it has its session replaced."""
    world = _end(world, call)
    if call.process == ORPHAN:
        return world
    for own in _own_calls(world, call.process):
        world = _end(world, own)
    process = world.processes[call.process]._replace(phase=phase)
    return _with_process(world, call.process, process)


def _wake_all(world: World) -> World:
    return world._replace(tokens=(1, 1))  # two tokens say no more than one


def _put(values: tuple[T, ...], place: int, value: T) -> tuple[T, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _with_process(world: World, place: int, process: Process) -> World:
    return world._replace(processes=_put(world.processes, place, process))


def _add(world: World, call: Call) -> World:
    return world._replace(calls=tuple(sorted((*world.calls, call))))


def _end(world: World, call: Call) -> World:
    return _go_on(world, call)


def _go_on(world: World, call: Call, *changed: Call) -> World:
    calls = [*world.calls, *changed]
    calls.remove(call)
    return world._replace(calls=tuple(sorted(calls)))
