"""The `titanlite` command: its subcommands, and how they end. What a subcommand needs is imported when it runs."""

import os
import sys
import time
from collections.abc import Sequence
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
from titanlite.run.slurm import use_own_job
from titanlite.runtime.allocator import importing, use_expandable_segments
from titanlite.runtime.errors import ConfigError, Problem, RunError, UserError, whole_number
from titanlite.runtime.files import check_open_files, leave_deleted_folder
from titanlite.runtime.launchers import use_ranks_of_launcher
from titanlite.runtime.output import open_closed_streams, queued_output
from titanlite.runtime.signals import StopRequests, remove_sockets, stop_with_launcher
from titanlite.tools.arguments import Parser

if TYPE_CHECKING:
    import torch

    from titanlite.checks.preflight import RunInputs
    from titanlite.run.timeouts import PhaseTimeouts
    from titanlite.runtime.process_group import Ranks
    from titanlite.schema import Config

    Checked = tuple[Config, RunInputs, Ranks, torch.device]

TRAIN_OPTIONS = """
Every option of the config can be set here. The value is read as TOML, text needs no quotes, and --section.key alone
means true. N is the number of an entry in a list; the next number makes a new entry.
"""
EXIT_CODES = """\
exit codes: 0 done; 1 failed; 2 wrong config or input; 3 stopped by a rule of the config, such as a loss that is not
finite; 75 stopped by a signal or at a planned time: start it again
"""


COMMANDS = {
    "train": "cli.train",
    "init": "cli.init",
    "check": "cli.check",
    "plan": "plan.command.plan_config",
    "calibrate": "plan.calibrate.calibrate",
    "report": "report.page.report",
    "parity": "report.parity.parity",
    "inspect": "report.parameters.inspect",
    "data prepare": "ingest.prepare.prepare_folder",
    "data inspect": "ingest.inspect.inspect",
    "data export": "ingest.export_tokens.export",
    "data tokenizer": "ingest.bpe.train_tokenizer",
    "checkpoint list": "checkpoints.command.list_checkpoints",
    "checkpoint verify": "checkpoints.command.verify",
    "checkpoint show": "checkpoints.command.show",
    "checkpoint hash": "checkpoints.command.hash_checkpoint",
    "checkpoint prune": "checkpoints.command.prune",
    "checkpoint export": "convert.export.export",
    "checkpoint import": "convert.import_weights.import_weights",
    "checkpoint merge": "convert.merge.merge",
    "generate": "convert.generate.generate",
    "evaluate": "convert.evaluate.evaluate",
    "config check": "cli.check",
    "config show": "cli.show",
    "config schema": "cli.schema",
    "config migrate": "migrate.command.migrate_config",
}
"""{command: the function below titanlite.tools whose signature and docstring are its options and its --help}"""
GROUPS = {
    "data": "prepare text, inspect and export token shards, train tokenizers",
    "checkpoint": "list, verify, show, export, merge and delete checkpoints",
    "config": "check, show and translate configs",
}


def make_parser() -> Parser:
    """Return the parser of the whole command."""
    titanlite = Parser(prog="titanlite", description="Pretrain language models from one TOML file.", epilog=EXIT_CODES)
    titanlite.add_argument("--version", action="version", version=__version__)
    for command, function in COMMANDS.items():
        group, _, name = command.rpartition(" ")
        if group and group not in titanlite.commands:
            titanlite.add_group(group, GROUPS[group])
        parent = titanlite.commands[group] if group else titanlite
        parent.add_command(name, *function.rsplit(".", 1))
    titanlite.commands["train"].further_help = _options_help
    return titanlite


