#!/usr/bin/env bash
# Run every benchmark that this machine can run, one after the other:  benchmarks/run_all.sh [OUT.jsonl]
#
# Measurements are appended to OUT.jsonl (default: measurements-DATE.jsonl in this folder), for table.py.
# From the environment:
#   QUICK=1  least repeats, to see that everything runs; the measurements mean little
#   DRY=1    print what would run, and run nothing
# A benchmark that fails does not stop the others. Exit codes: 0 all ran, 1 some failed, 2 wrong call.
set -uo pipefail
# shellcheck source=../scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/environment.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "${BASH_SOURCE[0]}"
    exit 0
fi
(($# > 1)) && die "expected one file for the measurements, got $# arguments: $*"
OUT=${1:-measurements-$(date -u +%Y-%m-%d-%H%M%S).jsonl}
[[ $OUT == -* ]] && die "unknown option $OUT; see --help"
[[ $OUT == /* ]] || OUT=$PWD/$OUT
[[ -d $(dirname "$OUT") && ! -d $OUT ]] || die "cannot write measurements to $OUT"
quick=${QUICK:-} dry=${DRY:-}
[[ $quick == 0 ]] && quick=
[[ $dry == 0 ]] && dry=
if [[ -z $dry ]]; then
    find_python dev pytest datasets
else # nothing is installed
    PYTHON=$(python_with pytest datasets) || PYTHON=$ROOT/.venv/bin/python
fi
cd "$ROOT" || exit 2
PATH=$(dirname "$PYTHON"):$PATH
export PATH
failed=()

# bench SCRIPT ARGUMENT ...: run one with --record, if it is there and can record
bench() {
    local script=benchmarks/$1 record=(--record "$OUT")
    shift
    if [[ ! -f $script ]]; then
        echo "--- skipped, not there yet: $script"
        return
    fi
    if ! grep -q add_record_option "$script"; then
        echo "--- records nothing yet: $script"
        record=()
    fi
    echo "--- python $script${*:+ $*}"
    [[ -n $dry ]] && return
    if ! "$PYTHON" "$script" "$@" ${record[@]+"${record[@]}"}; then
        failed+=("$script${*:+ $*}")
        echo "--- FAILED: $script${*:+ $*}"
    fi
}

full() { [[ -n $quick ]] || bench "$@"; }
fast() { [[ -z $quick ]] || bench "$@"; }

full bench_step.py --runs 7
full bench_step.py --runs 5 --processes 2
full bench_step.py --runs 5 --processes 2 --parallelism.data_parallel_replicate_degree=2
full bench_step.py --runs 5 --dtype bfloat16 --turn 1 --turns 2
full bench_step.py --runs 5 --dtype bfloat16 --turn 1 --turns 2 --compile.enable=true
full bench_reproducible.py --runs 5
full bench_reproducible.py --runs 3 --processes 2
fast bench_step.py --runs 1
fast bench_step.py --runs 1 --processes 2
full bench_checkpoint.py --saves 8
full bench_checkpoint.py --saves 8 --processes 2
full bench_checkpoint.py --size 1GB --saves 3
full bench_checkpoint.py --size 1GB --processes 2 --saves 2
full bench_checkpoint.py --memory
fast bench_checkpoint.py --saves 1
fast bench_checkpoint.py --saves 1 --processes 2
full bench_data.py prepare --runs 5
fast bench_data.py prepare --runs 1 --mib 4
full bench_data.py wait
fast bench_data.py wait --training.steps=3 --lr_scheduler.warmup_steps=0
full bench_loss.py --runs 7
fast bench_loss.py --runs 1 --tokens 256
full generation.py --runs 9
fast generation.py --runs 1 --dim 256 --layers 2 --vocab-size 2048 --new-tokens 16
full bench_rounding.py
fast bench_rounding.py --steps 3
bench bench_rounding.py --time
full bench_distill.py
fast bench_distill.py --seeds 1 --steps 4 --teacher-steps 4
full bench_startup.py
fast bench_startup.py --runs 1
full bench_ranks.py
fast bench_ranks.py --runs 1 --ranks 2
full plan_accuracy.py cpu
fast plan_accuracy.py cpu --only "FSDP, 2, recompute op"
full plan_accuracy.py published
fast plan_accuracy.py published --only "64 x A100"
full exit_storm.py --runs 50
fast exit_storm.py --runs 1
full crash_storm.py --kills 50
full bench_offload.py
fast bench_offload.py --steps 2 --dim 128 --layers 2
full bench_optimizer_memory.py
fast bench_optimizer_memory.py --steps 1
full memory_ladder.py
fast memory_ladder.py --runs 1 --only "AC full"
full plan_accuracy.py gpu
fast plan_accuracy.py gpu --only "8B, 6 layers, 1 x 8192: eager"

if [[ -n $dry ]]; then
    exit 0
fi
echo "measurements: $OUT"
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
