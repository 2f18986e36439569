"""The `titanlite` command: its subcommands, and how they end. What a subcommand needs is imported when it runs."""

import os
import sys
import time
from argparse import Namespace
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, NoReturn

from titanlite import __version__
from titanlite.config.shipped import find_config
from titanlite.run.endings import another_has_ended, end_now, leaving_mark, print_errors, report_errors
from titanlite.run.proc import kill_stopped_descendants
from titanlite.run.restarts import RunEnd
from titanlite.runtime.allocator import use_expandable_segments
from titanlite.runtime.errors import ConfigError, Problem, RunError, UserError, whole_number
from titanlite.runtime.output import open_closed_streams, queued_output
from titanlite.runtime.signals import StopRequests, stop_with_launcher
from titanlite.tools.arguments import Parser
from titanlite.tools.checkpoints import arguments as checkpoint
from titanlite.tools.convert import arguments as convert
from titanlite.tools.convert import distill_arguments as distill
from titanlite.tools.convert import evaluate_arguments as evaluate
from titanlite.tools.convert import generate_arguments as generate
from titanlite.tools.ingest import arguments as ingest
from titanlite.tools.migrate import arguments as migrate
from titanlite.tools.plan import arguments as plan
from titanlite.tools.report import arguments as report
from titanlite.tools.report import inspect_arguments as inspect
from titanlite.tools.report import profile_arguments as profile

if TYPE_CHECKING:
    import torch

    from titanlite.checks.preflight import ResolvedConfig
    from titanlite.run.timeouts import PhaseTimeouts
    from titanlite.runtime.process_group import Ranks
    from titanlite.schema import Config

    Checked = tuple[Config, ResolvedConfig, Ranks, torch.device]

TRAIN = """\
A run is its folder, outputs/<name>: the same command again resumes from its newest checkpoint. One process:
titanlite train. Several: torchrun --nproc_per_node N -m titanlite train. ./run_train.sh does either.
"""
TRAIN_OPTIONS = """
Every option of the config can be set here. The value is read as TOML, text needs no quotes, and --section.key alone
means true. N is the number of an entry in a list; the next number makes a new entry.
"""
CHECKS = """\
Prepared data is opened, and one step of the model is traced without memory and without a GPU, as titanlite plan does.
The number of processes is taken from the environment variable WORLD_SIZE; default: 1.

With --here, the config is checked as training does it when it starts: the memory and the disk of this machine must
suffice too, and no step is traced.

With --machines, the processes test what the run needs, in a minute or two: versions, collectives and their bandwidths,
clocks, the checkpoint folder, disk and arithmetic. Exit code 2 if a test fails. ./run_train.sh check does it on all
processes of a job."""
EXIT_CODES = """\
exit codes: 0 done; 1 failed; 2 wrong config or input; 3 stopped by a rule of the config, such as a loss that is not
finite; 75 stopped by a signal or at a planned time: start it again
"""


def make_parser() -> Parser:
    """Return the parser of the whole command."""
    titanlite = Parser(prog="titanlite", description="Pretrain language models from one TOML file.", epilog=EXIT_CODES)
    titanlite.add_argument("--version", action="version", version=__version__)
    parser = titanlite.add_command(
        "train",
        "train, or resume a run",
        _train,
        details=TRAIN.rstrip(),
        example="train llama3_8b --training.steps=500",
    )
    parser.add_config(default="debug")
    parser.further_help = _options_help
    parser = titanlite.add_command(
        "init",
        "write a commented config to start from",
        _init,
        example="init my_run\ninit my_run --from llama3_8b",
    )
    parser.add_argument("name", metavar="NAME", help="name of the run; NAME.toml is written, and must not exist")
    parser.add_argument("--from", dest="origin", metavar="CONFIG", default="debug", help="its settings; default: debug")
    _add_check(titanlite, "check")
    plan.add_commands(titanlite)
    report.add_commands(titanlite)
    inspect.add_commands(titanlite)
    profile.add_commands(titanlite)
    ingest.add_commands(titanlite)
    convert.add_commands(titanlite, checkpoint.add_commands(titanlite))
    generate.add_commands(titanlite)
    evaluate.add_commands(titanlite)
    distill.add_commands(titanlite)
    _add_config_commands(titanlite.add_command("config", "check, show and translate configs"))
    return titanlite


