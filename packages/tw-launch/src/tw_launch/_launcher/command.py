"""``tw-launch`` starts the tasks of a cluster, with TF_CONFIG set, and watches them.

tw-launch --ps 1 --workers 2 -- python train.py --epochs 3
"""

import argparse
import contextlib
import platform
import signal
import socket
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from types import FrameType

from tw_core.internal import check_list, check_text
from tw_launch._addresses import is_loopback, split_address
from tw_launch._key import draw_key, find_key, read_key_file
from tw_launch._launcher.machine import Machine, find_gpus, share_gpus
from tw_launch._launcher.meeting import (
    CANNOT_START,
    Inbox,
    Node,
    Port,
    gather,
    open_port,
    part,
    reach_node_0,
)
from tw_launch._launcher.messages import SIGNALS, Hello, Over, Signalled
from tw_launch._launcher.options import parse, version_of
from tw_launch._launcher.output import announce, check_log_folder
from tw_launch._launcher.plan import Share, find_horovod
from tw_launch._launcher.run import Director, follow, summarize
from tw_launch._network_exposure import isolate

__all__ = ["main"]

# Options that must be the same on every machine of a run.
_AGREED = (
    "nnodes",
    "ps",
    "horovod",
    "evaluators",
    "restart",
    "max_restarts",
    "min_workers",
    "node_timeout",
)


_WITHOUT_KEY = (
    "without a key, any program that reaches this port can take the place of a machine "
    "or a rank, learn addresses and end the run; give all machines one, in TW_KEY or "
    "--key-file (`openssl rand -hex 16` makes one)"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``tw-launch``.

    Args:
      arguments: of the command line; by default, this process's.

    Returns:
      The exit status: 0; the status of the first task that failed for good, on any
      machine; 128 plus the number of the signal that ended the run; 1 if a machine was
      lost, or 2 if nothing could be started.

    Raises:
      TypeError: ``arguments`` are not strings.
    """
    if arguments is not None:
        for argument in check_list(arguments=arguments, empty=True):
            check_text(argument=argument, empty=True)
    options = parse(arguments)
    try:
        if options.isolate:
            isolate()
        if options.log_dir is not None:
            check_log_folder(options.log_dir)
        if options.address:
            _check_address(options.address)
        return _launch(options)
    except (OSError, RuntimeError, ValueError) as error:
        announce(str(error))
        return CANNOT_START


def _check_address(host: str) -> None:
    """Refuses a host without an address, which tasks elsewhere could not resolve."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"--address {host} has no address ({error.strerror}); pass a name or an "
            "address at which other machines reach this one"
        ) from None


def _launch(options: argparse.Namespace) -> int:
    inbox: Inbox = SimpleQueue()
    machine = Machine(
        _share(options),
        options.command,
        grace_s=options.grace,
        log_dir=options.log_dir,
        on_end=inbox.put,
    )
    take_part = _lead if options.node_rank == 0 else _follow
    ended_by: int = signal.SIGTERM
    with _signals_into(inbox), contextlib.ExitStack() as farewell:
        try:
            over = take_part(options, machine, inbox, farewell)
            ended_by = over.signal if over.signal in SIGNALS else ended_by
            announce(over.said)
        finally:
            machine.end(ended_by)
    for line in summarize(over, machine.failures()):
        announce(line)
    return over.status if 0 <= over.status < 256 else 1


def _lead(
    options: argparse.Namespace,
    machine: Machine,
    inbox: Inbox,
    farewell: contextlib.ExitStack,
) -> Over:
    """Runs as node 0: the only machine, or the first of several."""
    hello = _hello(options, machine)
    if options.nnodes == 1:
        return Director(machine, [Node(hello)], options.rules, inbox).run()
    host, port = options.coordinator
    server = open_port(host, port, within_s=options.start_timeout, inbox=inbox)
    if isinstance(server, Over):
        return server
    with contextlib.closing(
        Port(
            server,
            inbox=inbox,
            silence_s=options.node_timeout,
            key=machine.share.key,
        )
    ) as own_port:
        announce(f"node 0 waits at {own_port.address} for {options.nnodes - 1} more")
        if not machine.share.key and not is_loopback(
            split_address(own_port.address)[0]
        ):
            announce(_WITHOUT_KEY)
        members = gather(
            hello,
            num_nodes=options.nnodes,
            within_s=options.start_timeout,
            inbox=inbox,
        )
        if isinstance(members, Over):
            return members
        director = Director(machine, members, options.rules, inbox)
        farewell.callback(part, director.members, inbox)
        return director.run()


def _follow(
    options: argparse.Namespace,
    machine: Machine,
    inbox: Inbox,
    farewell: contextlib.ExitStack,
) -> Over:
    """Runs as a machine other than node 0."""
    host, port = options.coordinator
    link = reach_node_0(
        host,
        port,
        _hello(options, machine),
        key=machine.share.key,
        within_s=options.start_timeout,
        silence_s=options.node_timeout,
        inbox=inbox,
    )
    if isinstance(link, Over):
        return link
    farewell.callback(link.drop)
    within_s, node_0 = options.start_timeout, f"node 0 ({host})"
    return follow(machine, link, inbox, node_0, within_s=within_s)


def _hello(options: argparse.Namespace, machine: Machine) -> Hello:
    host = options.address
    if not host and options.node_rank == 0:
        host = "localhost" if options.nnodes == 1 else options.coordinator[0]
    settings = {
        "tw-launch": version_of("tw-launch"),
        "TensorFlow": version_of("tensorflow"),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
    for name in _AGREED:
        settings[f"--{name.replace('_', '-')}"] = str(getattr(options, name))
    ports = machine.find_ports()
    return Hello(options.node_rank, host, options.workers, ports, settings)


def _share(options: argparse.Namespace) -> Share:
    """Returns this machine's tasks; announces if its workers are left without GPUs."""
    gpus, workers = find_gpus(), options.workers
    leads = options.node_rank == 0
    if options.gpus_per_task is None and 0 < len(gpus) < workers:
        announce(
            f"{len(gpus)} GPU{'s' * (len(gpus) > 1)} for {workers} workers: none gets "
            "one"
        )
    return Share(
        ps=options.ps if leads else 0,
        workers=workers,
        evaluators=options.evaluators if leads else 0,
        gpus=share_gpus(gpus, workers=workers, per_task=options.gpus_per_task),
        node=options.node_rank,
        num_nodes=options.nnodes,
        horovod=find_horovod() if options.horovod else "",
        uses_mpi=options.mpi,
        key=_find_key(options),
    )


def _find_key(options: argparse.Namespace) -> str:
    """Returns the key that all machines share; one machine needs no other's."""
    shared = find_key() if options.key_file is None else read_key_file(options.key_file)
    return shared or (draw_key() if options.nnodes == 1 else "")


@contextlib.contextmanager
def _signals_into(inbox: Inbox) -> Iterator[None]:
    """Puts signals into the inbox instead of letting them end this process."""

    def note(number: int, _: FrameType | None) -> None:
        inbox.put(Signalled(number))

    def is_taken(number: int) -> bool:  # Under nohup, go on when the terminal closes.
        return number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN

    taken = filter(is_taken, SIGNALS)
    before = {number: signal.signal(number, note) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
