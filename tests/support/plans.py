"""Plans and traces of one small model, for every test of the planner."""

from dataclasses import replace
from functools import cache

import torch

from titanlite.config.load import load
from titanlite.schema import Config
from titanlite.tools.plan.estimate import Layout, Plan, model_of, plan
from titanlite.tools.plan.hardware import find_hardware
from titanlite.tools.plan.memory import Profile, profile
from titanlite.tools.plan.recorder import Recorder
from titanlite.tools.plan.trace import trace_step

SMALL = (
    "--model.args.dim=64",
    "--model.args.n_layers=1",
    "--model.args.n_heads=4",
    "--model.args.n_kv_heads=2",
    "--model.args.hidden_dim=160",
    "--model.args.vocab_size=512",
    "--training.seq_len=64",
    "--training.global_batch_size=16",
    "--training.mixed_precision_param=bfloat16",
)


def read(*overrides: str, world_size: int = 1) -> Config:
    return load("train_configs/debug.toml", [*SMALL, *overrides], world_size=world_size)


def layout_of(world_size: int, *, gpu: bool = True, gpus_per_node: int = 8) -> Layout:
    return Layout(world_size, replace(find_hardware("H100"), measured=not gpu), gpus_per_node)


@cache
def traced(*overrides: str, world_size: int = 1, gpu: bool = False) -> Recorder:
    config = read(*overrides, world_size=world_size)
    return trace_step(config, *model_of(config), world_size=world_size, gpu=gpu)


def profiled(*overrides: str, world_size: int = 1, gpu: bool = False) -> Profile:
    found = traced(*overrides, world_size=world_size, gpu=gpu)
    return profile(found)


def planned(*overrides: str, world_size: int = 8, gpu: str = "H100", gpus_per_node: int = 8) -> Plan:
    return plan(read(*overrides, world_size=world_size), Layout(world_size, find_hardware(gpu), gpus_per_node))


def shapes(*overrides: str) -> list[torch.Size]:
    return [parameter.shape for parameter in model_of(read(*overrides)).build().parameters()]
