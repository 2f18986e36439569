# Sourced by run_train.sh and run_tests.sh: finds the interpreter, and makes .venv where there is none.
# shellcheck shell=bash

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." 2>/dev/null && pwd)

die() { printf 'error: %s\n' "$*" >&2; exit 2; }

# python_with MODULE ...: print an active interpreter that has titanlite installed and each module, if there is one.
python_with() {
    local python
    for python in python3 python; do
        if "$python" -I -c '
import importlib.metadata, importlib.util, sys
importlib.metadata.version("titanlite")
sys.exit(any(importlib.util.find_spec(name) is None for name in sys.argv[1:]))' "$@" 2>/dev/null; then
            command -v "$python"
            return
        fi
    done
    return 1
}

# make_venv FOLDER: make an empty environment with pip, if it is not there. uv, if it is on PATH, is faster, and downloads
# a Python where there is none.
make_venv() {
    local base
    [[ -x $1/bin/python ]] && return
    for base in python3 python3.13 python3.12 python3.11 ""; do
        "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    if command -v uv >/dev/null; then
        echo "setting up $1 with uv (once)" >&2
        uv venv --quiet --seed --allow-existing --python "${base:-3.11}" "$1" && return
    fi
    [[ -n $base ]] || die "titanlite needs Python 3.11 or newer, and none was found"
    echo "setting up $1 with $("$base" --version) (once)" >&2
    "$base" -m venv "$1" || die "cannot create $1 (Debian and Ubuntu: apt install python3-venv)"
}

# install_packages FOLDER ARGUMENT ...: install into an environment, with the versions of constraints.txt, by uv if it is
# on PATH: with the PyTorch for this machine's GPU, or for CPUs. That comes from PyTorch's own index, which a cluster may
# not reach. Where uv fails, pip follows, because an index or a proxy may be set up for pip only.
install_packages() {
    local python=$1/bin/python
    shift
    set -- --constraint "$ROOT/constraints.txt" "$@"
    if command -v uv >/dev/null; then
        if [[ -z ${UV_TORCH_BACKEND:-} ]]; then
            UV_TORCH_BACKEND=auto uv pip install --python "$python" "$@" && return
            echo "uv failed with PyTorch's own index, see above; trying without it" >&2
        fi
        uv pip install --python "$python" "$@" && return
        echo "uv failed, see above; trying pip" >&2
    fi
    # Python compiles what it imports. All 20,000 files of these packages would take a minute and a half.
    "$python" -m pip install --disable-pip-version-check --no-compile "$@" || die "the installation failed; see above"
}

# set_up EXTRA: install titanlite with an extra into .venv, once for each version of the pinned packages. pip or uv shows
# how far it is, on standard error: standard output is that of the command.
set_up() {
    local extra=$1 stamp wanted
    stamp=$ROOT/.venv/.titanlite-$extra
    wanted=$(cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" | cksum)
    for done in "$stamp" "$ROOT/.venv/.titanlite-dev"; do # dev holds everything that start does
        [[ -f $done && $(cat "$done") == "$wanted" ]] && return
    done
    make_venv "$ROOT/.venv"
    {
        echo "installing titanlite[$extra] into $ROOT/.venv, once: PyTorch, with CUDA where its package has it, takes minutes"
        install_packages "$ROOT/.venv" --editable "$ROOT[$extra]"
        # Compile what a run imports. Where PYTHONDONTWRITEBYTECODE is set, which -I ignores, each run would do it again.
        "$ROOT/.venv/bin/python" -I -c 'import torch._dynamo, titanlite.train' || die "importing titanlite failed; see above"
        echo "installed, in $((SECONDS / 60)) min $((SECONDS % 60)) s"
    } >&2
    echo "$wanted" >"$stamp"
}

# find_python EXTRA MODULE ...: set PYTHON to an active interpreter that has all that is needed, else to .venv's.
find_python() {
    local extra=$1
    shift
    if ! PYTHON=$(python_with "$@"); then
        set_up "$extra"
        PYTHON=$ROOT/.venv/bin/python
    fi
}
