"""Options that exclude each other, or that the layout does not allow: each problem has the key of its option."""

import shlex
from pathlib import Path

import pytest
import torch

from tests.support import own_models
from tests.support.helpers import TinyRun
from titanlite.checks.preflight import preflight
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.process_group import Ranks

MESH, TRAIN, OPTIM = "--parallelism.", "--training.", "--optimizer."
EIGHTH = "--quantize.linear.float8"
FLOAT8 = f"{EIGHTH}.enable {EIGHTH}.emulate"
IN_BACKWARD = f"{OPTIM}in_backward {TRAIN}max_norm=0"
DISK = "--offload.optimizer=disk"
BACKGROUND = "--data.prepare=background"
BFLOAT16_SUMS = f"{TRAIN}mixed_precision_reduce=bfloat16"
PARTS = "--debug.reproducible_context_degree=2"
EXACT = f"--debug.reproducible_layouts {TRAIN}local_batch_size=1 {TRAIN}global_batch_size=8"
WORKERS = f"--outer.every=2 --outer.over_replicas {TRAIN}steps=4 --validation.freq=4"
TEACHER = "--teacher.path=. --distill.ratio=1"
MOE = '--model=\'{name="qwen3_moe", flavor="debug", args={dim=32, n_layers=2, vocab_size=259}}\''
BALANCED = "--model.args.balance_loss=0.1"
BALANCED_FLAVOR = f"--model.file={own_models.__file__} --model.name=Balanced"
GPT2 = Path(__file__).parents[3] / "examples/my_model/gpt2.py"
OWN_MODEL = f"--model='{{file=\"{GPT2}\", args={{dim=32, n_layers=2, n_heads=2, vocab_size=259}}}}'"
THREE_BLOCKS, FOUR_BLOCKS = "--model.args.n_layers=3", "--model.args.n_layers=4"
STAGES = "[{until_tokens=%d, global_batch_size=%d}, {until_tokens=128, global_batch_size=4}]"
RAMP = f"{TRAIN}local_batch_size=1 {TRAIN}batch_ramp='{STAGES}'"
LENGTHS = f"{TRAIN}seq_len=16 {TRAIN}seq_len_ramp='[{{until_tokens=64, seq_len=%d}}, {{until_tokens=%d, seq_len=8}}]'"
STAGE = "--data.stages='[{until_tokens=64, weights={%s}}]'"
PIPELINE = f"{MESH}pipeline_parallel_degree=2 {TRAIN}local_batch_size=1"
SCHEDULE = f"{PIPELINE} {MESH}pipeline_parallel_schedule"
OTHER_GROUPS = '[{match=["tok_embeddings.*"]}, {match=["layers.*", "head.*"]}]'

