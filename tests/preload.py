# ruff: noqa: F401
"""Imported once by the server that test processes are forked from, so that each of them starts at once."""

import gc

import numpy.random
import tomlkit
import torch._dynamo.convert_frame
import torch._inductor.standalone_compile
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

import titanlite.train

gc.freeze()  # no collection touches these objects: each forked process would copy their memory
titanlite.train.freeze_garbage_collector = lambda: None  # a full collection takes longer than all steps of a tiny run
