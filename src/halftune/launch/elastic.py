"""torchrun with the same options and one summary of failures: ``python -m halftune.launch.elastic …``.

Failed processes write torch's error files. These show which process failed first and which only lost a peer.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from halftune.core.errors import HalftuneError
from halftune.core.processes.failures import SUMMARY
from halftune.hardware.probe import cpu_cores
from halftune.launch.machines import Machine, Machines, wait_for_machines
from halftune.launch.summary import FAILED, say, summary

_PORT = "HALFTUNE_STORE_PORT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run torchrun in this process; returns the exit code of the process that failed first."""
    with _no_cpp_log():
        import torch  # noqa: F401
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run

    from halftune.launch.agent import Agent, install

    args = get_args_parser().parse_args(arguments)
    machines = None
    try:
        if (machine := machine_from(args)) is not None:
            machines = wait_for_machines(machine)
        prepare(args)
        if (taken := _taken(args)) is not None:
            return say(f"port {taken} is in use · set another distributed.main_process_port [launch.port_taken]", 2)
        install(machines)
        _silence()
        run(args)
    except ChildFailedError as error:
        return _child_failed(error, int(args.max_restarts))
    except HalftuneError as error:
        return say(error.report(), error.exit_code)
    except SignalException as error:
        return _stopped(error.sigval)
    except (RendezvousError, DistError, OSError) as error:
        begun = Agent.latest is not None and Agent.latest.has_started()
        code = "launch.peer_lost" if begun else "launch.main_unreachable"
        return say(f"{_rendezvous_error(error, args, machines, begun=begun)} [{code}]", FAILED)
    return 0


def _child_failed(error: Any, restarts: int) -> int:
    """Exit code of a failed process, said unless the process or another machine said it."""
    from halftune.launch.agent import Agent

    assert Agent.latest is not None
    text, code = summary(Agent.latest.failures(error.failures), restarts)
    if Agent.latest.peer_exit_code:
        return Agent.latest.peer_exit_code
    return code if Agent.latest.said or (code > 128 and Agent.latest.has_reported(code)) else say(text, code)


def _stopped(number: int) -> int:
    """Exit code of a run that a signal stopped."""
    from halftune.launch.agent import Agent

    code = 128 + number
    if Agent.latest is not None:
        Agent.latest.kill()  # third signal: kill at once
        if Agent.latest.has_reported(code):
            return code
    return say(f"stopped by {signal.Signals(number).name}", code)


def run_module() -> int:
    """Run :func:`main`; handles signals that arrive before torchrun handles them."""
    # no handler is installed yet, and PID 1 of a container ignores signals without a handler
    signal.signal(signal.SIGTERM, _leave)
    try:
        return main()
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        return say(f"stopped by {number.name} before any process was started", 128 + number)


def _leave(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _rendezvous_error(error: Exception, args: argparse.Namespace, machines: Machines | None, *, begun: bool) -> str:
    """The message for a failed rendezvous, or for a lost machine 0."""
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    if begun and isinstance(error, RendezvousTimeoutError) and machines is not None:
        with suppress(RuntimeError):  # the store is gone with machine 0
            if absent := machines.absent():
                who, seconds = ", ".join(map(str, absent)), machines.this.seconds
                return (
                    f"a process failed, and machine {who} missed the rendezvous within {seconds:.0f} s · see its own "
                    "output; run the same command again to resume from the newest checkpoint"
                )
    where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    if not begun:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". See inner")[0]
        return f"rendezvous at {where} failed: {first} · check the address, and that the port is open"
    if isinstance(error, RendezvousTimeoutError):
        return "a process failed, and not all machines rejoined in time · see the output of the others"
    return (
        f"machine 0 at {where} exited, so the processes on this machine were terminated · see its own output; run the "
        "same command again to resume from the newest checkpoint"
    )


def machine_from(args: argparse.Namespace) -> Machine | None:
    """Return this machine's description; None for a single machine, or another rendezvous than ours."""
    if args.rdzv_backend != "c10d" or ":" not in args.rdzv_endpoint or not str(args.nnodes).isdecimal():
        return None
    host, _, port = args.rdzv_endpoint.rpartition(":")
    limit = re.search(r"join_timeout=(\d+)", args.rdzv_conf)
    seconds = float(limit[1]) if limit else 600.0
    return Machine(int(args.node_rank), int(args.nnodes), _each(args), host.strip("[]"), int(port), seconds)


def _each(args: argparse.Namespace) -> int:
    return int(args.nproc_per_node) if str(args.nproc_per_node).isdecimal() else 1


def prepare(args: argparse.Namespace) -> None:
    """Set the threads per process, and for several machines the address and interface of the rendezvous."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // _each(args))))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[SUMMARY] = "1"
    if args.rdzv_backend != "c10d" or ":" not in args.rdzv_endpoint:
        return
    host, _, port = args.rdzv_endpoint.rpartition(":")
    # torchrun would guess the host of the store from names and addresses
    args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={int(args.node_rank) == 0}"]))
    os.environ[_PORT] = str(int(port) + 1)  # otherwise torchrun chooses a random one
    args.local_addr = args.local_addr or own_address(host)
    if args.local_addr and (interface := interface_of(args.local_addr)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def own_address(host: str) -> str | None:
    """Return this machine's address in the network of ``host``; sends nothing."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # IPv6 only without IPv4
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with an address."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _taken(args: argparse.Namespace) -> int | None:
    """The store's port on a single machine, if another program uses it; else None."""
    if args.rdzv_backend != "static" or args.master_port is None:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(args.master_port)))
        except OSError:
            return int(args.master_port)
    return None


@contextmanager
def _no_cpp_log() -> Iterator[None]:
    """Inside, the log of torch's C++ code is off while it is imported; started processes keep it."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "FATAL"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _silence() -> None:
    """Silence torchrun's loggers, each of which has its own level: the summary replaces them."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)


if __name__ == "__main__":
    number = run_module()
    sys.stdout.flush()
    sys.stderr.flush()
    # torch's teardown takes half a CPU-second, and aborts if a thread still waits for the store
    os._exit(number)
