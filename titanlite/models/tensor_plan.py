"""Roles of modules in tensor parallelism, and the table of the decoders here. `techniques/tensor.py` applies them."""

from collections.abc import Mapping
from typing import Literal

TensorRole = Literal["tokens", "split", "columns", "rows", "experts", "vocabulary"]
"""tokens: the list of blocks, which outside of split modules compute single tokens. Each rank has some of the tokens.

split: a module whose input is the same on all ranks, and inside of which each rank computes its part.

columns, rows: linear layers in it whose outputs, or inputs, are split. The outputs of rows are summed over ranks.
experts: an `ExpertLayer`. Each of its experts is split by `hidden_dims`, and its output is summed over ranks.
vocabulary: an embedding, or the linear layer of the head, whose tokens are split. No split module is around it.
"""

TensorPlan = Mapping[str, TensorRole]
"""Roles by patterns of modules' names, as of `fnmatch`. The first pattern that matches counts."""

ALL_BUT_FEED_FORWARD: TensorPlan = {
    "layers": "tokens",
    "tok_embeddings": "vocabulary",
    "layers.*.attention": "split",
    "layers.*.attention.w[qkv]": "columns",
    "layers.*.attention.wo": "rows",
    "head.output": "vocabulary",
}
DECODER: TensorPlan = {
    **ALL_BUT_FEED_FORWARD,
    "layers.*.feed_forward": "split",
    "layers.*.feed_forward.w[13]": "columns",
    "layers.*.feed_forward.w2": "rows",
}
DECODER_OF_EXPERTS: TensorPlan = {**ALL_BUT_FEED_FORWARD, "layers.*.feed_forward": "experts"}
