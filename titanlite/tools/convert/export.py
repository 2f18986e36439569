"""`titanlite checkpoint export`: a folder that transformers loads; of adapters, one in PEFT's format."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ByteSize, TypeAdapter, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from titanlite.models.formats import HuggingFace
from titanlite.runtime.console import progress_bar
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import FileLocked, check_out, lock_file
from titanlite.storage.storage import sync
from titanlite.techniques.lora.adapters import LORA_A, LORA_B
from titanlite.tools.arguments import ModelFile, OfAverage, RunConfig, RunTokenizer, Weights
from titanlite.tools.checkpoints.command import explaining_damage
from titanlite.tools.convert.check import CheckFailed, check_folder, check_tokenizer
from titanlite.tools.convert.hub import check_repo, model_card, upload
from titanlite.tools.convert.hugging_face import HuggingFaceFolder
from titanlite.tools.convert.layout import ExportTensor, export_tensors, values_of
from titanlite.tools.convert.reader import read_whole
from titanlite.tools.convert.source import OpenedWeights, open_source, tokenizer_of
from titanlite.tools.convert.tokenizer_files import ENDS, Generation, generation_beside, json_bytes, tokenizer_files

ADAPTERS = "adapter_model.safetensors"
ADAPTERS_CONFIG = "adapter_config.json"
PEFT_NAMES = {LORA_A: "lora_A", LORA_B: "lora_B"}


class OutputFolder:
    """Folder that an export writes: under another name, and renamed at the end, so that it is complete or not there.

    Call `begin` first, then `write` for each file, then `commit`.

    Raises:
        UserError: the place is a URL, or something is there.
    """

    def __init__(self, place: str) -> None:
        if "://" in place:
            raise UserError(f"--out: {place} is a URL: name a folder, and copy it afterwards, as by aws s3 sync")
        self.place = place
        self.path = Path(place).expanduser().absolute()
        self.staging = self.path.with_name(f".{self.path.name}.staging")
        check_out(place)

    def begin(self) -> None:
        """Start with an empty folder.

        Raises:
            UserError: another process writes there, or the folder cannot be made.
        """
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self.staging / ".lock", timeout=0)
        except FileLocked as error:
            raise UserError(f"{self.place} is being written by {error.holder}") from None
        except OSError as error:
            raise UserError(f"--out: {self.place} cannot be written: {error.strerror or error}") from None
        for left in self.staging.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != ".lock":
                left.unlink()

    def write(self, name: str, content: bytes | Mapping[str, Tensor]) -> None:
        """Write a file, of safetensors if the content is tensors. It is durable on return."""
        path = self.staging / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.touch()
            mode = path.stat().st_mode  # safetensors makes files that only their owner can read
            save_file(dict(content), path, metadata={"format": "pt"})
            path.chmod(mode)
        sync(path)
        sync(path.parent)

    def commit(self) -> None:
        """Rename the folder to its place, after which the export counts."""
        (self.staging / ".lock").unlink()
        sync(self.staging)
        check_out(self.place)
        os.rename(self.staging, self.path)
        sync(self.path.parent)
        self._lock.close()

    def discard(self) -> None:
        """Delete what was written and is not committed."""
        shutil.rmtree(self.staging, ignore_errors=True)


class Listing(OutputFolder):
    """Prints the files that would be written, with their sizes, and writes nothing."""

    def begin(self) -> None: ...

    def write(self, name: str, content: bytes | Mapping[str, Tensor]) -> None:
        size = len(content) if isinstance(content, bytes) else sum(tensor.nbytes for tensor in content.values())
        print(f"{size:>16,}  {name}")

    def commit(self) -> None: ...


@explaining_damage()
def export(
    path: Weights,
    *,
    config: RunConfig | None = None,
    model_file: ModelFile | None = None,
    tokenizer: RunTokenizer | None = None,
    average: OfAverage = False,
    out: str,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    max_shard_size: str = "5GB",
    drop: Sequence[str] = (),
    merge: bool = False,
    check: bool = False,
    no_tokenizer: bool = False,
    push: str | None = None,
    dry_run: bool = False,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder.

    transformers and others read it: config.json, safetensors, tokenizer. Of a run with [lora], the adapters are written
    in PEFT's format.

    Args:
        out (PATH): folder; it must not exist
        dtype: dtype of the weights; default: as they are
        max_shard_size (SIZE): largest file of weights
        drop (GLOB): leave out tensors that the format has no place for, such as layers.*.feed_forward.bias_E
        merge: of a run with [lora]: write the whole model, with the adapters merged
        check: compare what transformers computes with our model, block by block
        no_tokenizer: write no files of the tokenizer
        push (USER/NAME): upload the folder to a new private repository of the Hugging Face Hub, with a model card
        dry_run: write and upload nothing; print the files and the model card

    Raises:
        UserError: a mistake in the input, or a damaged checkpoint.
        RunError: a disk or a store fails.

    Example:
        outputs/debug --out debug_hf --dtype bfloat16
        s3://bucket/run --out run_hf --max-shard-size 2GB
        outputs/debug --out debug_hf --push me/debug --dry-run
    """
    if push:
        check_repo(push)
    max_shard_bytes = parse_size(max_shard_size)
    wanted = getattr(torch, dtype) if dtype else None
    source = open_source(path, config=config, tokenizer=tokenizer, model_file=model_file, average=average)
    if merge and source.adapters is None:
        raise UserError(f"--merge: {source.where} has no adapters")
    is_whole = merge or source.adapters is None
    if check and not is_whole:
        raise UserError("--check is for whole models: add --merge")
    target = Listing(out) if dry_run else OutputFolder(out)
    more = {"README.md": model_card(source, path, push, is_whole=is_whole)} if push else {}
    if is_whole:
        exported = export_folder(
            source,
            target,
            dtype=wanted,
            max_shard_bytes=max_shard_bytes,
            drop=drop,
            with_tokenizer=not no_tokenizer,
            more=more,
            check=check and not dry_run,
        )
        content = f"{exported.architecture}, {exported.bytes / 2**20:,.1f} MiB in {exported.files} files of weights"
        report = exported.report
    else:
        count, size = export_adapters(source, target, dtype=wanted, drop=drop, more=more)
        report, content = "", f"{count} adapters in PEFT's format, {size / 2**20:,.1f} MiB"
    if dry_run:
        print(*(text.decode() for text in more.values()), sep="\n")
    print(f"{'would write' if dry_run else 'wrote'} {out}: {content}")
    print(f"from  {source.where}")
    if report:
        print(f"check: {report}")
    if push:
        print(f"would push to a new private repository, {push}" if dry_run else f"pushed {upload(out, push)}")


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    files: int
    """Files of weights."""
    bytes: int
    """Size of the weights."""
    architecture: str
    report: str
    """Result of the check; empty without one."""