def _add_config_commands(group: Parser) -> None:
    _add_check(group, "config check")
    parser = group.add_command(
        "show",
        "print the resolved config as TOML",
        _show,
        details="The output is a config with every option and its description; it loads to the same config.",
        example="config show llama3_8b --diff",
    )
    parser.add_config(default="debug")
    parser.add_argument("--diff", action="store_true", help="only options that differ from their defaults")
    group.add_command(
        "schema", "print the JSON schema of the config, for editors", _schema, example="config schema > schema.json"
    )
    migrate.add_commands(group)


def _add_check(group: Parser, name: str) -> None:
    parser = group.add_command(
        "check",
        "report every mistake of a config, and start nothing",
        _check,
        details=CHECKS,
        example=f"{name} my.toml --training.steps=500\n{name} my.toml --here\n{name} my.toml --machines",
    )
    parser.add_config(default="debug")
    parser.add_argument("--here", action="store_true", help="the run starts here: judge this machine's memory and disk")
    parser.add_argument("--machines", action="store_true", help="test the machines too, on all processes of the job")


def main() -> NoReturn:
    """Run a subcommand and end the process.

    The process ends without Python's own shutdown: threads of process groups that still run could abort a process whose
    work is done. Everything that must be flushed or closed is, before.
    """
    if sys.getfilesystemencoding() == "ascii":  # LC_ALL=C with PYTHONUTF8=0: paths would be no valid text
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1"})
    open_closed_streams()
    words = sys.argv[1:]
    with queued_output() if words[:1] == ["train"] else nullcontext():
        code = run(words)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    kill_stopped_descendants()
    os._exit(code)


def run(words: list[str]) -> int:
    """Run a subcommand and return its exit code."""
    return report_errors(lambda: _run(words))


def _run(words: list[str]) -> None:
    parser = make_parser()
    if not words:
        parser.print_help()
        return
    options = parser.parse(words)
    if getattr(options, "config", None):
        options.config = str(find_config(options.config))
    options.run(options)


# Subcommands


def _train(options: Namespace) -> None:
    started, began = time.time(), time.monotonic()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_launcher()
    requests, end = StopRequests(), RunEnd()

    def stop_at_once(message: str, code: int) -> NoReturn:
        if message:
            end.write_soon(code, message)
        end_now(message, code)

    with leaving_mark(), requests.listening(stop_at_once, another_has_ended):
        config, resolved, ranks, device = _checked(options, log=True)
        requests.plan(config.training.max_seconds, os.environ, started=started)
        from titanlite.metrics.clock import phase_seconds
        from titanlite.run.timeouts import PhaseTimeouts

        phase = PhaseTimeouts(config.comm, began=began)
        run = Path(config.job.dump_folder, str(config.job.name))
        with end.recorded(
            run, rank=ranks.rank, step=lambda: phase.position.step, phase_seconds=partial(phase_seconds, phase)
        ):
            _run_training(config, resolved, ranks, device, requests, phase)


