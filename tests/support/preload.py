# ruff: noqa: F401
"""Imported once by the server that test processes are forked from, so that each of them starts at once."""

import gc

import numpy.random
import pytest
import rich._emoji_codes
import rich.progress
import tomlkit
import torch._dynamo.convert_frame
import torch._inductor.standalone_compile
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.profiler._cupti_monitor

import tests.support.layouts
import titanlite.checks.preflight
import titanlite.models.llama3
import titanlite.models.qwen3_moe
import titanlite.ops.cpu
import titanlite.techniques.lora
import titanlite.techniques.tensor
import titanlite.tools.checkpoints.last_export
import titanlite.tools.convert.source
import titanlite.tools.ingest.prepare
import titanlite.train
from tests.support.quick_start import start_quickly
from titanlite.models.initial import _cells

start_quickly()
titanlite.run.run_folder._git_commit()
_cells(torch.device("cpu"))
gc.freeze()  # no collection touches these objects: each forked process would copy their memory
