"""The anchor of the records: a GPT-2 of nanoGPT's shape and options, in PyTorch alone, on the same text and machine.

    python examples/shakespeare/baseline.py [FOLDER] [--seed 0] [--every STEPS]

FOLDER is what prepare.py wrote. The shape, the options and the number of steps are those that nanoGPT's README gives
for a CPU: 4 layers, 4 heads, dim 128, 12 x 64 characters, 2,000 steps, AdamW at 1e-3 with cosine decay to 1e-4, no
dropout. It prints one JSON object: the loss in nats a character over the whole validation text, the mean loss of 20
random batches, which is what nanoGPT prints, and the seconds of training. --every prints the loss on the way, too.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYERS, HEADS, DIM, LENGTH, BATCH, STEPS = 4, 4, 128, 64, 12, 2000
PEAK, LEAST, WARM_UP = 1e-3, 1e-4, 100


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, bias=False), nn.LayerNorm(DIM, bias=False)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.up, self.down = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x_BLD: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x_BLD)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen_BNLH = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x_BLD = x_BLD + self.out(seen_BNLH.transpose(1, 2).flatten(-2))
        return x_BLD + self.down(F.gelu(self.up(self.norm2(x_BLD))))


class GPT2(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(DIM, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                scale = (2 * LAYERS) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(weight, std=0.02 * scale)

    def forward(self, ids_BL: Tensor, labels_BL: Tensor, reduction: str = "mean") -> Tensor:
        x_BLD = self.tokens(ids_BL) + self.positions.weight[: ids_BL.shape[1]]
        logits_BLV = F.linear(self.norm(self.blocks(x_BLD)), self.tokens.weight)  # the head is tied
        return F.cross_entropy(logits_BLV.flatten(0, 1), labels_BL.flatten(), reduction=reduction)


def learning_rate(step: int) -> float:
    if step < WARM_UP:
        return PEAK * (step + 1) / (WARM_UP + 1)
    share = (step - WARM_UP) / (STEPS - WARM_UP)
    return LEAST + 0.5 * (1 + math.cos(math.pi * share)) * (PEAK - LEAST)


def random_batch(text: Tensor) -> tuple[Tensor, Tensor]:
    begins = torch.randint(len(text) - LENGTH, (BATCH,))
    windows = torch.stack([text[begin : begin + LENGTH + 1] for begin in begins])
    return windows[:, :-1], windows[:, 1:]


@torch.no_grad()
def validation_loss(model: GPT2, text: Tensor) -> float:
    """Mean over all characters but the first, each predicted once, LENGTH at a time."""
    total = 0.0
    for begin in range(0, len(text) - 1, LENGTH * 64):
        part = text[begin : begin + LENGTH * 64 + 1]
        whole = (len(part) - 1) // LENGTH * LENGTH
        for ids, labels in ((part[:whole].view(-1, LENGTH), part[1 : whole + 1].view(-1, LENGTH)),
                            (part[None, whole:-1], part[None, whole + 1 :])):  # fmt: skip
            if ids.numel():
                total += model(ids, labels, reduction="sum").item()
    return total / (len(text) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs/shakespeare"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=STEPS)
    arguments = parser.parse_args()
    texts = [(arguments.folder / f"{name}.txt").read_text() for name in ("train", "validation")]
    ids = {character: number for number, character in enumerate(sorted(set("".join(texts))))}
    train, validation = (torch.tensor([ids[character] for character in text]) for text in texts)
    torch.manual_seed(arguments.seed)
    model = GPT2(len(ids))
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if weight.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.99), fused=True)
    began = time.monotonic()
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        model(*random_batch(train)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % arguments.every == 0 and step + 1 < STEPS:
            loss = validation_loss(model, validation)
            print(json.dumps({"loss": loss, "characters": (step + 1) * BATCH * LENGTH}), flush=True)
    seconds = time.monotonic() - began
    parameters = sum(weight.numel() for weight in model.parameters())
    with torch.no_grad():
        of_batches = [model(*random_batch(validation)).item() for _ in range(20)]
    found = {
        "loss": validation_loss(model, validation),
        "loss_of_20_batches": sum(of_batches) / len(of_batches),
        "seconds": round(seconds, 1),
        "parameters": parameters,
        "characters": STEPS * BATCH * LENGTH,
        "seed": arguments.seed,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
