"""A run that must survive: 2,000 steps of a small model, with a random fault about every 30 steps.

    python benchmarks/soak.py --out FOLDER [--steps 2000] [--every 30] [--seed 1] [--minutes 60]
    python benchmarks/soak.py --report FOLDER        # docs/cluster.md and its picture, from that folder

After each fault the same command is started again, as a scheduler would, unless the run continues by itself. At the end
the losses and the samples of every step are compared with those of runs without faults:

- one of 2 ranks that nothing interrupts: the same samples in every step; the same losses within rounding, since the
  rank count changes on the way;
- one with the same rank counts at the same steps, ended as planned between them: the same bits.

Exit codes: 0 nothing differs and every fault was survived, 1 something differs, 2 the soak itself cannot run.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

if missing := [name for name in ("pytest", "matplotlib") if not find_spec(name)]:  # tests/support, and the picture
    print(f"error: the soak needs {', '.join(missing)}: pip install -e '.[dev]' has them", file=sys.stderr)
    sys.exit(2)

from soak_faults import KINDS, has_room_to_fill, schedule
from soak_hosts import open_hosts
from soak_job import Ended
from soak_report import report
from soak_runs import MICRO_BATCH, SEQUENCES, VALIDATION_INTERVALS, Soak, finish, run

HOOKS = Path(__file__).with_name("soak_hooks.py")
CONFIG = """
[model.args]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
hidden_dim = 64
vocab_size = 259
[data]
path = "{out}/text/train"
tokenizer = "bytes"
cache_folder = "{out}/data_cache"
[training]
steps = {steps}
seq_len = 64
global_batch_size = {sequences}
local_batch_size = {micro_batch}
mixed_precision_param = "float32"
loss = "{hooks}:loss"
[optimizer]
lr = 2e-3
[lr_scheduler]
warmup_steps = 20
decay_ratio = 0.0
[validation]
enable = true
path = "{out}/text/validation"
freq = {validation}
sequences = 64
[metrics]
log_freq = 1
loggers = ["{hooks}:Watch"]
[checkpoint]
interval = {interval}
keep_latest_k = 3
[comm]
init_timeout_seconds = {init_timeout}
train_timeout_seconds = {timeout}
save_timeout_seconds = 60
"""
"""The learning rate is constant after the warm-up, so that a run can end anywhere and resume with more steps."""
NAMESPACE = "TITANLITE_SOAK_NAMESPACE"
SMALL_DISK = "48m"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    place = parser.add_mutually_exclusive_group(required=True)
    place.add_argument("--out", type=Path, metavar="FOLDER", help="soak, and write everything in this new folder")
    place.add_argument("--report", type=Path, metavar="FOLDER", help="write docs/cluster.md's table and picture")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=30, help="steps between faults, about")
    parser.add_argument("--seed", type=int, default=1, help="of the list of faults")
    parser.add_argument("--minutes", type=float, default=60, help="no further fault after this time")
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--timeout", type=int, default=10, help="comm.train_timeout_seconds")
    parser.add_argument("--kinds", default="all", help=f"kinds of faults, with commas: {', '.join(KINDS)}")
    options = parser.parse_args()
    if options.report:
        return report(options.report)
    unknown = [name for name in options.kinds.split(",") if name not in ("all", *KINDS)]
    if unknown or (options.out.exists() and any(options.out.iterdir())):
        problem = f"no such kinds: {', '.join(unknown)}" if unknown else f"{options.out} is not empty"
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if not os.environ.get(NAMESPACE):
        return in_a_namespace()
    signal.signal(signal.SIGTERM, interrupt)
    return soak(options)


def interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def in_a_namespace() -> int:
    """Run this command in mounts of its own, so that small disks can be mounted and vanish with it, where permitted."""
    wrap = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    test = "mkdir -p /tmp && mount -t tmpfs -o size=1m soak /tmp"
    permitted = (
        shutil.which("unshare")
        and not subprocess.run([*wrap, "sh", "-c", test], capture_output=True, check=False).returncode
    )
    command = [*(wrap if permitted else []), sys.executable, *sys.argv]
    os.execvpe(command[0], command, os.environ | {NAMESPACE: "small disks" if permitted else "none"})


def soak(options: argparse.Namespace) -> int:
    out = options.out.resolve()
    for folder in ("records", "checkpoints", "hooks", "console"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    disks = os.environ[NAMESPACE] == "small disks"
    for folder in ("records", "checkpoints") if disks else ():
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK}", "soak", out / folder], check=True)
        assert has_room_to_fill(out / folder)
    write_text(out / "text")
    names = list(KINDS) if options.kinds == "all" else options.kinds.split(",")
    skipped: dict[str, str] = (
        {} if disks else dict.fromkeys(("disk-checkpoints", "disk-records"), "mounts are not permitted here")
    )
    on_hosts = [name for name in names if KINDS[name].hosts > 1]
    hosts, reason = open_hosts(on_hosts)
    skipped |= {} if hosts else dict.fromkeys(on_hosts, reason)
    kinds = [name for name in names if name not in skipped]
    margin = (VALIDATION_INTERVALS + 1) * options.interval
    faults = schedule(options.seed, steps=options.steps, every=options.every, kinds=kinds, margin=margin)
    state = Soak(out, options, faults, hosts)
    write_config(state)
    state.write("soak", options={name: str(value) for name, value in vars(options).items()}, faults=len(faults))
    for name in [name for name in names if name in skipped]:
        print(f"skipped  {KINDS[name].title}: {skipped[name]}", flush=True)
        state.write("skipped", kind=name, title=KINDS[name].title, reason=skipped[name])
    try:
        run(state)
    except Ended as ended:
        state.problem(str(ended))
    finally:
        if state.job:
            state.job.kill()
        if hosts:
            hosts.close()
    return finish(state)


def write_text(folder: Path) -> None:
    """Write what to learn: modules of Python's standard library, which every machine has."""
    for number, module in enumerate(sorted(Path(os.__file__).parent.glob("*.py"))[:60]):
        path = folder / ("validation" if number % 10 == 9 else "train") / f"{module.stem}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module.read_text(errors="replace"))


def write_config(state: Soak) -> None:
    options = state.options
    text = CONFIG.format(
        out=state.out,
        hooks=HOOKS,
        steps=options.steps,
        sequences=SEQUENCES,
        micro_batch=MICRO_BATCH,
        validation=VALIDATION_INTERVALS * options.interval,
        interval=options.interval,
        timeout=options.timeout,
        init_timeout=max(60, 2 * options.timeout),  # faults come in the first steps of a start, too
    )
    (state.out / "soak.toml").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
