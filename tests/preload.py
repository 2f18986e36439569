# ruff: noqa: F401
"""Imported once by the server that test processes are forked from, so that each of them starts at once."""

import gc

import numpy.random
import pytest
import rich._emoji_codes
import tomlkit
import torch._dynamo.convert_frame
import torch._inductor.standalone_compile
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.profiler._cupti_monitor

import tests.layouts
import titanlite.models.qwen3_moe
import titanlite.ops.cpu
import titanlite.techniques.lora
import titanlite.techniques.tensor
import titanlite.tools.checkpoints.last_export
import titanlite.train

gc.freeze()  # no collection touches these objects: each forked process would copy their memory
titanlite.train.freeze_garbage_collector = lambda: None  # a full collection takes longer than all steps of a tiny run
