"""Save a sharded model: each process writes its shards into the temporary folder of the checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError
from safetensors.torch import save_file

from halftune.core.atomic import sync, write_error_remedy
from halftune.core.errors import TrainingError
from halftune.core.files import read_text
from halftune.core.manifest import entry
from halftune.core.processes import heartbeat
from halftune.train.parallel.barrier import barrier
from halftune.train.parallel.shards import write_shares
from halftune.train.parallel.strategy import Strategy
from halftune.train.run_folder.lock import LOCK

PATIENCE = 10.0  # seconds until a network file system shows one machine what another has written

Files = Mapping[str, Mapping[str, torch.Tensor]]


def write_together(strategy: Strategy, folder: Path | None, files: Files, *, plain: bool) -> dict[str, dict[str, Any]]:
    """Writes the tensors of a checkpoint; called by all processes at the same time.

    Args:
        strategy: how they share the tensors.
        folder: where; given by the main process and None elsewhere.
        files: name of a file → its tensors, of which each process holds a share.
        plain: gather one tensor after the other, and let the main process write files as one process would: for
            adapters, which are small.

    Returns:
        the manifest's entries of what was written, on every process.

    Raises:
        TrainingError: a process cannot write; raised on all of them, and names the first.
    """
    accelerator = strategy.accelerator
    place: list[Any] = [None if folder is None else str(folder)]
    broadcast_object_list(place)
    failure, written = None, {}
    try:
        if plain:
            _write_plain(strategy, Path(place[0]), files)
        else:
            written = _write_shares(strategy, Path(place[0]), files)
    except (OSError, SafetensorError) as error:
        failure = [str(error), write_error_remedy(error)]
    barrier(accelerator.num_processes)
    everybody = gather_object([(failure, written)])
    for rank, (failed, _) in enumerate(everybody):
        if failed:
            remedy = f"{failed[1]} and run the same command again; earlier checkpoints are intact"
            what = f"rank {rank} of {accelerator.num_processes} cannot write its part of the checkpoint: {failed[0]}"
            raise TrainingError(what, where=place[0], remedy=remedy, code="core.cannot_write")
    return {name: said for _, names in everybody for name, said in names.items()}


def check_shared(strategy: Strategy, folder: Path) -> None:
    """Makes sure that all processes write into the same run folder, before hours of training.

    Raises:
        TrainingError: one sees another folder than the main process, or none.
    """
    accelerator = strategy.accelerator
    signed: list[Any] = [_signature(folder) if accelerator.is_main_process else None]
    broadcast_object_list(signed)
    deadline = time.monotonic() + PATIENCE
    while not (seen := _signature(folder) == signed[0]) and time.monotonic() < deadline:
        time.sleep(0.2)
    missing = [rank for rank, sees in enumerate(gather_object([seen])) if not sees]
    if missing:
        raise TrainingError(
            f"rank {missing[0]} does not see the main process's run folder, and each process writes its shards there",
            where=str(folder),
            remedy="put training.output_dir on a disk that all machines share, or distributed.strategy: ddp",
            code="train.folder_not_shared",
        )


def _signature(folder: Path) -> str:
    try:
        return read_text(folder / LOCK)
    except OSError:
        return "none"


def _write_shares(strategy: Strategy, folder: Path, files: Files) -> dict[str, dict[str, Any]]:
    rank, processes = strategy.accelerator.process_index, strategy.accelerator.num_processes
    written = {}
    for name, tensors in files.items():
        path = write_shares(folder, name, tensors, rank, processes)
        sync(path)  # by the machine that has written it
        written[path.name] = entry(path)
    return written


def _write_plain(strategy: Strategy, folder: Path, files: Files) -> None:
    failure: Exception | None = None
    for name, tensors in files.items():
        whole = {}
        for key, tensor in tensors.items():
            heartbeat.beat()
            gathered = strategy.whole(tensor.detach())
            if strategy.accelerator.is_main_process:
                whole[key] = gathered.cpu()
        if not strategy.accelerator.is_main_process:
            continue
        heartbeat.beat(sum(tensor.nbytes for tensor in whole.values()))
        try:
            save_file(whole, folder / name)
        except (OSError, SafetensorError) as error:  # raised after all tensors are gathered: the others wait
            failure = failure or error
    if failure is not None:
        raise failure
