#!/bin/bash
#SBATCH --job-name=halftune
#SBATCH --nodes={machines}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={each}
#SBATCH --cpus-per-task={cores}
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@{grace}
set -euo pipefail
# activate the environment with halftune here
export MAIN=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 bash -c {quoted}
