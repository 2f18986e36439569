# Stand-in for scripts/environment.sh: nothing is installed.
# shellcheck shell=bash
find_python() { :; }
