"""Decoders of transformers in training: the losses of a plain loop, on one process and on two."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from tests.support.decoders import config_of
from tests.support.helpers import TinyRun, built, run_in_turn, train_on_this_rank
from tests.support.layouts import trained
from titanlite.models.transformers import Transformers
from titanlite.schedule import learning_rate
from titanlite.schema import Config

STEPS = 12
OPTIONS = [
    f"--training.steps={STEPS}",
    "--training.seq_len=24",
    "--training.global_batch_size=4",
    "--optimizer.lr=3e-3",
]


def plain_losses(config: Config) -> list[float]:
    """Train transformers' own model, with its own attention and loss, from the same weights on the same sequences."""
    run = built(0, 1, config)
    ours = run.model
    assert isinstance(ours, Transformers)
    model = transformers.AutoModelForCausalLM.from_config(ours._whole.config, attn_implementation="eager")
    table = type(ours).formats.hugging_face
    assert table
    own = {
        name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        for name, tensor in ours.state_dict().items()
    }
    found = {name: table.tensors.find(name) for name in own}
    model.load_state_dict({entry[1]: own[name] for name, entry in found.items() if entry}, strict=False)
    model.tie_weights()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    decay = config.optimizer.weight_decay
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    losses = []
    for step in range(1, STEPS + 1):
        batch = run.position.samples.__getitems__([*range(4 * (step - 1), 4 * step)])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, peak=config.optimizer.lr, end=STEPS, config=config.lr_scheduler)
        logits = model(batch["tokens"], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.training.max_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(model_type, marks=pytest.mark.slow) for model_type in ("gpt_oss",)),
        *(
            pytest.param(model_type, marks=pytest.mark.nightly)
            for model_type in ("olmo2", "gemma3_text", "lfm2", "qwen3_next")
        ),
    ],
)
@pytest.mark.usefixtures("single_process_group")
def test_losses_are_those_of_a_plain_loop_on_one_process_and_two(tiny: TinyRun, name: str) -> None:
    config_of(tiny, name)
    expected = plain_losses(tiny.config(*OPTIONS, "--job.name=plain"))
    assert expected[-1] < expected[0] - 0.3
    train_on_this_rank(tiny.config(*OPTIONS, "--job.name=on-1"), 0, 1)
    run_in_turn(trained, 2, [tiny.config(*OPTIONS, "--job.name=on-2", world_size=2)])
    for ranks in (1, 2):
        assert tiny.losses(f"on-{ranks}") == pytest.approx(expected, rel=1e-6)
