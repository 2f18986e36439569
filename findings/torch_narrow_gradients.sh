#!/usr/bin/env bash
# torch 2.13.0, CPU: the gradient of nn.Embedding in bfloat16 is added up in bfloat16, one occurrence of a token after the
# other, so that a row stops to grow where half of its last bit is reached. The gradients of LayerNorm's weight and bias
# are added up so, too; those of index_select are rounded once. Output seen:
#
#     4,096 gradients of 1 for one token: Embedding 256, index_select 4096
#     LayerNorm's bias, 4,096 gradients of 1: 256
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy
OMP_NUM_THREADS=1 "$folder/venv/bin/python" - <<'PYTHON'
import torch

table = torch.nn.Embedding(8, 4, dtype=torch.bfloat16)
tokens = torch.zeros(4096, dtype=torch.long)
table(tokens).sum().backward()
one_by_one = table.weight.grad[0, 0].item()

weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
weight.index_select(0, tokens).sum().backward()
once = weight.grad[0, 0].item()
print(f"4,096 gradients of 1 for one token: Embedding {one_by_one:g}, index_select {once:g}")

norm = torch.nn.LayerNorm(4, dtype=torch.bfloat16)
norm(torch.randn(4096, 4).bfloat16()).sum().backward()
bias = norm.bias.grad[0].item()
print(f"LayerNorm's bias, 4,096 gradients of 1: {bias:g}")
assert (one_by_one, once) == (256, 4096), "the behaviour has changed"
assert bias < 4096, "the behaviour has changed"
PYTHON