def main() -> NoReturn:
    """Run a subcommand and end the process.

    The process ends without Python's own shutdown: threads of process groups that still run could abort a process whose
    work is done. Everything that must be flushed or closed is, before.
    """
    if sys.getfilesystemencoding() == "ascii":  # LC_ALL=C with PYTHONUTF8=0: paths would be no valid text
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1"})
    open_closed_streams()
    leave_deleted_folder()
    words = sys.argv[1:]
    with queued_output() if words[:1] == ["train"] else nullcontext():
        code = run(words)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    kill_stopped_descendants()
    remove_sockets()
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
    check_open_files()
    if getattr(options, "config", None):
        options.config = str(find_config(options.config))
    options.run(options)


# Subcommands


def train(*, config: str = "debug", overrides: Sequence[str]) -> None:
    """Train, or resume a run.

    A run is its folder, outputs/<name>: the same command again resumes from its newest checkpoint. One process:
    titanlite train. Several: torchrun --nproc_per_node N -m titanlite train. ./run_train.sh does either. srun and
    mpirun can start the processes, too: srun --ntasks 8 titanlite train.

    Example:
        llama3_8b --training.steps=500
    """
    began = time.monotonic()
    since_1970 = time.time() - began
    use_ranks_of_launcher(os.environ)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        stop_with_launcher()
    requests, end = StopRequests(), RunEnd()

    def stop_at_once(message: str, code: int) -> NoReturn:
        if message:
            end.write_soon(code, message)
        end_now(message, code)

    with leaving_mark(), requests.listening(stop_at_once, another_has_ended):
        loaded, inputs, ranks, device = _checked(config, overrides, log=True)
        _plan_end(requests, loaded, ranks, started=began, since_1970=since_1970)
        from titanlite.metrics.clock import phase_seconds
        from titanlite.run.timeouts import PhaseTimeouts

        phase = PhaseTimeouts(loaded.comm, began=began)
        run = Path(loaded.job.dump_folder, str(loaded.job.name))
        with end.recorded(
            run, rank=ranks.rank, step=lambda: phase.position.step, phase_seconds=partial(phase_seconds, phase)
        ):
            _run_training(loaded, inputs, ranks, device, requests, phase)


def _plan_end(requests: StopRequests, config: "Config", ranks: "Ranks", *, started: float, since_1970: float) -> None:
    """Plan the end of this start, and log it. The first rank alone asks Slurm, and stops all others."""
    import logging

    logger, environ = logging.getLogger(__name__), os.environ if ranks.rank == 0 else {}
    if ranks.rank == 0 and (ignored := use_own_job(os.environ, now=started + since_1970)):
        logger.warning(ignored)
    requests.plan(config.training.max_seconds, environ, started=started, since_1970=since_1970)
    if requests.planned and ranks.rank == 0:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(requests.end + since_1970))
        logger.info(f"planned  a stop at {at}, for {requests.planned}")


