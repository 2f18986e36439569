"""Translation of torchtitan's values to settings of titanlite, where it depends on the value or on other keys.

Some keys make sense only together: batch sizes and degrees, a dataset and its path, a section of float8 and the
converter that uses it.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

FLOAT8 = ("float8", "quantize.linear.float8")
"""The converter, and the section, of 0.1 and of 0.2."""
C4_SPLITS = {"c4": "train", "c4_validation": "validation"}
SPAN = "the schedule always spans training.steps"

OPTIMIZERS = ("Adam", "AdamW")
"""All that torchtitan has."""
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    **{f"llama3/{size}": ("llama3", size, {}) for size in ("8B", "70B", "405B")},
    **{f"qwen3/{size}": ("qwen3", size, {}) for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    "qwen3/30B-A3B": ("qwen3_moe", "30B-A3B", {}),
    "qwen3/235B-A22B": ("qwen3_moe", "235B-A22B", {"rope_theta": 5e6}),
    "llama3/debugmodel": (
        "llama3",
        "debug",
        {"dim": 256, "n_heads": 16, "n_kv_heads": 16, "hidden_dim": 768, "rope_theta": 5e5, "rope_scaling_factor": 8.0},
    ),
    "qwen3/debugmodel": (
        "qwen3",
        "debug",
        {"n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "hidden_dim": 3072, "head_dim": 128, "rope_theta": 1e6},
    ),
    "qwen3/debugmodel_moe": (
        "qwen3_moe",
        "debug",
        {
            "n_layers": 8, "n_heads": 16, "n_kv_heads": 8, "hidden_dim": 768, "head_dim": 128, "n_experts": 64,
            "n_active_experts": 8, "rope_theta": 1e6,
        },
    ),
}  # fmt: skip
"""Family and flavor of each of torchtitan's models, and what else is needed for the same model."""
VOCABULARIES = {"llama3": 128256, "qwen3": 151936}
DEBUG_VOCABULARY = 2048
FAMILIES = {shape.partition("/")[0] for shape in SHAPES}


@dataclass(frozen=True)
class Old:
    """Values of a config of torchtitan, with torchtitan's defaults for those that it lacks."""

    given: dict[str, Any]
    defaults: dict[str, Any]
    version: str
    world_size: int | None = None

    def __getitem__(self, key: str) -> Any:
        return self.given.get(key, self.defaults[key])

    @property
    def model_parallel_degree(self) -> int:
        """Ranks that share the data of one."""
        axes = ("tensor", "pipeline", "context")
        tensor, pipeline, context = (max(1, self[f"parallelism.{axis}_parallel_degree"]) for axis in axes)
        return tensor * pipeline * context

    @property
    def data_parallel_degree(self) -> int | None:
        """Ranks that see different data, if the number of processes is known."""
        return self.world_size and self.world_size // self.model_parallel_degree

    @property
    def float8(self) -> bool:
        return any(name in FLOAT8 for name in self["model.converters"])


class Outcome(NamedTuple):
    """Translation of a value: settings of titanlite, a remark, and whether training changes all the same."""

    writes: dict[str, Any]
    note: str = ""
    lost: bool = False


Convert = Callable[[Any, Old], Outcome]


def global_batch(value: int, old: Old) -> Outcome:
    local, ranks = old["training.local_batch_size"], old.data_parallel_degree
    if value > 0:
        return Outcome({"training.global_batch_size": value})
    if ranks:
        return Outcome({"training.global_batch_size": local * ranks}, f"{local} for each of {ranks} ranks")
    note = f"means {local} for each data parallel rank: migrate with --world-size N, or set it yourself"
    return Outcome({}, note, lost=True)


def degree(value: int, old: Old) -> Outcome:
    return Outcome({"parallelism.tensor_parallel_degree": max(1, value)})


