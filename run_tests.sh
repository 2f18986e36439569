#!/usr/bin/env bash
# Run the test suite:  ./run_tests.sh [pytest arguments]
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/scripts/environment.sh"
find_python dev pytest xdist transformers torchao s3fs moto
cd "$ROOT"
(($#)) || set -- --numprocesses auto --maxprocesses 4
exec "$PYTHON" -m pytest "$@"
