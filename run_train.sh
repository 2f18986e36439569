#!/usr/bin/env bash
# Train:  ./run_train.sh [--config NAME.toml] [--section.key=value ...]
#
# Test the machines of a job:  ./run_train.sh check [--config NAME.toml] [--section.key=value ...]
#
# Without arguments it trains debug.toml: a small Llama, on any machine. A name without a folder is that of a file here,
# or of a shipped config (train_configs/). All arguments are those of `titanlite train`. From the environment:
#   NPROC          processes on this machine (default: one for each GPU, else 1)
#   MAX_RESTARTS   restarts after a crash, by torchrun (default 0)
#   NNODES         machines (default 1), or their least and largest number (1:4); then also
#   RDZV_ENDPOINT  host:port of the first machine, the same on all
#   LOCAL_ADDR     IPv4 address of this machine, where the machines do not know each other by name
#   RDZV_CONF      further settings of torchrun's rendezvous (join_timeout=60,last_call_timeout=5)
# Exit codes: 0 done; 1 failed; 2 wrong config or input; 3 stopped by a rule of the config, such as a loss that is not
# finite; 75 stopped with a checkpoint, by a signal (TERM, INT, USR1, USR2, HUP) or at a planned time: start it again;
# 128 + N ended by signal N before a step was complete.
set -euo pipefail
for name in HUP INT USR1 USR2 TERM; do # until Python takes over: nothing is lost
    # shellcheck disable=SC2064 # the number of this signal, now
    trap "exit $((128 + $(kill -l $name)))" $name
done
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
    exit 0
fi

find_python start

count_gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true
    else
        { nvidia-smi --list-gpus 2>/dev/null || true; } | grep -c . || true
    fi
}
gpus=$(count_gpus)
nproc_here=${NPROC:-$((gpus > 0 ? gpus : 1))}
nnodes=${NNODES:-1}
[[ $nproc_here =~ ^[1-9][0-9]{0,8}$ ]] || die "NPROC: expected a number of processes, got $nproc_here"
restarts=${MAX_RESTARTS:-0}
[[ $restarts =~ ^[0-9]{1,9}$ ]] || die "MAX_RESTARTS: expected a number of restarts, got $restarts"
restarts=$((10#$restarts)) # 08 is no octal number
[[ $nnodes =~ ^[1-9][0-9]{0,8}(:[1-9][0-9]{0,8})?$ ]] || die "NNODES: expected a number of machines or a range (1:4), got $nnodes"
((${nnodes%:*} <= ${nnodes#*:})) || die "NNODES: expected a range from few to many, got $nnodes"

tasks=${OMPI_COMM_WORLD_SIZE:-${SLURM_STEP_NUM_TASKS:-1}}
if [[ -z ${NNODES:-} ]] && ((tasks > 1 && (nproc_here > 1 || restarts > 0))); then
    die "srun or mpirun has started $tasks of these scripts, and each would be a run of $nproc_here processes: use" \
        "scripts/slurm.sh, set NNODES and RDZV_ENDPOINT, or start one task for each GPU: srun --ntasks=8 titanlite train"
fi

if ((nproc_here * ${nnodes#*:} == 1)) && [[ ${1:-} == check ]]; then
    exec "$PYTHON" -m titanlite check --machines "${@:2}"
fi
if ((nproc_here * ${nnodes#*:} == 1 && restarts == 0)); then
    exec "$PYTHON" -m titanlite train "$@"
fi
if ((${nnodes#*:} > 1)) && [[ -z ${RDZV_ENDPOINT:-} ]]; then
    die "with NNODES > 1, set RDZV_ENDPOINT to host:port of the first machine, the same on all"
fi

# torchrun, and the exit code of the first process that fails. A signal to this process goes to all of them.
exec "$PYTHON" -u -m titanlite.tools.launch "$nnodes" "$nproc_here" "${RDZV_ENDPOINT:-localhost:0}" "$restarts" "$@"
