"""`titanlite checkpoint export` and `import`."""

from functools import partial
from pathlib import Path

import torch

from titanlite.parallelize import DTYPES
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError
from titanlite.tools.convert.experts import Sample, choose_experts
from titanlite.tools.convert.export import export_folder
from titanlite.tools.convert.export_adapters import export_adapters
from titanlite.tools.convert.import_weights import import_weights
from titanlite.tools.convert.safetensors_file import parse_size
from titanlite.tools.convert.source import open_source
from titanlite.tools.convert.target import open_target
from titanlite.tools.convert.torch_file import write_torch_file


def export(
    path: str,
    *,
    config: str | None,
    model_file: str | None,
    tokenizer: str | None,
    format: str,
    out: str,
    dtype: str | None,
    max_shard_size: str,
    drop: list[str],
    no_tokenizer: bool,
    check: bool,
    merge: bool,
) -> None:
    """Run the command with the options of its parser.

    Raises:
        UserError: a mistake in the input, or a damaged checkpoint.
        RunError: a disk or a store fails.
    """
    max_shard_bytes = parse_size(max_shard_size)
    if check and format == "torch":
        raise UserError("--check is for --format hf: it compares with transformers")
    try:
        source = open_source(path, config=config, tokenizer=tokenizer, model_file=model_file)
        if merge and source.adapters is None:
            raise UserError(f"--merge: {source.where} has no adapters")
        if source.adapters is not None and not merge:
            if format == "torch" or check:
                raise UserError(f"{'--check' if check else '--format torch'} is for whole models: add --merge")
            size = export_adapters(source, open_target(out), dtype=getattr(torch, dtype) if dtype else None, drop=drop)
            print(f"wrote {out}: {len(source.adapters.layers)} adapters in PEFT's format, {size / 2**20:,.1f} MiB")
            print(f"from  {source.where}")
            return
        if format == "torch":
            write_torch_file(source, out, dtype=getattr(torch, dtype) if dtype else None)
            print(f"wrote {out}, the weights of {source.where}")
            return
        done = export_folder(
            source,
            open_target(out),
            dtype=getattr(torch, dtype) if dtype else None,
            max_shard_bytes=max_shard_bytes,
            drop=drop,
            with_tokenizer=not no_tokenizer,
            check=check,
        )
    except DamagedCheckpoint as damage:
        raise UserError(str(damage)) from None
    except BrokenPipeError:
        raise
    except OSError as error:  # of a disk, or of an object store after many tries
        raise RunError(f"{error}. The same command resumes the export") from None

    kept = f" ({done.kept} of them by an earlier start)" if done.kept else ""
    print(f"wrote {out}: {done.architecture}, {done.bytes / 2**20:,.1f} MiB in {done.files} files of weights{kept}")
    print(f"from  {source.where}")
    if done.report:
        print(f"check: {done.report}")


def import_(
    path: str,
    *,
    out: str,
    model: str | None,
    flavor: str | None,
    config: str | None,
    dtype: str | None,
    allow_unexpected: list[str],
    layers: str | None,
    experts: str | None,
    sample: str | None,
    sample_tokens: int,
    statistics: str | None,
) -> None:
    """Run the command with the options of its parser.

    Raises:
        UserError: a mistake in the input.
        RunError: a disk or a store fails.
    """
    if config is not None and (model or flavor):
        raise UserError("--config names the model: leave out --model and --flavor")
    chosen = None
    if experts is not None:
        if (sample is None) == (statistics is None):
            raise UserError("--experts: name a text with --sample, or the --statistics of an earlier import")
        if sample is not None and sample_tokens < 1:
            raise UserError(f"--sample-tokens: expected a number above 0, got {sample_tokens}")
        source = Path(statistics) if sample is None and statistics else Sample(str(sample), sample_tokens)
        chosen = partial(choose_experts, keep=experts, source=source, out=out)
    elif sample or statistics:
        raise UserError("--sample, --statistics: are for --experts keep=K")
    try:
        written = import_weights(
            path,
            out=out,
            model=model,
            flavor=flavor,
            config=config,
            dtype=DTYPES[dtype] if dtype else None,
            allow_unexpected=allow_unexpected,
            layers=layers,
            choose_experts=chosen,
        )
    except OSError as error:
        raise RunError(str(error)) from None
    print(f"wrote {written}, the weights of {path}")
