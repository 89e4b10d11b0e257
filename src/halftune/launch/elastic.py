"""torchrun, taking its options, with one summary in place of its pages: ``python -m halftune.launch.elastic …``.

The processes that it starts leave what went wrong in torch's error files. From these it tells the process that failed
first from those that only lost it.
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

from halftune.core.errors import HalftuneError
from halftune.core.failures import SUMMARY
from halftune.hardware.host import cpu_cores
from halftune.launch.machines import Machine, Machines, gather
from halftune.launch.summary import FAILED, say, summary

_PORT = "HALFTUNE_STORE_PORT"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs torchrun in this process; returns the exit code of the process that failed first."""
    with _no_pages():
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
            machines = gather(machine)
        prepare(args)
        if (taken := _taken(args)) is not None:
            return say(f"port {taken} is in use on this machine · another distributed.main_process_port", 2)
        install(machines)
        _silence()
        run(args)
    except ChildFailedError as error:
        assert Agent.latest is not None
        text, code = summary(Agent.latest.failures(error.failures), int(args.max_restarts))
        if Agent.latest.heard:
            return Agent.latest.heard
        return code if Agent.latest.said or (code > 128 and Agent.latest.has_told(code)) else say(text, code)
    except HalftuneError as error:
        return say(str(error), error.exit_code)
    except SignalException as error:
        code = 128 + error.sigval
        if Agent.latest is not None:
            Agent.latest.kill()  # a third signal: nobody waits any more
            if Agent.latest.has_told(code):
                return code
        return say(f"stopped by {signal.Signals(error.sigval).name}", code)
    except (RendezvousError, DistError, OSError) as error:
        return say(_apart(error, args, machines, begun=Agent.latest is not None and Agent.latest.has_started()), FAILED)
    return 0


def run_module() -> int:
    """:func:`main`, told by a signal to leave before torchrun listens to them."""
    # nobody else does yet, and process 1 of a container, which this may be, is deaf to what it does not catch
    signal.signal(signal.SIGTERM, _leave)
    try:
        return main()
    except KeyboardInterrupt as error:
        number = signal.Signals(error.args[0] if error.args else signal.SIGINT)
        return say(f"stopped by {number.name} before any process was started", 128 + number)


def _leave(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(number)


def _apart(error: Exception, args: argparse.Namespace, machines: Machines | None, *, begun: bool) -> str:
    """What to tell where machines do not meet, or meet no more."""
    from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

    if begun and isinstance(error, RendezvousTimeoutError) and machines is not None:
        with suppress(RuntimeError):  # of the store, which leaves with machine 0
            if absent := machines.absent():
                who, seconds = ", ".join(map(str, absent)), machines.this.seconds
                return (
                    f"a process failed, and machine {who} did not come back within {seconds:.0f} s · its own output "
                    "says why; the same command goes on from the newest checkpoint"
                )
    where = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    if not begun:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0].split(". See inner")[0]
        return f"the machines did not meet at {where}: {first} · is the address right, and the port open?"
    if isinstance(error, RendezvousTimeoutError):
        return "a process failed, and not all machines came back in time · the output of the others says why"
    return (
        f"machine 0 at {where} is gone, so the processes of this one were ended · its own output says why; the same "
        "command goes on from the newest checkpoint"
    )


def machine_from(args: argparse.Namespace) -> Machine | None:
    """This machine among several; None where there is only one, or machines meet in another way than ours."""
    if args.rdzv_backend != "c10d" or ":" not in args.rdzv_endpoint or not str(args.nnodes).isdecimal():
        return None
    host, _, port = args.rdzv_endpoint.rpartition(":")
    limit = re.search(r"join_timeout=(\d+)", args.rdzv_conf)
    seconds = float(limit[1]) if limit else 600.0
    return Machine(int(args.node_rank), int(args.nnodes), _each(args), host.strip("[]"), int(port), seconds)


def _each(args: argparse.Namespace) -> int:
    return int(args.nproc_per_node) if str(args.nproc_per_node).isdecimal() else 1


def prepare(args: argparse.Namespace) -> None:
    """Threads for each process, and for several machines the address and interface by which they reach each other."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // _each(args))))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ[SUMMARY] = "1"
    if args.rdzv_backend != "c10d" or ":" not in args.rdzv_endpoint:
        return
    host, _, port = args.rdzv_endpoint.rpartition(":")
    # torchrun would guess from names and addresses who serves the others
    args.rdzv_conf = ",".join(filter(None, [args.rdzv_conf, f"is_host={int(args.node_rank) == 0}"]))
    os.environ[_PORT] = str(int(port) + 1)  # else torchrun lets the processes meet at a random one
    args.local_addr = args.local_addr or own_address(host)
    if args.local_addr and (interface := interface_of(args.local_addr)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def own_address(host: str) -> str | None:
    """The address of this machine in the network through which it reaches ``host``; nothing is sent."""
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)  # IPv6 where there is nothing else
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return None


def interface_of(address: str) -> str | None:
    """Name of the network interface that has an address."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return None


def _taken(args: argparse.Namespace) -> int | None:
    """The port of a machine's only store, where another program has it."""
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
def _no_pages() -> Iterator[None]:
    """Inside, torch is imported without the log of its C++ code; processes that are started later have it."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "FATAL"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


def _silence() -> None:
    """torchrun's own loggers, each with a level of its own: what matters is in the summary."""
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed."):
            logging.getLogger(name).setLevel(logging.CRITICAL)


if __name__ == "__main__":
    number = run_module()
    sys.stdout.flush()
    sys.stderr.flush()
    # taking torch apart costs half a CPU-second, and aborts where a thread still waits for a store that does not answer
    os._exit(number)
