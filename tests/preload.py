"""Imported once by the server that test processes are forked from, so that each of them starts at once."""

import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import titanlite.train  # noqa: F401