def export_folder(
    source: OpenedWeights,
    target: OutputFolder,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int,
    drop: Sequence[str] = (),
    with_tokenizer: bool = True,
    more: Mapping[str, bytes] = {},
    check: bool = False,
) -> Exported:
    """Write a Hugging Face folder. Memory peaks at the largest file of weights, and the last tensor as it is stored.

    Args:
        dtype: of the weights; None keeps the stored ones.
        drop: globs of the model's tensors to leave out.
        more: further files.
        check: read the folder back, and compare it with the model, before it counts.

    Raises:
        UserError: the model cannot be written in this format.
        CheckFailed: the folder is not the model, or transformers would read its tokenizer as another. It is deleted.
    """
    form = format_of(source)
    tensors = export_tensors(source, form.tensors, dtype=dtype, drop=drop)
    files = split(tensors, max_shard_bytes)
    others = {"model.safetensors.index.json": index_json(files)} if len(files) > 1 else {}
    others |= {**_other_files(source, form, tensors, with_tokenizer=with_tokenizer), **more}
    target.begin()
    values = values_of(source)
    with progress_bar("writing", sum(tensor.bytes for tensor in tensors)) as advance:
        for name, part in files.items():
            target.write(name, {tensor.name: values(tensor) for tensor in part})
            advance(sum(tensor.bytes for tensor in part))
    for name, data in others.items():
        target.write(name, data)
    report = ""
    try:
        if source.tokenizer and with_tokenizer and not isinstance(target, Listing):
            check_tokenizer(source.tokenizer, target.staging)
        if check:
            report = check_folder(source, target.staging, tensors)
    except CheckFailed:
        target.discard()
        raise
    target.commit()
    return Exported(len(files), sum(tensor.bytes for tensor in tensors), form.architecture, report)


def format_of(source: OpenedWeights) -> HuggingFace:
    """Return the tables of the model's family.

    Raises:
        UserError: there is none.
    """
    model_cls = source.spec.model_cls
    if model_cls.formats.hugging_face is None:
        raise UserError(
            f"{model_cls.__name__} has no table of Hugging Face's names: give the class `formats`, as "
            "docs/add_a_model.md shows, or take its tensors in Python (docs/convert.md)"
        )
    return model_cls.formats.hugging_face