def _run_training(
    config: "Config",
    resolved: "ResolvedConfig",
    ranks: "Ranks",
    device: "torch.device",
    requests: StopRequests,
    phase: "PhaseTimeouts",
) -> None:
    import torch

    from titanlite.observer import Phase
    from titanlite.run.versions import check_equal_start
    from titanlite.run.watchdog import keep_traces, watching
    from titanlite.runtime.process_group import process_group
    from titanlite.tools.assemble import assemble
    from titanlite.train import finish, train

    logs = Path(config.job.dump_folder, str(config.job.name), "logs")
    keep_traces(os.environ, logs)
    try:
        with process_group(
            ranks,
            device,
            deterministic=config.debug.deterministic,
            timeout_seconds=config.comm.init_timeout_seconds,
            watch=partial(watching, phase, ranks, device=device, logs=logs, end=end_now),
        ):
            check_equal_start(config.model_dump(mode="json"), device)
            run = assemble(config, resolved, ranks=ranks, device=device, phase=phase)
            stopped = train(run, requests)
            finish(run, stopped)
        phase.phase(Phase.EXPORT)
        if not run.checkpoints.finish_exports(export_last=not stopped, give_up=requests.requested):
            stopped = stopped or requests.stopped(run.steps)
    except torch.OutOfMemoryError as error:
        from titanlite.tools.plan.out_of_memory import explain

        error.add_note(str(phase))
        raise RunError(explain(error, config, ranks, device)) from error
    except Exception as error:
        error.add_note(str(phase))
        raise
    if stopped:
        raise stopped


def _check(options: Namespace) -> None:
    runs_here = options.here or options.machines
    config, resolved, ranks, device = _checked(options, judge_memory=runs_here)
    from titanlite.config.checks import find_warnings

    for warning in find_warnings(config, steps=None if config.training.epochs else config.training.steps):
        if ranks.rank == 0:
            print(f"warning: {warning}", file=sys.stderr)
    if options.machines:
        from titanlite.tools.machines import main as test_machines

        test_machines(config, resolved, ranks, device)
    elif not options.here:
        from titanlite.tools.plan.step_check import check_step

        found = [part for part in check_step(config, resolved, ranks, device) if part]
        print(f"{config.job.name} is right: {', '.join(found)}. Memory of this machine is judged with --here")


def _checked(options: Namespace, *, log: bool = False, judge_memory: bool = True) -> "Checked":
    """Read a config and check it, by itself and against this machine, with one report of all mistakes.

    Args:
        judge_memory: whether the run must fit in this machine's memory and on its disk.
        log: training follows. Start the log on the console, and set up the GPU's allocator and the compile cache.

    Raises:
        ConfigError: something is wrong.
    """
    from titanlite.config.load import read

    draft = read(options.config, options.overrides, world_size=whole_number(os.environ, "WORLD_SIZE", 1))
    if "" in draft.bad_keys:
        draft.resolve()  # no file could be read: no need to wait for torch
    if "RANK" not in os.environ:
        print_errors(draft.new_problems())  # at once: importing torch for the other checks takes seconds
    if log:
        use_expandable_segments(os.environ)
    from titanlite.parallelize.compile import use_cache
    from titanlite.runtime.console import start_logging
    from titanlite.runtime.process_group import pick_device, read_ranks
    from titanlite.tools.assemble import resolve

    ranks = read_ranks(os.environ)
    if log:
        start_logging(ranks.rank)
        use_cache(draft.config.compile)
    try:
        device = pick_device(ranks)
    except UserError as error:
        draft.add([Problem("", str(error))])
        raise ConfigError(draft.new_problems()) from None
    return *resolve(draft, ranks, device, judge_memory=judge_memory), ranks, device


def _init(options: Namespace) -> None:
    from titanlite.runtime.console import shell_command
    from titanlite.tools.describe import write_config

    path = write_config(options.name, origin=find_config(options.origin))
    titanlite, name = shell_command("titanlite"), quote(str(path))
    print(f"wrote {path}, with the settings of {options.origin}")
    print(f"next: edit it, then run  {titanlite} check {name}  and  {titanlite} train {name}")


def _show(options: Namespace) -> None:
    from titanlite.config.load import load
    from titanlite.tools.describe import show

    print(show(load(options.config, options.overrides), only_changes=options.diff), end="")


def _schema(options: Namespace) -> None:
    from titanlite.tools.describe import json_schema_text

    print(json_schema_text(), end="")


def _options_help() -> str:
    from titanlite.tools.describe import options_help

    return TRAIN_OPTIONS + options_help()