def loggers(value: bool, old: Old) -> Outcome:
    names = {"tensorboard": old["metrics.enable_tensorboard"], "wandb": old["metrics.enable_wandb"]}
    return Outcome({"metrics.loggers": [name for name, enabled in names.items() if enabled]})


def profiling(name: str) -> Convert:
    """Return the translation of an option of [profiling]: nothing where no window would open."""

    def convert(value: bool | int, old: Old) -> Outcome:
        if not (old["profiling.enable_profiling"] or old["profiling.enable_memory_snapshot"]):
            return Outcome({}, "does nothing while profiling is off")
        if old["profiling.profile_freq"] > old["training.steps"]:
            return Outcome({}, "no window ends within training.steps")
        return Outcome({f"profiling.{name}": value})

    return convert


def warmup(value: int, old: Old) -> Outcome:
    return Outcome({"lr_scheduler.warmup_steps": min(value, old["training.steps"])})  # torchtitan cuts it, we do not


def total_steps(value: int | None, old: Old) -> Outcome:
    return Outcome({}, SPAN, lost=value not in (None, old["training.steps"]))


def model(value: str, old: Old) -> Outcome:
    if value not in FAMILIES:
        note = "not the same here: see titanlite/models for what there is, or name a file of yours in model.file"
        return Outcome({"model.name": value}, note, lost=True)
    name, _, _ = SHAPES.get(f"{value}/{_flavor_base(old)}", (value, "", {}))
    balance = "the bias that balances experts is added to the router's logits here, and to its probabilities there"
    return Outcome({"model.name": name}, f"{balance} (model.args.balance_rate)" if name == "qwen3_moe" else "")


def flavor(value: str, old: Old) -> Outcome:
    base, name = _flavor_base(old), old["model.name"]
    shape = SHAPES.get(f"{name}/{base}")
    if shape is None and name in FAMILIES:
        known = ", ".join(shape.partition("/")[2] for shape in SHAPES if shape.startswith(f"{name}/"))
        note = f"no such shape of {name} is the same here (there are {known}): give its sizes in model.args"
        return Outcome({"model.flavor": value}, note, lost=True)
    _, flavor, args = shape or (name, value, {})
    note = ""
    if old.version == "0.1" and name == "llama3":  # RoPE was not scaled, and the tokenizer gave the vocabulary's size
        args = args | {"rope_scaling_factor": 1.0}
        note = "the vocabulary was that of the tokenizer; here it is rounded up to a multiple of 128, unless "
        note = note + "model.args.vocab_size is set" if flavor == "debug" else ""
    elif shape:  # the flavor gave the vocabulary's size, whatever the tokenizer
        args = args | {"vocab_size": DEBUG_VOCABULARY if flavor == "debug" else VOCABULARIES[name]}
    writes = {"model.flavor": flavor, **{f"model.args.{field}": size for field, size in args.items()}}
    return Outcome(writes | ({"data.document_mask": True} if base != value else {}), note)


def _flavor_base(old: Old) -> str:
    """Return the flavor without the name of a kernel, which stands for attention within documents."""
    return re.sub(r"_(flex|varlen)(_attn)?$", "", old["model.flavor"])


def tokenizer(value: str | None, old: Old) -> Outcome:
    path = value or ("./torchtitan/datasets/tokenizer/tokenizer.model" if old.version == "0.1" else None)
    return Outcome({"data.tokenizer": path} if path else {})


def assets(value: str, old: Old) -> Outcome:
    if old["model.tokenizer_path"] or old.version == "0.1":
        return Outcome({}, "model.tokenizer_path goes before it")
    return Outcome({"data.tokenizer": value})


