#!/usr/bin/env bash
# Run the test suite:  ./run_tests.sh [pytest arguments]
# Unit tests without the long ones, some three minutes on two cores:  ./run_tests.sh unit [pytest arguments]
# Those of `./run_tests.sh` and the slow ones together, as CI runs them:  ./run_tests.sh ci [pytest arguments]
# PyTorch's CUDA code without a GPU, in an environment of 5 GB:  ./run_tests.sh null_gpu [--record | pytest arguments]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
if [[ ${1:-} == null_gpu ]]; then
    shift
    # shellcheck source=tests/null_gpu/run.sh
    source "$ROOT/tests/null_gpu/run.sh"
fi
find_python dev pytest xdist transformers torchao s3fs moto
cd "$ROOT"
unset PYTHONDONTWRITEBYTECODE # else each of the many processes compiles titanlite, and each worker all tests, again
workers=$(getconf _NPROCESSORS_ONLN) # on two cores, two workers take 4:55 and four 5:50: each imports all of PyTorch
if [[ ${1:-} == ci ]]; then
    workers=$((workers + 2)) # many slow tests wait, for other processes or for a clock
fi
side_by_side=(--numprocesses "$((workers < 5 ? workers : 5))" --dist worksteal)
if [[ ${1:-} == ci ]]; then
    set -- -m "not nightly and not null_gpu and not engines" "${side_by_side[@]}" --durations=10 --durations-min=1 "${@:2}"
elif [[ ${1:-} == unit ]]; then # prints what should be marked long, too
    set -- tests/unit -m "not long and not slow and not nightly" "${side_by_side[@]}" --durations=10 --durations-min=1 "${@:2}"
fi
(($#)) || set -- "${side_by_side[@]}"
exec "$PYTHON" -m pytest "$@"