def _run_training(
    config: "Config",
    inputs: "RunInputs",
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
    from titanlite.tools.checkpoints.last_export import export_last
    from titanlite.train import finish, train

    logs = Path(config.job.dump_folder, str(config.job.name), "logs")
    keep_traces(os.environ, logs)
    try:
        with process_group(
            ranks,
            device,
            deterministic=config.debug.is_deterministic,
            timeout_seconds=config.comm.init_timeout_seconds,
            watch=partial(watching, phase, ranks, device=device, logs=logs, end=end_now),
        ):
            check_equal_start(config.model_dump(mode="json"), device)
            run = assemble(config, inputs, ranks=ranks, device=device, phase=phase)
            stopped = train(run, requests)
            finish(run, stopped)
            if not stopped and ranks.rank == 0:
                from titanlite.tools.results import show_results

                show_results(run)
        phase.enter(Phase.EXPORT)
        if not stopped and not export_last(run, give_up=requests.requested):
            stopped = requests.stopped(run.position.steps)
    except torch.OutOfMemoryError as error:
        from titanlite.tools.plan.out_of_memory import explain

        error.add_note(str(phase))
        raise RunError(explain(error, config, ranks, device)) from error
    except Exception as error:
        error.add_note(str(phase))
        raise
    if stopped:
        raise stopped


def check(*, config: str = "debug", overrides: Sequence[str], here: bool = False, machines: bool = False) -> None:
    """Report every mistake of a config, and start nothing.

    Prepared data is opened, and one step of the model is traced without memory and without a GPU, as titanlite plan
    does. The number of processes is taken from the environment variable WORLD_SIZE; default: 1.

    With --here, the config is checked as training does it when it starts: the memory and the disk of this machine must
    suffice too, and no step is traced.

    With --machines, the processes test what the run needs, in a minute or two: versions, collectives and their
    bandwidths, and the checkpoint folder. Exit code 2 if a test fails. ./run_train.sh check
    does it on all processes of a job.

    Args:
        here: the run starts here: judge this machine's memory and disk
        machines: test the machines too, on all processes of the job

    Example:
        my.toml --training.steps=500
        my.toml --here
        my.toml --machines
    """
    if machines:
        use_ranks_of_launcher(os.environ)
    loaded, inputs, ranks, device = _checked(config, overrides, judge_memory=here or machines)
    from titanlite.config.warnings import find_warnings
    from titanlite.schedule import known_steps

    for warning in find_warnings(loaded, steps=known_steps(loaded.training)):
        if ranks.rank == 0:
            print(f"warning: {warning}", file=sys.stderr)
    if machines:
        from titanlite.tools.machines import main as test_machines

        test_machines(loaded, ranks, device)
    elif not here:
        from titanlite.tools.plan.step_check import check_step

        found = [part for part in check_step(loaded, inputs, ranks, device) if part]
        print(f"{loaded.job.name} is right: {', '.join(found)}. Memory of this machine is judged with --here")


def _checked(config: str, overrides: Sequence[str], *, log: bool = False, judge_memory: bool = True) -> "Checked":
    """Read a config and check it, by itself and against this machine, with one report of all mistakes.

    Args:
        judge_memory: whether the run must fit in this machine's memory and on its disk.
        log: training follows. Start the log on the console, and set up the GPU's allocator and the compile cache.

    Raises:
        ConfigError: something is wrong.
    """
    from titanlite.config.load import read

    draft = read(config, overrides, world_size=whole_number(os.environ, "WORLD_SIZE", 1))
    if "" in draft.bad_keys:
        draft.resolve()  # no file could be read: no need to wait for torch
    if "RANK" not in os.environ:
        print_errors(draft.new_problems())  # at once: importing torch for the other checks takes seconds
    if log:
        use_expandable_segments(os.environ)
    with importing():
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


def init(name: str, *, from_: str = "debug") -> None:
    """Write a commented config to start from.

    Args:
        name: name of the run; NAME.toml is written, and must not exist
        from_ (CONFIG): its settings

    Example:
        my_run
        my_run --from llama3_8b
    """
    from titanlite.runtime.console import shell_command
    from titanlite.tools.describe import write_config

    path = write_config(name, origin=find_config(from_))
    titanlite, file = shell_command("titanlite"), quote(str(path))
    print(f"wrote {path}, with the settings of {from_}")
    print(f"next: edit it, then run  {titanlite} check {file}  and  {titanlite} train {file}")


def show(*, config: str = "debug", overrides: Sequence[str], diff: bool = False) -> None:
    """Print the resolved config as TOML.

    The output is a config with every option and its description; it loads to the same config.

    Args:
        diff: only options that differ from their defaults

    Example:
        llama3_8b --diff
    """
    from titanlite.config.load import load
    from titanlite.tools.describe import show

    print(show(load(config, overrides), only_changes=diff), end="")


def schema() -> None:
    """Print the JSON schema of the config, for editors.

    Example:
        > schema.json
    """
    from titanlite.tools.describe import json_schema_text

    print(json_schema_text(), end="")


def _options_help() -> str:
    from titanlite.tools.describe import options_help

    return TRAIN_OPTIONS + options_help()