def dataset(to: str, path_key: str) -> Convert:
    def convert(value: str, old: Old) -> Outcome:
        path, name = old[path_key], value.lower()
        if name == "c4_test":
            note = "" if path else "a folder of torchtitan's checkout: copy it, or name other text"
            return Outcome({to: path or "tests/assets/c4_test"}, note)
        if name not in C4_SPLITS:
            note = "is made by code of yours: name its files, and the field of their text in data.text_field"
            return Outcome({to: path or value}, note, lost=True)
        path = path or "allenai/c4"
        if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", path) or os.path.exists(path):
            return Outcome({to: path})
        note = "all of it is fetched and made into tokens first, where torchtitan streams"
        return Outcome({to: f"hf://{path}:en:{C4_SPLITS[name]}"}, note)

    return convert


def validation_steps(value: int, old: Old) -> Outcome:
    batch, ranks = old["validation.local_batch_size"], old.data_parallel_degree
    if value < 0:
        return Outcome({"validation.sequences": 0}, "all there are")
    if ranks:
        return Outcome({"validation.sequences": value * batch * ranks})
    return Outcome({}, f"validation.sequences = {value * batch} for each data parallel rank is the same")


def compile_model(value: bool, old: Old) -> Outcome:
    return Outcome({"compile.enable": value and "model" in old["compile.components"]})


def checkpointing(value: str, old: Old) -> Outcome:
    budget = value == "memory_budget"
    note = "the nearest; it costs memory or time, and changes no loss" if budget else ""
    return Outcome({"activation_checkpoint.mode": "selective" if budget else value}, note)


def selective(value: str, old: Old) -> Outcome:
    if old["activation_checkpoint.mode"] != "selective":
        return Outcome({}, "is for mode selective")
    return Outcome({"activation_checkpoint.selective_ac_option": int(value) if value.isdecimal() else value})


def converters(value: list[str], old: Old) -> Outcome:
    others = [str(name) for name in value if name not in FLOAT8]
    notes = [f"no counterpart of {', '.join(others)}"] if others else []
    if old.float8 and old["parallelism.tensor_parallel_degree"] > 1:
        notes.append("no float8 with tensor parallelism here yet: leave out one of the two")
    return Outcome({f"{FLOAT8[1]}.enable": old.float8}, "; ".join(notes), bool(notes))


def float8_filter(value: list[str], old: Old) -> Outcome:
    """torchtitan leaves out small layers if this is among the names, by torchao's limits, which are ours too."""
    names = [name for name in value if name != "auto_filter_small_kn"]
    small = {f"{FLOAT8[1]}.skip_small": names != value} if old.float8 else {}
    return Outcome({f"{FLOAT8[1]}.filter_fqns": names, **small})


def folder(value: str, old: Old) -> Outcome:
    if value == "checkpoint":
        return Outcome({}, "checkpoints are in the folder of the run, <dump_folder>/<name>/checkpoints")
    if "://" in value:
        return Outcome({"checkpoint.folder": value})
    return Outcome({"checkpoint.folder": os.path.join(old["job.dump_folder"], value)})


def load_step(value: int, old: Old) -> Outcome:
    return Outcome({"checkpoint.load_step": value}) if value > 0 else Outcome({}, "the newest is the default")


def initial_in_hf(value: bool, old: Old) -> Outcome:
    if not value:
        return Outcome({}, "does nothing at this value")
    if old["checkpoint.initial_load_path"]:
        return Outcome({}, "checkpoint.initial_load_path is recognized as what it is")
    return Outcome({"checkpoint.initial_load_path": old["model.hf_assets_path"]})


def initial_parts(value: bool, old: Old) -> Outcome:
    if not old["checkpoint.initial_load_path"]:
        return Outcome({}, "is for checkpoint.initial_load_path")
    note = "of torchtitan's checkpoints the model alone is read; the optimizer begins anew"
    return Outcome({"checkpoint.initial_load": ["model"]}, "" if value else note, lost=not value)


def optimizer(value: str, old: Old) -> Outcome:
    lost = value not in OPTIMIZERS
    note = "is not torchtitan's: give its arguments in optimizer.args" if lost else ""
    return Outcome({"optimizer.name": value}, note, lost)
