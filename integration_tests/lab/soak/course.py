"""One run of a soak: its programs, the kills, what was told and measured."""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from harness.processes import TAG, Program, tagged
from lab.soak.ledger import Kill, Ledger
from lab.soak.trend import Sample, report, sample

HERE = Path(__file__).parent
WORKERS = ["worker 0", "worker 1", "worker 2"]
VICTIMS = ("worker 1", "ps 0", "worker 0")
LONG_LIVED = ("towers", "tw-launch", "worker 2")
START_S, RECOVER_S, END_S = 120.0, 150.0, 60.0
QUIET_S = 5.0  # at least, between a recovery and the next kill
LIGHT_PAUSE_S = 0.02  # after each step of a worker or a tower
ACCURACY = 0.9
LOOK_EVERY_S, SAMPLE_EVERY_S, SAY_EVERY_S = 0.2, 1.0, 10.0


class Soak:
    """One run; ``start``, ``run`` and ``stop`` it, and ``end`` it in any case.

    Attributes:
      faults: what must not be.
      victims: the tasks that are killed.
      long_lived: tasks and programs whose memory and descriptors must stay level.
      warm_up_kills: how many recoveries belong to the warm-up.
    """

    victims: tuple[str, ...] = VICTIMS
    long_lived: tuple[str, ...] = LONG_LIVED
    warm_up_kills = VICTIMS.index("ps 0") + 1

    def __init__(
        self,
        folder: Path,
        kill_every_s: float,
        log: Path | None = None,
        *,
        is_light: bool = False,
    ) -> None:
        """Starts nothing yet.

        Where it is light, tasks are forked from a launcher with TensorFlow in it, and
        pause after each step; else they start afresh and train as fast as they can.
        """
        self.faults: list[str] = []
        self._is_light = is_light
        self._folder, self._kill_every_s = folder, kill_every_s
        self._started = time.monotonic()
        self._towers, self._cluster = Ledger(), Ledger()
        self._programs: dict[str, Program] = {}
        self._kills: list[Kill] = []
        self._samples: dict[str, list[Sample]] = {name: [] for name in self.long_lived}
        self._trained_from_s = 0.0
        self._log = log
        self._other_lines: list[str] = []
        self._due = {"sample": 0.0, "say": 0.0}

    @property
    def now_s(self) -> float:
        return time.monotonic() - self._started

    def start(self) -> None:
        """Starts the programs and waits until all train."""
        env = {**os.environ, TAG: str(os.getpid()), "TF_CPP_MIN_LOG_LEVEL": "3"}
        env["PYTHONPATH"] = os.pathsep.join(
            [str(HERE.parents[1]), *filter(None, [env.get("PYTHONPATH")])]
        )
        for name, command in self._commands().items():
            self._programs[name] = Program(command, env=env)
        self._wait_for(self._all_train, START_S, "not all tasks train")
        self._trained_from_s = self.now_s

    def run(self, seconds: float) -> None:
        """Trains, kills and watches; the time is counted from when all train.

        It goes on beyond ``seconds`` until every victim was killed once.
        """
        victims, until = self._choose_victims(), self.now_s + seconds
        due = self.now_s + self._kill_every_s
        while due < until or len(self._kills) < len(self.victims):
            self._watch_until(due)
            self._kill(next(victims))
            due = max(due + self._kill_every_s, self.now_s + QUIET_S)
        self._watch_until(until)

    def stop(self) -> None:
        """Has all end in order, and looks at what they say then."""
        (self._folder / "stop").touch()
        for name, program in self._programs.items():
            if status := program.finish(END_S):
                self.faults.append(f"{name} ended with status {status}")
        self._read_lines()
        ends = {"worker 0": self._cluster.ends.get("worker 0")}
        if "towers" in self._programs:
            ends["towers"] = self._towers.ends.get("towers")
        for name, end in ends.items():
            if end is None or end["accuracy"] < ACCURACY:
                self.faults.append(f"{name} reported at its end: {end}")

    def end(self) -> None:
        """Ends whatever still runs, and looks that nothing is left."""
        for program in self._programs.values():
            if program.poll() is None:
                program.send_signal(signal.SIGINT)
            program.finish(15.0)
        self._read_lines()
        left = tagged(str(os.getpid()))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        if left:
            self.faults.append(f"processes were left behind: {left}")

    def summary(self) -> list[str]:
        """Describes the run, and completes the faults."""
        self.faults += self._towers.faults + self._cluster.faults
        lines = [self._line()]
        warm_up_s = self._warm_up_s()
        for name, samples in self._samples.items():
            line, grown = report(name, samples, warm_up_s=warm_up_s)
            lines.append(line)
            self.faults += grown
        for victim in self.victims:
            took = [k.recovered_s for k in self._kills if k.task == victim]
            said = ", ".join("not" if s is None else f"{s:.0f}" for s in took)
            lines.append(f"{victim} killed {len(took)} times; seconds: {said}")
        for task, end in {**self._towers.ends, **self._cluster.ends}.items():
            lines.append(f"{task}: {end}")
        return lines

    def _warm_up_s(self) -> float:
        """A quarter of the run, and the first new session of the worker that stays."""
        trained_from_s = self._trained_from_s or self.now_s
        quarter = trained_from_s + (self.now_s - trained_from_s) / 4
        ends = [k.at_s + k.recovered_s for k in self._kills if k.recovered_s]
        return max([quarter, *ends[: self.warm_up_kills]])

    def _commands(self) -> dict[str, list[str]]:
        """Returns the programs' commands, by name."""
        towers = self._program("lab.soak.towers_program")
        launch = self._launch("--ps", 1, "--workers", len(WORKERS))
        task = self._program("lab.soak.task_program")
        return {"towers": towers, "tw-launch": [*launch, "--", *task]}

    def _launch(self, *arguments: object) -> list[str]:
        module = "harness.launching" if self._is_light else "tw_launch"
        return _python(module, *arguments, "--max-restarts", 1_000_000)

    def _program(self, module: str) -> list[str]:
        pause_s = LIGHT_PAUSE_S if self._is_light else 0.0
        return _python(module, "--folder", self._folder, "--pause", pause_s)

    def _choose_victims(self) -> Iterator[str]:
        """Yields the tasks to kill, one after the other."""
        return cycle(self.victims)

    def _expected_starts(self) -> int:
        """Returns how often tasks may have started, if only kills ended any."""
        return len(WORKERS) + 1 + len(self._kills)

    def _all_train(self) -> bool:
        told = [self._cluster.advances[name] for name in WORKERS]
        return all(told) and (
            "towers" not in self._programs or self._towers.advances["towers"] > 0
        )

    def _kill(self, task: str) -> None:
        kill = Kill(task, self.now_s, len(self._cluster.pids[task]))
        self._kills.append(kill)
        os.kill(self._cluster.pids[task][-1], signal.SIGKILL)
        self._wait_for(
            lambda: kill.look(self._cluster, WORKERS, self.now_s),
            RECOVER_S,
            f"not all workers continued after the kill of {task}",
        )

    def _wait_for(self, is_so: Any, limit_s: float, otherwise: str) -> None:
        until = self.now_s + limit_s
        while not is_so():
            if self.now_s > until:
                raise RuntimeError(f"{otherwise} within {limit_s:g} s")
            self._look()

    def _watch_until(self, until_s: float) -> None:
        while self.now_s < until_s:
            self._look()

    def _look(self) -> None:
        self._read_lines()
        for name, program in self._programs.items():
            if (status := program.poll()) is not None:
                raise RuntimeError(f"{name} ended with status {status}")
        starts = sum(len(pids) for pids in self._cluster.pids.values())
        if starts > self._expected_starts():
            raise RuntimeError("a task ended that was not killed")
        if self.now_s >= self._due["sample"]:
            self._due["sample"] = self.now_s + SAMPLE_EVERY_S
            self._sample()
        if self.now_s >= self._due["say"]:
            self._due["say"] = self.now_s + SAY_EVERY_S
            print(self._line(), flush=True)
        time.sleep(LOOK_EVERY_S)

    def _sample(self) -> None:
        pids = {name: program.pid for name, program in self._programs.items()}
        self._keep(pids | {task: own[-1] for task, own in self._cluster.pids.items()})

    def _keep(self, pids: dict[str, int]) -> None:
        """Notes what the long-lived ones of these processes hold."""
        for name in self.long_lived:
            held = sample(pids[name], self.now_s) if name in pids else None
            if held is not None:
                self._samples[name].append(held)

    def _line(self) -> str:
        minutes, seconds = divmod(int(self.now_s), 60)
        kills = f"{len(self._kills)} kills"
        if self._kills:
            kills += f" (last {self._kills[-1].task})"
        held = ", ".join(
            f"{name} {own[-1].rss_bytes >> 20} MiB {own[-1].descriptors} fd"
            for name, own in self._samples.items()
            if own
        )
        told = [f"cluster step {max(self._cluster.steps.values(), default=0):,}"]
        if "towers" in self._programs:
            told.insert(0, f"towers {self._towers.steps.get('towers', 0):,} steps")
        return f"[{minutes:02}:{seconds:02}] {'; '.join([*told, kills, held])}"

    def _read_lines(self) -> None:
        for name, program in self._programs.items():
            ledger = self._towers if name == "towers" else self._cluster
            for line in program.new_lines():
                # The launcher's lines name their tasks already.
                named = f"[towers] {line}" if ledger is self._towers else line
                self._write_down(named)
                if not ledger.read(named):
                    self._other_lines = [*self._other_lines, named][-40:]

    def _write_down(self, line: str) -> None:
        if self._log is not None:
            with self._log.open("a") as file:
                file.write(f"{self.now_s:.1f} {line}\n")

    def explain(self) -> str:
        """The last lines that the programs said besides."""
        return "\n".join(self._other_lines)


class GroupSoak(Soak):
    """A run of a process group, of which a kill makes the launcher start all again.

    What successors of a rank hold, once they train, must stay level from one to the
    next.
    """

    victims = tuple(WORKERS)
    long_lived = ("tw-launch", *WORKERS)
    warm_up_kills = 1

    def _commands(self) -> dict[str, list[str]]:
        again = (
            "--restart",
            "group",
            "--restart-delay",
            0,
        )  # It would double each time.
        launch = self._launch("--ps", 0, "--workers", len(WORKERS), *again)
        task = self._program("lab.soak.group_program")
        return {"tw-launch": [*launch, "--", *task]}

    def _choose_victims(self) -> Iterator[str]:
        while True:  # Each once in three kills.
            yield from random.sample(self.victims, len(self.victims))

    def _expected_starts(self) -> int:
        return len(WORKERS) * (1 + len(self._kills))

    def _sample(self) -> None:
        trained = [name for name in WORKERS if name in self._cluster.steps]
        pids = {name: self._cluster.pids[name][-1] for name in trained}
        self._keep({**pids, "tw-launch": self._programs["tw-launch"].pid})


def _python(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-u", "-m", module, *map(str, arguments)]
