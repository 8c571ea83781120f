"""A run: node 0 makes the decisions, and the other machines carry them out."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from tw_launch._launcher.link import Link, Lost
from tw_launch._launcher.machine import Machine
from tw_launch._launcher.meeting import (
    CANNOT_START,
    Arrived,
    Heard,
    Inbox,
    Node,
    after_signal,
    find_sender,
    next_event,
    tell,
)
from tw_launch._launcher.messages import (
    SIGNALS,
    Ended,
    Idle,
    Over,
    Restart,
    Signalled,
    Start,
    Stop,
)
from tw_launch._launcher.output import announce
from tw_launch._launcher.plan import lay_out
from tw_launch._launcher.rules import (
    Action,
    Rules,
    Standing,
    Verdict,
    judge_end,
    judge_loss,
)
from tw_launch._launcher.task import TaskProcess

_TICK_S = 0.1
_NODE_LOST = 1


class Director:
    """Node 0's side of a run on one machine or several.

    The run is in one of three states: tasks run; they are being ended, and machines
    still owe ``Idle``; all have ended, and the time of the next start is set.
    """

    def __init__(
        self, machine: Machine, members: Sequence[Node], rules: Rules, inbox: Inbox
    ) -> None:
        """Starts nothing yet; ``members`` are all machines, by rank."""
        self._machine, self._rules, self._inbox = machine, rules, inbox
        self.members = list(members)
        self._firsts: tuple[int, ...] = ()  # The index of each machine's first worker.
        count = sum(member.hello.workers for member in members)
        self._standing = Standing(frozenset(f"worker {n}" for n in range(count)))
        self._number, self._run_id = 0, secrets.token_hex(8)
        self._owing: set[int] = set()
        self._due: float | None = None
        self._delay_s = 0.0
        self._over: Over | None = None
        self._first: tuple[Ended, str] | None = None  # Failure and machine.

    def run(self) -> Over:
        """Runs all tasks until the run is over, and notifies the other machines."""
        if len(self._standing.workers) < (self._rules.min_workers or 1):
            wanted = f"--min-workers {self._rules.min_workers or 1}"
            said = (
                f"{len(self._standing.workers)} workers on all machines; needs {wanted}"
            )
            self._over = Over(CANNOT_START, said)
        else:
            self._start()
        while self._over is None:
            if self._due is not None and time.monotonic() >= self._due:
                self._number += 1
                self._start()
            self._handle(next_event(self._inbox, _TICK_S))
            if idle := self._machine.tick():
                self._note_idle(self.members[0], idle)
        tell(self.members, self._over)
        return self._over

    def _handle(self, event: object) -> None:
        match event:
            case Signalled(number):
                here = self.members[0].name if len(self.members) > 1 else ""
                self._over = after_signal(number, here)
            case TaskProcess() as process:
                if ended := self._machine.take(process):
                    self._note_end(self.members[0], ended)
            case Arrived() as arrived:
                arrived.turn_away("the run has begun")
            case Heard(link, message):
                sender = find_sender(self.members, link)
                if sender is not None:
                    self._hear(sender, message)

    def _hear(self, sender: Node, message: object) -> None:
        match message:
            case Ended():
                self._note_end(sender, message)
            case Idle():
                self._note_idle(sender, message)
            case Signalled(number) if number in SIGNALS:
                self._over = after_signal(number, sender.name)
            case Lost(why):
                self._note_loss(sender, why)

    def _note_end(self, member: Node, ended: Ended) -> None:
        if self._owing or self._due is not None:
            return  # as ordered
        before = self._standing
        self._standing, verdict = judge_end(
            before, self._rules, task=ended.task, status=ended.status
        )
        where = member.name if len(self.members) > 1 else ""
        is_lost = ended.task in before.workers - self._standing.workers
        if self._first is None and (is_lost or verdict.action is Action.FAIL):
            self._first = ended, where
        if verdict.action is Action.FAIL and self._first is not None:
            first, where = self._first
            last = None if first is ended else ended
            self._over = Over(
                first.status, verdict.said, failed=first, where=where, last=last
            )
        else:
            self._act(verdict, member, ended.task)

    def _note_loss(self, member: Node, why: str) -> None:
        rank = member.hello.node
        self.members.remove(member)
        self._owing.discard(rank)
        first = self._firsts[rank]
        running = self._standing.workers - self._standing.finished
        names = [f"worker {first + n}" for n in range(member.hello.workers)]
        tasks = [name for name in names if name in running]
        self._standing, verdict = judge_loss(
            self._standing,
            self._rules,
            tasks=tasks,
            said=f"{member.name} is lost: {why}",
        )
        if verdict.action is Action.FAIL:
            failed, where = self._first or (None, "")
            self._over = Over(_NODE_LOST, verdict.said, failed=failed, where=where)
            return
        if tasks and self._first is None:
            lost = Ended(tasks[0], _NODE_LOST, f"lost with its machine: {why}")
            self._first = lost, member.name
        self._act(verdict, member, "")

    def _act(self, verdict: Verdict, member: Node, task: str) -> None:
        announce(verdict.said)
        match verdict.action:
            case Action.SUCCEED:
                self._over = Over(0)
            case Action.RESTART_TASK:
                self._order(member, Restart(task, verdict.said))
            case Action.RESTART_GROUP:
                self._delay_s = verdict.after_s
                self._owing = {m.hello.node for m in self.members}
                for each in self.members:
                    self._order(each, Stop(verdict.said))

    def _note_idle(self, member: Node, idle: Idle) -> None:
        member.hello = replace(member.hello, ports=idle.ports)
        self._owing.discard(member.hello.node)
        if not self._owing:
            self._due = time.monotonic() + self._delay_s

    def _start(self) -> None:
        self._due = None
        hellos = [member.hello for member in self.members]
        cluster, self._firsts = lay_out(hellos, ps=self._machine.share.ps)
        for member, first in zip(self.members, self._firsts, strict=True):
            start = Start(self._number, cluster, first, self._run_id)
            self._order(member, start)

    def _order(self, member: Node, order: Start | Restart | Stop) -> None:
        if member.link is None:
            self._machine.obey(order)
        else:
            member.link.send(order)


def follow(
    machine: Machine, link: Link, inbox: Inbox, node_0: str, *, within_s: float
) -> Over:
    """Carries out node 0's orders until the run is over, or does not begin in time."""
    end, has_begun = time.monotonic() + within_s, False
    while True:
        match next_event(inbox, _TICK_S):
            case None if not has_begun and time.monotonic() >= end:
                said = f"{node_0} did not start the run within {within_s:g} s"
                over = Over(CANNOT_START, said)
                break
            case Signalled() as signalled:
                link.send(signalled)
                over = after_signal(signalled.number)
                break
            case TaskProcess() as process:
                if ended := machine.take(process):
                    link.send(ended)
            case Heard(_, Over() as over):
                break
            case Heard(_, Lost(why)):
                over = Over(CANNOT_START, f"{node_0} is lost: {why}")
                if has_begun:
                    over = Over(_NODE_LOST, f"{over.said}; ending all tasks")
                break
            case Heard(_, (Start() | Restart() | Stop()) as order):
                has_begun = True
                announce("" if isinstance(order, Start) else order.said)
                machine.obey(order)
        if idle := machine.tick():
            link.send(idle)
    link.close()
    return over


def summarize(over: Over, failures: Sequence[Ended]) -> list[str]:
    """Returns lines about the task that ended a run; none if no task did."""
    first = over.failed
    if first is None:
        return []
    where = over.where and f" on {over.where}"
    lines = [f"the first task that failed: {first.task}{where}, {first.how}"]
    lines += _show_output(first)
    told = {first.task}
    if over.last is not None:
        lines.append(f"the task that ended the run: {over.last.task}, {over.last.how}")
        lines += _show_output(over.last)
        told.add(over.last.task)
    others = [f"{one.task} ({one.how})" for one in failures if one.task not in told]
    if others:
        here = " on this machine" if over.where else ""
        lines.append(f"{len(others)} more failed{here}: {', '.join(others)}")
    return lines


def _show_output(ended: Ended) -> list[str]:
    lines = [f"its log: {ended.log}"] if ended.log else []
    if ended.lines:
        lines += ["its last lines:", *(f"  {line}" for line in ended.lines)]
    return lines
