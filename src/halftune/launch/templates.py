"""Jobs for schedulers around the same command: each machine runs it, and learns its number from the scheduler."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence

from halftune.config.run import RunConfig
from halftune.core.errors import ConfigError, DtypeContractError, MissingPackageError, ModelError
from halftune.launch.command import command

GRACE = 120  # seconds between a scheduler's SIGTERM and its SIGKILL, for the step and its checkpoint
# Exit codes of a machine after which another attempt would end as this one: see core/errors.py, and the last a bug.
FINAL = (*sorted({one.exit_code for one in (ConfigError, ModelError, DtypeContractError, MissingPackageError)}), 70)
_CORES = 8  # for each process: its share of data, and the threads of torch; Slurm gives a task one core otherwise
# In a template the machine's number and the first machine's name are known only when the job runs.
_RANK, _HOST = 999_983, "main.process.ip"


def render(name: str, config: RunConfig, world_size: int, arguments: Sequence[str]) -> str:
    """The text of a job: a batch script, or YAML."""
    return TEMPLATES[name](config, world_size, list(arguments))


def shell_command(config: RunConfig, world_size: int, arguments: list[str], rank: str, host: str) -> str:
    """The command of one machine as a line of shell, Python by its name, with shell words for what only a job knows.

    Args:
        config: the run.
        world_size: processes over all machines.
        arguments: of ``halftune``.
        rank, host: shell words such as ``$SLURM_NODEID``.
    """
    machines = config.distributed.num_machines
    known = {"machine_rank": _RANK, "main_process_ip": _HOST} if machines > 1 else {}
    words = ["python", *command(config.distributed.model_copy(update=known), world_size, arguments)[1:]]
    quoted = [shlex.quote(word) for word in words]
    for index, word in enumerate(words[: len(words) - len(arguments)]):
        if word == str(_RANK):
            quoted[index] = f'"{rank}"'
        elif word.startswith(f"{_HOST}:"):
            quoted[index] = word.replace(_HOST, f'"{host}"')
    # exec: a signal from the scheduler must reach the launcher, and end no shell around it
    return " ".join(["exec", *quoted])


def _slurm(config: RunConfig, world_size: int, arguments: list[str]) -> str:
    machines = config.distributed.num_machines
    each = world_size // machines
    line = shell_command(config, world_size, arguments, "$SLURM_NODEID", "$MAIN")
    return f"""\
#!/bin/bash
#SBATCH --job-name=halftune
#SBATCH --nodes={machines}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --cpus-per-task={_CORES * each}
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@{GRACE}
set -euo pipefail
# activate the environment in which python finds halftune here
export MAIN=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c {shlex.quote(line)}
"""


_VOLUMES = """\
            volumes:
            - name: shared
              persistentVolumeClaim:
                claimName: YOUR_CLAIM
            - name: memory
              emptyDir:
                medium: Memory
"""


def _kubernetes(config: RunConfig, world_size: int, arguments: list[str]) -> str:
    machines = config.distributed.num_machines
    each = world_size // machines
    line = shell_command(config, world_size, arguments, "$JOB_COMPLETION_INDEX", "halftune-machine-0-0.halftune")
    ports = [config.distributed.main_process_port, config.distributed.main_process_port + 1]
    listed = "\n".join(f"                - containerPort: {port}" for port in ports)
    return f"""\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: halftune
spec:
  network:
    enableDNSHostnames: true
    subdomain: halftune
  failurePolicy:
    maxRestarts: {config.distributed.max_restarts}
    rules:
    - name: nothingToTryAgain
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: machine
    replicas: 1
    template:
      spec:
        completionMode: Indexed
        parallelism: {machines}
        completions: {machines}
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob  # what is wrong in the recipe, the data, the model or the image is wrong next time, too
            onExitCodes:
              operator: In
              values: [{", ".join(map(str, FINAL))}]
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {GRACE}
            containers:
            - name: train
              image: YOUR_IMAGE
              command: [bash, -c]
              args: [{json.dumps(line, ensure_ascii=False)}]
              ports:
{listed}
              resources:
                limits:
                  nvidia.com/gpu: {each}
              volumeMounts:
              - name: shared
                mountPath: /workspace
              - name: memory
                mountPath: /dev/shm
              workingDir: /workspace
{_VOLUMES}"""


def _skypilot(config: RunConfig, world_size: int, arguments: list[str]) -> str:
    machines = config.distributed.num_machines
    each = world_size // machines
    line = shell_command(config, world_size, arguments, "$SKYPILOT_NODE_RANK", "$MAIN")
    return f"""\
name: halftune
num_nodes: {machines}
resources:
  accelerators: YOUR_GPU:{each}
workdir: .
setup: pip install -e .  # in workdir; or however halftune is installed
# each machine has its own copy of workdir: training.output_dir must be on a volume that all of them mount
run: |
  MAIN=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
  {line}
"""


TEMPLATES: dict[str, Callable[[RunConfig, int, list[str]], str]] = {
    "slurm": _slurm,
    "kubernetes": _kubernetes,
    "skypilot": _skypilot,
}
