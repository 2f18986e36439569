#!/bin/bash
# Train on Slurm, and requeue the job until the run is done. Submit it from the folder of run_train.sh, which all nodes
# must see, as they must the run's folder:
#
#     sbatch --nodes=4 --time=24:00:00 scripts/slurm.sh --config llama3_70b.toml --job.dump_folder=/shared/outputs
#
# Arguments behind the script are those of run_train.sh. In a job array, %a in them is the number of the task, so that
# each task can have a run of its own: sbatch --array=0-3 scripts/slurm.sh --job.name=try-%a --debug.seed=%a
# Options of sbatch stand before the script; the defaults:
#
#SBATCH --job-name=titanlite
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@300
#
# From the environment:
#   TITANLITE_ROOT  folder of run_train.sh (default: where sbatch was called)
#   MAX_REQUEUES    starts again after failures; stops with a checkpoint are not limited (default 20)
# The exit code is that of the run (docs/running.md, "Exit codes"), and 1 for those from 128 on: Slurm's records would
# show these less 128, as other codes.
set -euo pipefail
trap : TERM USR1 USR2 # bash waits for srun, and looks at the code

root=${TITANLITE_ROOT:-${SLURM_SUBMIT_DIR:-}}
if [[ ! -x $root/run_train.sh ]]; then
    echo "error: no run_train.sh in ${root:-the folder of sbatch}: submit from its folder, or set TITANLITE_ROOT" >&2
    exit 2
fi
# shellcheck source=scripts/environment.sh
source "$root/scripts/environment.sh"
find_python start # makes .venv here, once, before all nodes would

# field NAME: print a field of this job, as Slurm has it now. Variables may be those of the shell of sbatch. The last task
# of an array has the number of the array, of which Slurm shows all tasks.
field() {
    scontrol --oneliner show job "$SLURM_JOB_ID" | sed -n "s/^JobId=$SLURM_JOB_ID \(.* \)\?$1=\([^ ]*\).*/\2/p" || true
}
job=$SLURM_JOB_ID task=$(field ArrayTaskId)
if [[ -n $task ]]; then # a requeue of the number would be one of the whole array
    job=$(field ArrayJobId)_$task
    set -- "${@//%a/$task}"
fi

export NNODES=$SLURM_JOB_NUM_NODES
read -r first < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RDZV_ENDPOINT=$first:$((20000 + SLURM_JOB_ID % 10000))
restarts=$(field Restarts)
export SLURM_RESTART_COUNT=${restarts:-${SLURM_RESTART_COUNT:-0}} # the variable may be that of another job
restarts=$SLURM_RESTART_COUNT
echo "job $job, start $((restarts + 1)): $NNODES nodes, rendezvous at $RDZV_ENDPOINT"

# A node that ends first must not end the others: they save, or report their own errors. srun gives the highest code.
code=0
srun --nodes="$NNODES" --ntasks="$NNODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --wait=600 \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "$root/run_train.sh" "$@" || code=$?

# requeue REASON: give the job back to Slurm, unless Slurm has decided already (scancel, preemption, the time limit).
requeue() {
    local state
    state=$(field JobState)
    if [[ -n $state && $state != RUNNING ]]; then
        echo "$1; not requeued: Slurm has ended the job (JobState=$state)"
    elif scontrol requeue "$job"; then
        echo "$1; requeued"
    else
        echo "error: $1, and Slurm does not requeue this job: submit it again, and it resumes" >&2
    fi
}

case $code in
    0) echo "done" ;;
    75) requeue "stopped, see above for what is saved" ;;
    1 | 12[89] | 1[3-9]? | 2??) # a failure, or a process that was killed: the next start may pass
        if ((code == 128 + $(kill -l USR1))); then
            echo "ended by USR1 before the first step was complete: if the signal came before the time limit," \
                "TimeLimit=$(field TimeLimit) is too short (sbatch --time, --signal)" >&2
        fi
        if ((SECONDS < 60)); then
            echo "error: failed with exit code $code in the first minute; not requeued, since it would fail again" >&2
        elif ((restarts >= ${MAX_REQUEUES:-20})); then
            echo "error: failed with exit code $code after $restarts restarts (MAX_REQUEUES); not requeued" >&2
        else
            requeue "failed with exit code $code"
        fi
        ;;
    *) echo "error: ended with exit code $code; not requeued, since it would end so again" >&2 ;;
esac
exit $((code < 128 ? code : 1))
