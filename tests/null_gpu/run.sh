# Sourced by run_tests.sh: runs tests/null_gpu in an environment of its own, with the CUDA build of PyTorch.
# shellcheck shell=bash

VENV=$ROOT/.venv-null-gpu
STAMP=$VENV/.titanlite
TORCH=$(sed -n 's/^torch==//p' "$ROOT/constraints.txt")
WANTED=$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)

command -v gcc >/dev/null || die "the stand-in for a GPU is built by gcc, which was not found"
if [[ ! -f $STAMP || $(cat "$STAMP") != "$WANTED" ]]; then
    echo "installing the CUDA build of PyTorch $TORCH into $VENV: about 5 GB, once" >&2
    make_venv "$VENV"
    # Two = signs would accept a CPU build too, such as 2.13.0+cpu.
    install_packages "$VENV" --quiet "torch===$TORCH" torchao pytest pytest-xdist --editable "$ROOT"
    echo "$WANTED" >"$STAMP"
fi
cd "$ROOT"
if [[ ${1:-} == --record ]]; then
    shift
    exec "$VENV/bin/python" tests/null_gpu/record.py "$@"
fi
(($#)) || set -- --numprocesses 2
exec "$VENV/bin/python" -m pytest -o testpaths=tests/null_gpu -m null_gpu "$@"