REFUSED: dict[str, dict[int, list[str]]] = {
    "optimizer.in_backward": {
        2: [
            f"{IN_BACKWARD} {options}"
            for options in (
                f"{TRAIN}max_norm=1", "--guard.nonfinite=skip", "--guard.spike_sigma=6", f"{OPTIM}name=Muon",
                f"{OPTIM}groups='[{{match=[\"*\"], name=\"Muon\"}}]'", f"{TRAIN}local_batch_size=2", RAMP % (64, 2),
                f"{FOUR_BLOCKS} {PIPELINE}",
            )
        ],
    },
    "model.args.balance_loss": {
        1: [f"{THREE_BLOCKS} {BALANCED}", f"{MOE} --model.args.balance_loss=true"],
        2: [
            f"{model} {options}"
            for model in (f"{MOE} {BALANCED}", BALANCED_FLAVOR)
            for options in (f"{TRAIN}local_batch_size=2", RAMP % (64, 2))
        ],
        4: [
            f"{MOE} {BALANCED} {MESH}{axis}_parallel_degree=2 {TRAIN}local_batch_size=1"
            for axis in ("tensor", "context", "expert")
        ],
    },
    "average": {
        1: ["--average.freq=2", f"--average.decay=0.9 {TRAIN}enable_cpu_offload --offload.parameters=disk"],
    },
    "average.decay": {1: ["--average.decay=0.9 --average.window=2", "--average.decay=1.0"]},
    "average.freq": {1: ["--average.freq=0 --average.window=2"]},
    "outer": {
        1: ["--outer.lr=1", f"--outer.every=2 {TRAIN}enable_cpu_offload --offload.parameters=disk"],
    },
    "outer.every": {1: ["--outer.every=-1"]},
    "outer.lr": {1: ["--outer.every=2 --outer.lr=0"]},
    "outer.momentum": {1: ["--outer.every=2 --outer.momentum=1"]},
    "outer.over_replicas": {
        2: [
            f"{WORKERS} {options}"
            for options in (
                "--average.decay=0.9", "--debug.hash_freq=2", IN_BACKWARD, f"{FOUR_BLOCKS} {PIPELINE}",
            )
        ],
    },
    "training.steps": {1: [f"{WORKERS} {TRAIN}steps=5"]},
    "offload.average": {1: ["--offload.average=disk"]},
    "data.shuffle": {1: [BACKGROUND]},
    "data.packing": {1: [f"{BACKGROUND} --data.shuffle_window=8 --data.packing=best_fit"]},
    "training.epochs": {
        1: [f"{BACKGROUND} --data.shuffle=false {TRAIN}epochs=1", f"{WORKERS} {TRAIN}epochs=1"],
    },
    "validation.freq": {1: [f"{WORKERS} --validation.enable --validation.path=stdlib:// --validation.freq=3"]},
    "parallelism.fsdp_reduce_gradients": {
        1: [f"{MESH}fsdp_reduce_gradients=last {TRAIN}mixed_precision_param=bfloat16 {BFLOAT16_SUMS}"],
    },
    "guard.on_spike": {1: ["--guard.spike_sigma=6 --guard.on_spike=rollback --checkpoint.enable=false"]},
    "job.name": {1: [f"--job.name={'x' * 5000}"]},
    "data.tokenizer": {1: ["--data.tokenizer=python-2k"]},
    "training.multi_token_weight": {
        1: [f"{TRAIN}multi_token_weight=0.3 {OWN_MODEL}"],
    },
    "training.mixed_precision_param": {
        1: [f"{TRAIN}mixed_precision_param=float16 {options}" for options in (IN_BACKWARD, FLOAT8, WORKERS)],
    },
    "offload.path": {1: ["--offload.path=/tmp", f"{DISK} --offload.path={__file__}/x"]},
    "offload.optimizer": {1: [f"{DISK} {OPTIM}name=SGD", f"{DISK} {OPTIM}args.amsgrad=true"]},
    "offload.parameters": {1: [f"{DISK} --offload.parameters=disk {TRAIN}enable_cpu_offload {FLOAT8}"]},
    "profiling.profile_freq": {
        1: [f"--profiling.enable_profiling --profiling.profile_freq={steps}" for steps in (3, 50)],
    },
    "profiling.profiler_active": {1: ["--profiling.enable_profiling --profiling.profiler_active=0"]},
    "profiling.enable_memory_snapshot": {
        1: ["--profiling.enable_memory_snapshot --profiling.profile_freq=2"],  # on a CPU
    },
    "parallelism.context_parallel_degree": {
        2: [f"{MESH}context_parallel_degree=2 {TRAIN}seq_len=30", f"{MESH}context_parallel_degree=4"],
    },
    "parallelism.data_parallel_shard_degree": {
        2: [f"{MESH}context_parallel_degree=2 {MESH}data_parallel_shard_degree=2"],
        4: [f"{MESH}data_parallel_replicate_degree=2 {MESH}data_parallel_shard_degree=4"],
    },
    "parallelism.tensor_parallel_degree": {
        4: [
            f"{MESH}tensor_parallel_degree=2 {options}"
            for options in ("--lora.rank=2", f"{TRAIN}loss=own.py:loss", TEACHER)
        ],
    },
    "parallelism.pipeline_parallel_degree": {
        2: [
            f"{PIPELINE} --model.args.n_layers=1", f"{FOUR_BLOCKS} {PIPELINE} --model.args.tied_head",
            f"{FOUR_BLOCKS} {PIPELINE} {TRAIN}local_batch_size=8", f"{SCHEDULE}=Interleaved1F1B {THREE_BLOCKS}",
            f"{FOUR_BLOCKS} {PIPELINE} {MESH}pipeline_parallel_layers_per_stage=2",
            f"{FOUR_BLOCKS} {PIPELINE} --freeze.parameters='[\"tok_embeddings.*\", \"layers.[01].*\"]'",
            f"{MOE} {BALANCED} {PIPELINE}", f"{BALANCED_FLAVOR} {PIPELINE}",
        ],
        4: [f"{FOUR_BLOCKS} {MESH}pipeline_parallel_degree=3 {TRAIN}local_batch_size=1"],
    },
    "parallelism.pipeline_parallel_schedule": {
        2: [
            f"{FOUR_BLOCKS} {SCHEDULE}=InterleavedZeroBubble {MESH}fsdp_reshard_after_forward=always",
            f"{FOUR_BLOCKS} {SCHEDULE}=ZBVZeroBubble --compile.enable",
        ],
    },
    "metrics.layers.freq": {2: [f"{FOUR_BLOCKS} {PIPELINE} --metrics.layers.freq=1"]},
    "parallelism.expert_parallel_degree": {
        4: [
            f"{MESH}expert_parallel_degree=3",
            f"{MESH}expert_parallel_degree=2 {MESH}data_parallel_replicate_degree=4",
        ],
    },
    "parallelism.fsdp_reshard_after_forward": {
        4: [
            f"{MESH}fsdp_reshard_after_forward=2 {MESH}expert_parallel_degree=2", f"{MESH}fsdp_reshard_after_forward=3",
            f"{MESH}fsdp_reshard_after_forward=2 --compile.enable --quantize.linear.float8.enable",
        ],
    },
    "parallelism.fsdp_min_unit_params": {2: [f"{MESH}fsdp_min_unit_params=20000 {MESH}expert_parallel_degree=2"]},
    "parallelism.data_parallel_replicate_degree": {4: [f"{MESH}data_parallel_replicate_degree=3"]},
    "training.global_batch_size": {1: [f"{EXACT} {TRAIN}global_batch_size=6"], 4: [f"{TRAIN}global_batch_size=6"]},
    "training.batch_ramp.0.global_batch_size": {
        2: [RAMP % (64, 3), f"{RAMP % (64, 2)} {TRAIN}local_batch_size=2", f"{EXACT} {RAMP % (64, 6)}"],
    },
    "training.batch_ramp.1.until_tokens": {2: [RAMP % (128, 4)]},
    "training.seq_len_ramp.0.seq_len": {1: [LENGTHS % (5, 128)]},
    "training.seq_len_ramp.1.until_tokens": {1: [LENGTHS % (4, 64)]},
    "training.tokens": {
        1: [
            f"{TRAIN}tokens=1000 {TRAIN}epochs=1",
            f"{WORKERS} {TRAIN}tokens=192 {TRAIN}seq_len=16 {TRAIN}global_batch_size=4",
        ],
    },
    "lr_scheduler.decay_tokens": {1: ["--lr_scheduler.decay_tokens=64"]},
    "lr_scheduler.decay_steps": {1: ["--lr_scheduler.warmup_tokens=64 --lr_scheduler.decay_steps=2"]},
    "data.stages.0.weights.txt": {1: [STAGE % "txt=1.0"]},
    "data.stages.0.weights": {1: [STAGE % ""]},
    "training.local_batch_size": {
        1: [
            f"{EXACT} {TRAIN}local_batch_size=3",
            f"{EXACT} {TRAIN}local_batch_size=16",
            "--debug.reproducible_layouts",
        ],
        4: [f"{TRAIN}global_batch_size=48 {TRAIN}local_batch_size=8"],
    },
    "debug.reproducible_layouts": {
        1: [
            f"{EXACT} {WORKERS}",
            f"{EXACT} {OPTIM}args.fused=true",
            f"{EXACT} {PARTS} --model.args.tied_head=true",
            f"{EXACT} {IN_BACKWARD} {TRAIN}local_batch_size=8",
            f"{EXACT} {BFLOAT16_SUMS}",
            f"{EXACT} {MOE} {BALANCED}",
            f"{EXACT} {BALANCED_FLAVOR}",
        ],
        2: [
            f"{EXACT} {MOE} --model.args.hidden_dim=48 {MESH}expert_parallel_degree=2",
            f"{EXACT} {MOE} {MESH}expert_parallel_degree=2 --compile.enable",
        ],
        4: [f"{EXACT} {TRAIN}local_batch_size=4"],
    },
    "debug.reproducible_context_degree": {
        1: [
            PARTS, f"{EXACT} {PARTS} {TRAIN}seq_len=30", f"{EXACT} --debug.reproducible_context_degree=3",
            f"{EXACT} {PARTS} --compile.enable",
        ],
        2: [f"{EXACT} {MESH}context_parallel_degree=2", f"{EXACT} {PARTS} {MOE} {MESH}expert_parallel_degree=2"],
    },
    "debug.reproducible_layouts, training.global_batch_size": {3: [f"{EXACT} {TRAIN}global_batch_size=24"]},
    "freeze.parameters": {
        1: [
            "--freeze.parameters='[\"layers.9.*\"]'", "--freeze.parameters='[\"*\"]'",
            "--lora.rank=2 --freeze.parameters='[\"head.*\"]'",
        ],
    },
    "optimizer.groups.0.match": {
        1: [f"{THREE_BLOCKS} --freeze.parameters='[\"tok_embeddings.*\"]' {OPTIM}groups='{OTHER_GROUPS}'"],
    },
    "lora.rank": {1: ["--lora.rank=15", "--lora.alpha=2.0"]},
    "lora.targets": {
        1: [
            "--lora.rank=2 --lora.targets='[\"layers.9.*\"]'", "--lora.rank=2 --lora.targets='[\"head.*\"]'",
            f"{MOE} --lora.rank=2 --lora.targets='[\"layers.*.feed_forward.w1\"]'",
        ],
    },
    "quantize.linear.float8.recipe_name": {
        1: [f"{EIGHTH}.enable --compile.enable {EIGHTH}.recipe_name=mxfp8 {TRAIN}mixed_precision_param=float32"],
    },
    "quantize.linear.float8.enable": {1: [f"--lora.rank=2 {FLOAT8}"]},
    "optimizer.name": {1: [f"--lora.rank=2 {OPTIM}name=Muon"]},
    "distill.ratio": {
        1: [
            "--distill.ratio=0.5",
            "--teacher.path=.",
            f"{TEACHER} {TRAIN}loss=a:b",
        ],
    },
    "teacher.path": {1: ["--teacher.dtype=float32"]},
}  # fmt: skip
"""Options by the keys of the problems, and by the number of processes."""


def checked(tiny: TinyRun, options: list[str], world_size: int) -> None:
    """Check as a start does: first the config, then with the model."""
    config = tiny.config(*options, world_size=world_size)
    preflight(config, Ranks(0, world_size, 0, world_size), torch.device("cpu"))


@pytest.mark.parametrize("key", REFUSED)
def test_each_problem_has_the_key_of_its_option(tiny: TinyRun, key: str) -> None:
    for world_size, several in REFUSED[key].items():
        for options in several:
            with pytest.raises(ConfigError) as error:
                checked(tiny, shlex.split(options), world_size)
            assert {problem.key for problem in error.value.problems} == {*key.split(", ")}, options
