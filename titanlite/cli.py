"""The `titanlite` command. Subcommands import what they need when they run, so that --help answers at once."""

import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from titanlite import __version__
from titanlite.runtime.errors import ConfigError, Problem, RunError, UserError, whole_number
from titanlite.runtime.nearest import nearest_name

if TYPE_CHECKING:
    import torch

    from titanlite.config.schema import Config
    from titanlite.preflight import ResolvedConfig
    from titanlite.runtime.process_group import Ranks

    Examined = tuple[Config, ResolvedConfig, Ranks, torch.device]

USAGE = """\
titanlite: pretrain language models from one TOML file

  titanlite train --config FILE.toml [--section.key=value ...]    train, or go on with a run
  titanlite config check --config FILE.toml [...]                 report everything wrong with a config, start nothing
  titanlite config show --config FILE.toml [--diff] [...]         print the resolved config, or what is no default in it
  titanlite config schema                                         JSON schema of the config, for editors
  titanlite config migrate OLD.toml [--out NEW.toml] [--world-size N] [--from 0.1|0.2]
                                                                  a config of torchtitan -> one of titanlite
  titanlite parity --config FILE.toml [--steps N] [--processes N] [--tolerance X] [--only NAME] [...]
                                                                  the same losses in every layout? trains and compares
  titanlite plan --config FILE.toml --world-size N --gpu NAME|--gpu-file GPU.toml [--gpus-per-node 8] [--json] [...]
      [--search [--global-batch-size B] [--apply OUT.toml]]       will it fit, how fast is it, which layout is best?
  titanlite checkpoint list [PATH]                                checkpoints with age, size and state
  titanlite checkpoint verify PATH                                read every byte, and compare checksums
  titanlite checkpoint show PATH [--tensors]                      what a checkpoint says of itself
  titanlite checkpoint prune PATH --keep-latest-k K [--keep-every N] [--set-aside] [--dry-run]
                                                                  delete older ones than the newest K
  titanlite data prepare INPUT... --out DIR --tokenizer T         text -> tokens; again after a kill: goes on
      [--text-field F] [--on-error stop|skip] [--no-bos] [--no-eos] [--workers N] [--shard-tokens N]
  titanlite data inspect DIR [--sample N] [--seed N] [--quick] [--tokenizer T]
                                                                  figures of tokens, samples of them, checksums
  titanlite data tokenizer INPUT... --out DIR --vocab-size N [--text-field F]
                                                                  train a byte-level BPE

One process: python -m titanlite train --config FILE.toml. Many: torchrun --nproc_per_node N -m titanlite train ...
./run_train.sh does either, and finds FILE.toml in train_configs/. A run is its folder, outputs/<name>: the same command
again goes on from its newest checkpoint. Every option can be set from the command line, the value read as TOML:
--training.steps=500 --compile.enable=true. `titanlite train --help` lists them all, docs/config.md explains them.

PATH is the folder of a run, of its checkpoints (or their URL: s3://...), of several runs, or one checkpoint; list looks
in outputs by default. Of several, show takes the newest whole one. prune leaves steps that N divides, and deletes what
was set aside as damaged or superseded only if told to. Runs may go on meanwhile.

INPUT is a file of text or JSON lines (also .gz or .zst), a .parquet file, a folder or glob of such files, a dataset
that Hugging Face's save_to_disk wrote, hf://NAME[:CONFIG][:SPLIT], or stdlib:// (stdlib://train, stdlib://validation).
DIR is then a data.path. T is bytes, the name of a tokenizer that titanlite ships, or a path, as data.tokenizer.

Exit codes: 0 done, 1 failed, 2 wrong config or input, 3 stopped by a rule of the config (a loss that is not finite).
"""

TRAIN_USAGE = """\
titanlite train --config FILE.toml [--section.key=value ...]

Trains, or goes on with a run. Every option of FILE.toml can be set here too: the value is read as TOML, text needs no
quotes, --section.key alone means true. N is the number of an entry in a list; the next number makes a new one.
"""

NAMES = (
    "train, config check, config show, config schema, config migrate, parity, plan, checkpoint list, "
    "checkpoint verify, checkpoint show, checkpoint prune, data prepare, data inspect, data tokenizer"
)


def main() -> NoReturn:
    """Run a subcommand and end the process.

    Ends without Python's own shutdown: threads of process groups that are still around then can abort a process whose
    work is done. Everything that must be flushed or closed is, before.
    """
    code = run(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)


def run(arguments: list[str]) -> int:
    """Run a subcommand; returns its exit code."""
    wants_help = "-h" in arguments or "--help" in arguments
    match arguments:
        case ["train", *_] if wants_help:
            from titanlite.config.describe import options_help

            print(TRAIN_USAGE + options_help(), end="")
            return 0
        case ["-h" | "--help" | "config" | "checkpoint" | "data" | "parity" | "plan", *_] if wants_help:
            print(USAGE, end="")
            return 0
        case []:
            print(USAGE, end="")
            return 0
        case ["--version"]:
            print(__version__)
            return 0
        case ["train", *rest]:
            return _guarded(_train, rest)
        case ["config", "check", *rest]:
            return _guarded(_check, rest)
        case ["config", "show", *rest]:
            return _guarded(_show, rest)
        case ["config", "schema", *_]:
            return _guarded(_schema, [])
        case ["config", "migrate", *rest]:
            return _guarded(_migrate, rest)
        case ["parity", *rest]:
            return _guarded(_parity, rest)
        case ["plan", *rest]:
            return _guarded(_plan, rest)
        case ["checkpoint", "list" | "verify" | "show" | "prune", *_]:
            return _guarded(_checkpoint, arguments[1:])
        case ["data", "prepare" | "inspect" | "tokenizer", *_]:
            return _guarded(_data, arguments[1:])
    words = " ".join(arguments[:2])
    near = nearest_name(words, NAMES.split(", "))
    hint = f"did you mean {near!r}?\n" if near else ""
    print(f"titanlite: unknown command {words!r}\n{hint}\n{USAGE}", file=sys.stderr, end="")
    return 2


