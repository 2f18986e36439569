#!/usr/bin/env bash
# Stand-in for run_train.sh with its rules for signals, which trains nothing. Arguments: SECONDS, and an exit code for
# each start of the job. STARTUP: seconds to its first step. SAVE: seconds that it takes to save after a signal.
set -euo pipefail
for name in HUP INT USR1 TERM; do
    # shellcheck disable=SC2064 # the number of this signal, now
    trap "echo $(hostname) $name before a step; exit $((128 + $(kill -l $name)))" $name
done
sleep "${STARTUP:-1}" &
wait $!
exec python3 -u -c '
import os, signal, socket, sys, time

name, got = socket.gethostname(), []

def receive(number, frame):
    print(name, "got", signal.Signals(number).name, flush=True)
    got.append(number)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(number, receive)
count = int(os.environ["SLURM_RESTART_COUNT"])
print(name, "start", count + 1, "task", sys.argv[-1], flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and not got:
    time.sleep(0.1)
if got:
    end = time.monotonic() + float(os.environ.get("SAVE", "3"))
    while time.monotonic() < end:
        time.sleep(0.1)
    print(name, "saved after", *(signal.Signals(number).name for number in got), flush=True)
    sys.exit(75)
codes = [int(code) for code in sys.argv[2:-1]]
sys.exit(codes[min(count, len(codes) - 1)])
' "$@"
