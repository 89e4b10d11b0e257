"""Two machines on one: two network namespaces joined by a cable, each started by the command that `launch` prints.

    sudo python scripts/two_machines.py --config configs/quickstart_pretrain.yaml training.max_steps=20
    sudo python scripts/two_machines.py --config x.yaml --kill 5      # SIGKILL to a process of machine 1 at step 5

Needs Linux, root and iproute2. Everything after the options is passed on to `halftune train`. Both see the same
files; each has its own network, so that whatever does not go through the cable does not go at all.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")


def main() -> int:
    """Starts both machines and waits; the exit code is the first that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--processes", type=int, default=2, help="of both machines together")
    parser.add_argument("--kill", type=int, metavar="STEP", help="end a process of machine 1 at this step by SIGKILL")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    if why := cannot():
        print(why, file=sys.stderr)
        return 77
    with two_networks() as names:
        commands = [printed(rank, args) for rank in range(len(names))]
        folder = output_dir(commands[0])
        jobs = [
            subprocess.Popen(["ip", "netns", "exec", name, *words]) for name, words in zip(names, commands, strict=True)
        ]
        try:
            if args.kill is not None:
                kill_at(args.kill, jobs[1], folder)
            codes = [job.wait() for job in jobs]
        finally:
            for job in jobs:
                job.terminate()
    print(f"machine 0 left with {codes[0]}, machine 1 with {codes[1]}")
    return next((code for code in codes if code), 0)


def cannot() -> str:
    """Why this cannot be run here; empty where it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "two machines need root and iproute2 (ip)"
    tried = subprocess.run(["ip", "netns", "add", f"ht{os.getpid()}try"], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", f"ht{os.getpid()}try"], capture_output=True, check=False)
    return "" if tried.returncode == 0 else f"no network namespaces here: {tried.stderr.strip()}"


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two namespaces, a cable between them; gone afterwards."""
    names = (f"ht{os.getpid()}a", f"ht{os.getpid()}b")
    cable = [f"{name}v"[-15:] for name in names]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def printed(rank: int, args: argparse.Namespace) -> list[str]:
    """Asks `launch` for the command of a machine, as its user would."""
    distributed = [
        "distributed.num_machines=2",
        f"distributed.num_processes={args.processes}",
        f"distributed.main_process_ip={ADDRESSES[0]}",
        f"distributed.machine_rank={rank}",
    ]
    ask = [sys.executable, "-m", "halftune", "launch", "--config", args.config, "--json", *distributed, *args.overrides]
    return json.loads(subprocess.run(ask, check=True, capture_output=True, text=True).stdout)


def output_dir(words: list[str]) -> Path:
    """The run folder, from the configuration that the command names."""
    ask = [sys.executable, "-m", "halftune", *words[words.index("train") :], "--print-config"]
    text = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
    line = next(line for line in text.splitlines() if line.strip().startswith("output_dir:"))
    return Path(line.split(":", 1)[1].split("#")[0].strip().strip("'\""))


def kill_at(step: int, machine: subprocess.Popen, folder: Path) -> None:
    """SIGKILL to a training process of a machine as soon as so many steps are written."""
    metrics = folder / "metrics.jsonl"
    while machine.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            found = subprocess.run(["pgrep", "-P", str(machine.pid)], capture_output=True, text=True, check=False)
            if not found.stdout:  # it has just ended
                return
            victim = int(found.stdout.split()[-1])
            print(f"killing process {victim} of machine 1", flush=True)
            os.kill(victim, signal.SIGKILL)
            return
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())