def _guarded(command: Callable[[list[str]], None], arguments: list[str]) -> int:
    """Run a command; the user's mistakes become lines on standard error, everything else a traceback."""
    try:
        command(arguments)
    except (UserError, RunError) as error:
        code = error.exit_code
        if _is_first_to_fail(code):
            _print_errors(str(error).splitlines())
        return code
    except KeyboardInterrupt:
        return 130
    except BaseException as error:
        if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
            return 1  # whoever read the output has gone: `| head`
        _is_first_to_fail(1)
        where = f"[rank {os.environ['RANK']}] " if "RANK" in os.environ else ""
        print("".join(where + line for line in traceback.format_exc().splitlines(True)), file=sys.stderr)
        return 1
    return 0


def _print_errors(lines: Iterable[object]) -> None:
    for line in lines:
        print(f"error: {line}", file=sys.stderr, flush=True)


def _train(arguments: list[str]) -> None:
    config, resolved, ranks, device = _within_budget(_examine(arguments, log=True))
    import torch

    from titanlite.runtime.process_group import process_group
    from titanlite.train import build, finish, train

    try:
        with process_group(ranks, device, deterministic=config.debug.deterministic):
            run = build(config, resolved, ranks=ranks, device=device)
            stopped = train(run)
            finish(run, stopped)
    except torch.OutOfMemoryError as error:
        from titanlite.plan.out_of_memory import explain

        raise RunError(explain(error, config, ranks, device)) from error
    if stopped:
        raise stopped


def _check(arguments: list[str]) -> None:
    _within_budget(_examine(arguments))


def _within_budget(found: "Examined") -> "Examined":
    """Also what each block computes again, where a budget of memory says so."""
    config, resolved, ranks, device = found
    if config.activation_checkpoint.mode != "budget":
        return found
    from titanlite.plan.budget import with_levels

    return config, with_levels(config, resolved, world_size=ranks.world_size, device=device), ranks, device


def _examine(arguments: list[str], *, log: bool = False) -> "Examined":
    """Everything wrong with the config in one report: what it says, and how it goes with this machine.

    Args:
        log: on the console from here on.

    Raises:
        ConfigError: something is.
    """
    from titanlite.config.load import read

    path, overrides = _split_config(arguments)
    draft = read(path, overrides, world_size=whole_number(os.environ, "WORLD_SIZE", 1))
    if "" in draft.bad_keys:
        draft.settle()  # nothing can be known of the rest: no need to wait for torch
    if "RANK" not in os.environ:
        _print_errors(draft.tell())  # at once; what else is wrong is known when torch is imported, seconds later
    from titanlite.parallelize.compile import use_cache
    from titanlite.preflight import examine
    from titanlite.runtime.console import start_logging
    from titanlite.runtime.process_group import pick_device, read_ranks

    ranks = read_ranks(os.environ)
    if log:
        start_logging(ranks.rank)
        use_cache(draft.config.compile)
    try:
        device = pick_device(ranks)
    except UserError as error:
        draft.add([Problem("", str(error))])
        raise ConfigError(draft.tell()) from None
    resolved, problems = examine(draft.config, ranks, device, draft.bad_keys)
    draft.add(problems)
    config = draft.settle()
    assert resolved is not None
    return config, resolved, ranks, device


def _show(arguments: list[str]) -> None:
    from titanlite.config.describe import show
    from titanlite.config.load import load

    rest = [word for word in arguments if word != "--diff"]
    path, overrides = _split_config(rest)
    print(show(load(path, overrides), only_changes="--diff" in arguments), end="")


def _schema(_: list[str]) -> None:
    from titanlite.config.describe import json_schema_text

    print(json_schema_text(), end="")


def _migrate(arguments: list[str]) -> None:
    from titanlite.migrate.command import main

    main(arguments)


def _parity(arguments: list[str]) -> None:
    from titanlite.report.parity import main

    path, rest = _split_config(arguments)
    main(path, rest)


def _plan(arguments: list[str]) -> None:
    from titanlite.plan.command import main

    path, rest = _split_config(arguments)
    main(path, rest)


def _checkpoint(arguments: list[str]) -> None:
    from titanlite.checkpoint.command import main

    main(arguments)


def _data(arguments: list[str]) -> None:
    from titanlite.ingest.command import main

    main(arguments)


def _split_config(arguments: list[str]) -> tuple[str, list[str]]:
    """The value of --config, and everything else."""
    match [i for i, word in enumerate(arguments) if word == "--config" or word.startswith("--config=")]:
        case [i] if "=" in arguments[i]:
            return arguments[i].partition("=")[2], arguments[:i] + arguments[i + 1 :]
        case [i] if i + 1 < len(arguments):
            return arguments[i + 1], arguments[:i] + arguments[i + 2 :]
    raise UserError("name one config file: --config FILE.toml")


def _is_first_to_fail(code: int) -> bool:
    """Leave the exit code for run_train.sh (torchrun turns every code into 1), and tell whether this process of the
    machine was the first to: it speaks for those that meet the same mistake, and that torchrun may end before they can.
    Without run_train.sh, every process speaks for itself."""
    path = os.environ.get("TITANLITE_EXIT_FILE")
    if path is None:
        return True
    try:
        with open(path, "x") as file:
            file.write(str(code))
    except FileExistsError:
        return False
    return True
