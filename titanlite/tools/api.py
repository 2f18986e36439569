"""The Python interface, for notebooks and scripts: a config, a run, its records. `import titanlite` offers these names.

One process trains by itself. Under torchrun, srun or mpirun, or in a program that has opened a process group, each
process calls the same functions.
"""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from titanlite.config.checks import find_conflicts
from titanlite.config.keys import toml_text
from titanlite.config.load import Draft, load
from titanlite.config.shipped import find_config
from titanlite.run.slurm import use_own_job
from titanlite.runtime.errors import ConfigError, Place, Problem, UserError
from titanlite.runtime.launchers import use_ranks_of_launcher
from titanlite.schema import Config

if TYPE_CHECKING:
    from titanlite.models.base import Model
    from titanlite.tools.report.run_records import RunRecords
    from titanlite.train import Run


def load_config(name: str | Path = "debug", options: Mapping[str, Any] | None = None) -> Config:
    """Return the config of a TOML file, with options changed, after checking its options.

    Args:
        name: a TOML file, or the name of a config that titanlite ships.
        options: {"section.key": value}, such as {"training.steps": 20, "model.args.dim": 128}.

    Raises:
        ConfigError: lists all mistakes, each with its key and the nearest right name.
    """
    words = [f"--{key}={_toml(key, value)}" for key, value in (options or {}).items()]
    return load(find_config(str(name)), words)


def build_model(config: Config) -> "Model":
    """Return the model of a config on the meta device, with its adapters: shapes and parameters without memory.

    Raises:
        ConfigError: there is no such model.
    """
    from titanlite.tools.plan.estimate import model_of, trained_model

    return trained_model(model_of(config), config)


def run_training(config: Config) -> "RunRecords":
    """Train from the run's newest checkpoint to its last step, as `titanlite train` does; return its records.

    The run's folder is `outputs/<name>` below the current folder, by `job.dump_folder` and `job.name`. Ctrl-C ends
    it at once: the next call resumes from the newest checkpoint.

    Raises:
        UserError: the config, the data or the checkpoint does not fit.
        RunStopped: a rule of the config stopped the run, such as a loss that is not finite.
    """
    from titanlite.tools.checkpoints.last_export import export_last
    from titanlite.tools.report.run_records import read_run
    from titanlite.train import finish, train

    with build_run(config) as run:
        stopped = train(run)
        finish(run, stopped)
    if stopped:
        raise stopped
    export_last(run)
    return read_run(run.folder.path)


@contextmanager
def build_run(config: Config) -> Iterator["Run"]:
    """Build every part of a run, to look at or for a loop of your own: `run.model`, `run.optimizer`, `run.batches`.

    The parts are those that `titanlite train` would train with on this machine: sharded, compiled, and restored from
    the run's newest checkpoint. Only one run is open at a time, because PyTorch has one process group. One that the
    program has opened is used if it has gloo for CPUs and, on GPUs, NCCL.

    Raises:
        UserError: the config, the data or the checkpoint does not fit.
    """
    import torch
    import torch.distributed as dist

    from titanlite.parallelize.compile import use_cache
    from titanlite.runtime.allocator import use_expandable_segments
    from titanlite.runtime.console import start_logging
    from titanlite.runtime.private_torch.process_groups import has_open_run
    from titanlite.runtime.process_group import pick_device, process_group, ranks_of_open_group, read_ranks
    from titanlite.tools.assemble import assemble, resolve

    if has_open_run():
        raise UserError("another run is open: only one can be at a time")
    use_expandable_segments(os.environ)
    joins = dist.is_initialized()
    if joins:
        ranks = ranks_of_open_group("cuda" if torch.cuda.is_available() else "cpu")
    else:
        use_ranks_of_launcher(os.environ)
        ranks = read_ranks(os.environ)
    if ranks.rank == 0:
        use_own_job(os.environ, now=time.time())
    device = pick_device(ranks)
    places = {(section,): Place(0, 0, "the given config") for section in Config.model_fields}
    draft = Draft(config, [], set(), places)
    draft.add(Problem(*conflict) for conflict in find_conflicts(config, ranks.world_size, ()))
    config = draft.resolve()  # it may not fit the number of processes
    config, inputs = resolve(draft, ranks, device)
    start_logging(ranks.rank)
    use_cache(config.compile)
    seconds = config.comm.init_timeout_seconds
    try:
        with process_group(ranks, device, deterministic=config.debug.is_deterministic, timeout_seconds=seconds):
            run = assemble(config, inputs, ranks=ranks, device=device)
            try:
                yield run
            finally:
                run.batches.close()
                run.checkpoints.finish()
                run.metrics.close()
                run.folder.release()
    finally:
        # After an error; other ranks may wait in a collective.
        if dist.is_initialized() and ranks.world_size == 1 and not joins:
            dist.destroy_process_group()


def load_model(path: str | Path, *, dtype: Literal["bfloat16", "float32"] | None = None) -> "Model":
    """Return a model with its weights, in this process alone: on a GPU if there is one.

    Args:
        path: a checkpoint, the folder of a run (its newest complete one), a URL of either, or a Hugging Face folder.
        dtype: of the weights. Default: bfloat16 on a GPU, float32 on a CPU.

    Raises:
        UserError: there is no checkpoint, it is damaged, or its model is unknown.
    """
    from titanlite.tools.convert.generate import load_here
    from titanlite.tools.convert.source import open_source

    return load_here(open_source(str(path)), dtype=dtype)


def generate(
    path: str | Path,
    prompt: str,
    *,
    model: "Model | None" = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
) -> str:
    """Return the text with which a model continues a prompt, as `titanlite generate` does.

    Args:
        path: of the weights and the tokenizer, as in `load_model`.
        model: from `load_model`, so that the weights are not read again.
        max_new_tokens: longest answer.
        temperature: 0 takes the most probable token; above, tokens are drawn.
        top_p: draw among the most probable tokens that together have this probability.
        seed: of the draws.

    Raises:
        UserError: the prompt, the checkpoint or its tokenizer cannot be used.
    """
    from titanlite.tools.convert.generate import generator_of, load_here
    from titanlite.tools.convert.generation import Sampler, stream_text
    from titanlite.tools.convert.prompts import prompt_encoder, stop_ids
    from titanlite.tools.convert.source import open_source, tokenizer_of

    if not (max_new_tokens >= 1 and temperature >= 0 and 0 < top_p <= 1 and seed >= 0):
        raise UserError("generate: expected max_new_tokens from 1, temperature and seed from 0, top_p up to 1")
    source = open_source(str(path))
    tokenizer = tokenizer_of(source)
    ids = prompt_encoder(tokenizer, config=source.config, chat=None)(prompt)
    generator = generator_of(source, tokenizer, model or load_here(source))
    sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
    tokens = generator.stream(ids, max_new_tokens=max_new_tokens, sampler=sampler, stop_ids=stop_ids(tokenizer))
    return "".join(stream_text(tokenizer, tokens, context=ids))


def _toml(key: str, value: Any) -> str:
    """Return a value as TOML."""
    with suppress(ValueError, TypeError):
        return toml_text(str(value) if isinstance(value, Path) else value)
    raise ConfigError([Problem(key, f"{value!r} is no value of TOML; leave the key out for its default")])
