#!/usr/bin/env bash
# Train:  ./run_train.sh [--config NAME.toml] [--section.key=value ...]
#
# Without arguments it trains debug.toml: a small Llama, on any machine. A name without a folder is that of a file here,
# or of a shipped config (train_configs/). All arguments are those of `titanlite train`. From the environment:
#   NPROC          processes on this machine (default: one for each GPU, else 1)
#   NNODES         machines (default 1); then also
#   RDZV_ENDPOINT  host:port of the first machine, the same on all
# Exit codes: 0 done, 1 failed, 2 wrong config or input, 3 stopped by a rule of the config (a loss that is not finite).
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
    exit 0
fi

find_python ""

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
[[ $nproc_here =~ ^[1-9][0-9]*$ ]] || die "NPROC: expected a number of processes, got $nproc_here"
[[ $nnodes =~ ^[1-9][0-9]*$ ]] || die "NNODES: expected a number of machines, got $nnodes"

if ((nproc_here * nnodes == 1)); then
    exec "$PYTHON" -m titanlite train "$@"
fi
if ((nnodes > 1)) && [[ -z ${RDZV_ENDPOINT:-} ]]; then
    die "with NNODES > 1, set RDZV_ENDPOINT to host:port of the first machine, the same on all"
fi

# Mistakes are reported once and at once, not by every process.
WORLD_SIZE=$((nproc_here * nnodes)) LOCAL_WORLD_SIZE=$nproc_here \
    "$PYTHON" -m titanlite check "$@"

if [[ -z ${OMP_NUM_THREADS:-} ]]; then
    cores=$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    export OMP_NUM_THREADS=$((cores > nproc_here ? cores / nproc_here : 1))
fi

# torchrun turns every exit code of its workers into 1; the first worker that fails leaves its own in this file.
exit_codes=$(mktemp -d)
trap 'rm -rf "$exit_codes"' EXIT
export TITANLITE_EXIT_FILE=$exit_codes/code

"$PYTHON" -m torch.distributed.run --nnodes "$nnodes" --nproc_per_node "$nproc_here" \
    --rdzv_backend c10d --rdzv_endpoint "${RDZV_ENDPOINT:-localhost:0}" \
    -m titanlite train "$@" &
torchrun=$!
trap 'kill -TERM "$torchrun" 2>/dev/null || true' TERM INT
code=0
while :; do
    wait "$torchrun" && code=0 || code=$?
    kill -0 "$torchrun" 2>/dev/null || break # else a signal ended the wait, not torchrun
done
if ((code)) && [[ -s $TITANLITE_EXIT_FILE ]]; then
    code=$(cat "$TITANLITE_EXIT_FILE")
fi
exit "$code"