def _other_files(
    source: OpenedWeights, form: HuggingFace, tensors: Sequence[ExportTensor], *, with_tokenizer: bool
) -> dict[str, bytes]:
    """Return the content of all files but the weights; config.json is the last."""
    tokenizer, args = source.tokenizer, source.spec.args
    if with_tokenizer:
        try:
            tokenizer = tokenizer_of(source)
        except UserError as error:
            raise UserError(f"{error}, or leave its files out with --no-tokenizer") from None
    known = source.generation or (generation_beside(tokenizer) if tokenizer else Generation({}, {}))
    own = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id} if tokenizer else {}
    dtypes = {tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point}
    narrowest = min(dtypes, key=lambda dtype: dtype.itemsize)
    # Where a key is missing, transformers takes the default of the class, which is a token of another tokenizer.
    config: dict[str, Any] = {**dict.fromkeys(ENDS), **form.to_config(args), **own, **known.ids}
    config["torch_dtype"] = str(narrowest).removeprefix("torch.")
    if any(tensor.ours == "head.further_norm.weight" for tensor in tensors):
        config["num_nextn_predict_layers"] = 1
    generation = {name: i for name, i in own.items() if i is not None} | known.ids | known.config
    files = {"generation_config.json": json_bytes(generation)} if generation else {}
    if tokenizer and with_tokenizer:
        add_bos = source.config.data.add_bos if source.config and source.generation is None else None
        files |= tokenizer_files(tokenizer, add_bos=add_bos, max_length=args.max_seq_len)
    return files | {"config.json": json_bytes(config)}


def parse_size(text: str) -> int:
    """Return the bytes of a size such as 5GB or 200MiB.

    Raises:
        UserError: the text is no size.
    """
    try:
        return TypeAdapter(ByteSize).validate_python(text)
    except ValidationError:
        raise UserError(f"--max-shard-size: expected a size such as 5GB or 200MB, got {text!r}") from None


def split(tensors: Sequence[ExportTensor], max_bytes: int) -> dict[str, list[ExportTensor]]:
    """Return {file: tensors}, in order. A tensor that is larger than a file may be gets a file of its own."""
    files: list[list[ExportTensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(tensor.bytes for tensor in files[-1]) + tensor.bytes > max_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return {"model.safetensors": files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": part for i, part in enumerate(files, start=1)}


def index_json(files: dict[str, list[ExportTensor]]) -> bytes:
    """Return the text of model.safetensors.index.json."""
    tensors = [tensor for part in files.values() for tensor in part]
    body = {
        "metadata": {
            "total_parameters": sum(torch.Size(tensor.shape).numel() for tensor in tensors),
            "total_size": sum(tensor.bytes for tensor in tensors),
        },
        "weight_map": dict(sorted((tensor.name, file) for file, part in files.items() for tensor in part)),
    }
    return json_bytes(body)


def export_adapters(
    source: OpenedWeights,
    target: OutputFolder,
    *,
    dtype: torch.dtype | None = None,
    drop: Sequence[str] = (),
    more: Mapping[str, bytes] = {},
) -> tuple[int, int]:
    """Write the adapters of a checkpoint, and return their number and their size in bytes. They must fit in memory.

    Args:
        dtype: of the adapters; None keeps the stored one.
        drop: globs of the model's tensors that the format may leave out.
        more: further files.

    Raises:
        UserError: the format has no place for a layer with an adapter, or for another tensor.
    """
    assert source.adapters is not None
    form, adapters = format_of(source), source.adapters
    export_tensors(source, form.tensors, dtype=None, drop=drop)  # this raises if the format cannot hold the base
    modules = {layer: _peft_name(form, layer) for layer in adapters.layers}
    tensors = {
        f"base_model.model.{module}.{theirs}.weight": read_whole(adapters.reader, f"{layer}.{ours}").to(dtype)
        for layer, module in modules.items()
        for ours, theirs in PEFT_NAMES.items()
    }
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": _base_model(source),
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": _target_modules(source, form, [*modules.values()]),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    target.begin()
    target.write(ADAPTERS, tensors)
    for name, data in {**more, ADAPTERS_CONFIG: json_bytes(config)}.items():
        target.write(name, data)
    target.commit()
    return len(modules), sum(tensor.nbytes for tensor in tensors.values())


def _peft_name(form: HuggingFace, layer: str) -> str:
    """Return Hugging Face's name of a layer.

    Raises:
        UserError: there is none, or its weight has another layout there, so that the adapter does not fit it.
    """
    found = form.tensors.find(f"{layer}.weight")
    if found is None or found[0].transposed or found[0].interleaved:
        reason = "has no place" if found is None else "has another layout"
        raise UserError(f"{layer} {reason} in this format, so its adapter cannot be written: export with --merge")
    return found[1].removesuffix(".weight")


def _target_modules(source: OpenedWeights, form: HuggingFace, modules: list[str]) -> list[str]:
    """Return PEFT's target_modules: last parts of names, as programs expect them, where those match no other layer."""
    linears = [name for name, module in source.spec.build().named_modules() if isinstance(module, nn.Linear)]
    known = {found[1].removesuffix(".weight") for name in linears if (found := form.tensors.find(f"{name}.weight"))}
    last = {module.rpartition(".")[2] for module in modules}
    are_all = {name for name in known if name.rpartition(".")[2] in last} == {*modules}
    return sorted(last) if are_all else modules


def _base_model(source: OpenedWeights) -> str | None:
    """Return the Hugging Face folder that the run began with; None if it began with other weights."""
    path: Any = source.config.checkpoint.initial_load_path if source.config else None
    return path if path and "://" not in path and HuggingFaceFolder.matches(Path(path).expanduser()) else None
