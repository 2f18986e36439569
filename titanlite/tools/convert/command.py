"""`titanlite checkpoint export` and `import`."""

from collections.abc import Sequence
from typing import Literal

import torch

from titanlite.parallelize import DTYPES
from titanlite.runtime.errors import DamagedCheckpoint, RunError, UserError
from titanlite.tools.arguments import ModelFile, RunConfig, RunTokenizer, Weights
from titanlite.tools.convert.export import export_folder
from titanlite.tools.convert.export_adapters import export_adapters
from titanlite.tools.convert.import_weights import import_weights
from titanlite.tools.convert.safetensors_file import parse_size
from titanlite.tools.convert.source import open_source
from titanlite.tools.convert.target import open_target


def export(
    path: Weights,
    *,
    config: RunConfig | None = None,
    model_file: ModelFile | None = None,
    tokenizer: RunTokenizer | None = None,
    out: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: str = "5GB",
    drop: Sequence[str] = (),
    merge: bool = False,
    check: bool = False,
    no_tokenizer: bool = False,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder.

    transformers and others read it: config.json, safetensors, tokenizer. Of a run with [lora], the adapters are written
    in PEFT's format.

    Args:
        out (PATH): folder or URL; it must not exist
        dtype: dtype of the weights; default: as they are
        max_shard_size (SIZE): largest file of weights
        drop (GLOB): leave out tensors that the format has no place for, such as layers.*.feed_forward.bias_E
        merge: of a run with [lora]: write the whole model, with the adapters merged
        check: compare what transformers computes with our model, block by block
        no_tokenizer: write no files of the tokenizer

    Raises:
        UserError: a mistake in the input, or a damaged checkpoint.
        RunError: a disk or a store fails.

    Example:
        outputs/debug --out debug_hf --dtype bfloat16
        outputs/debug --out s3://bucket/debug_hf --max-shard-size 2GB
    """
    max_shard_bytes = parse_size(max_shard_size)
    try:
        source = open_source(path, config=config, tokenizer=tokenizer, model_file=model_file)
        if merge and source.adapters is None:
            raise UserError(f"--merge: {source.where} has no adapters")
        if source.adapters is not None and not merge:
            if check:
                raise UserError("--check is for whole models: add --merge")
            size = export_adapters(source, open_target(out), dtype=getattr(torch, dtype) if dtype else None, drop=drop)
            print(f"wrote {out}: {len(source.adapters.layers)} adapters in PEFT's format, {size / 2**20:,.1f} MiB")
            print(f"from  {source.where}")
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
        raise RunError(str(error)) from None

    print(f"wrote {out}: {done.architecture}, {done.bytes / 2**20:,.1f} MiB in {done.files} files of weights")
    print(f"from  {source.where}")
    if done.report:
        print(f"check: {done.report}")


def import_(
    path: str,
    *,
    out: str,
    model: str | None = None,
    flavor: str | None = None,
    config: str | None = None,
    dtype: Literal["bfloat16", "float32"] | None = None,
    allow_unexpected: Sequence[str] = (),
    layers: str | None = None,
) -> None:
    """Write weights of another program as a checkpoint.

    Reads a Hugging Face folder, a step of torchtitan, or Meta's consolidated.*.pth. The checkpoint is of step 0 and has
    the model alone, for checkpoint.initial_load_path and for the commands that take a checkpoint. Training needs no
    import: checkpoint.initial_load_path takes the same folders.

    Args:
        path (DIR_OR_FILE): weights of another program
        out (DIR): folder or URL for the checkpoint, step-00000000
        model (NAME): model family; default: what the weights describe
        flavor (NAME): flavor of the family; default: what the weights describe
        config: config with the model, instead of --model and --flavor
        dtype: dtype of the weights; default: as they are
        allow_unexpected (GLOB): leave out tensors that the model does not have
        layers (LIST): take these layers alone, such as 0,2,4-7; also of a checkpoint of titanlite

    Raises:
        UserError: a mistake in the input.
        RunError: a disk or a store fails.

    Example:
        models/Qwen3-0.6B --out outputs/qwen3
        torchtitan/outputs/checkpoint/step-1000 --model llama3 --flavor 8B --out outputs/llama3
        models/Qwen3-8B --layers 0-17 --out outputs/student
    """
    if config is not None and (model or flavor):
        raise UserError("--config names the model: leave out --model and --flavor")
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
        )
    except OSError as error:
        raise RunError(str(error)) from None
    print(f"wrote {written}, the weights of {path}")
