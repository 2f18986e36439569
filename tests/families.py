"""Small models of the families with declared attention, and the same models in transformers."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.deepseek_v3 import DeepseekV3, DeepseekV3Args
from titanlite.models.experts import Experts
from titanlite.models.olmo3 import Olmo3, Olmo3Args
from titanlite.models.smollm3 import SmolLM3, SmolLM3Args
from titanlite.ops.cpu import CpuKernels
from titanlite.ops.kernels import set_kernels
from titanlite.parallelize.materialize import draw_weights

SHAPE: dict[str, Any] = {
    "dim": 64, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 101, "max_seq_len": 64,
    "rope_theta": 10000.0,
}  # fmt: skip
LATENT: dict[str, Any] = SHAPE | {
    "n_kv_heads": 4, "hidden_dim": 24, "kv_rank": 20, "nope_dim": 12, "rope_dim": 8, "v_dim": 10, "n_experts": 8,
    "n_active_experts": 2, "n_dense_layers": 1, "dense_hidden_dim": 96,
    "balance_rate": 0.0,  # transformers changes no bias
}  # fmt: skip
PLAIN = {"q_rank": 0, "rope_scaling_factor": 1.0, "n_groups": 1, "n_active_groups": 1}
FAMILIES: dict[str, tuple[type[Decoder], DecoderArgs]] = {
    "smollm3": (SmolLM3, SmolLM3Args(**SHAPE, tied_head=True)),
    "deepseek_v3": (
        DeepseekV3,
        DeepseekV3Args(**LATENT, q_rank=24, rope_most_turns=1.0, n_groups=4, n_active_groups=2),
    ),
    "moonlight": (DeepseekV3, DeepseekV3Args(**LATENT | PLAIN, n_shared_experts=2)),
    "olmo3": (Olmo3, Olmo3Args(**SHAPE, window=7)),
}


def built(family: str, scale: float = 5, **changes: Any) -> Decoder:
    """Return a small model whose attention is far from uniform.

    Args:
        scale: of matrices, beyond the initial one.
    """
    model_cls, args = FAMILIES[family]
    model = model_cls(type(args)(**{**vars(args), **changes}))
    draw_weights(model, device=torch.device("cpu"), seed=0)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            if parameter.ndim > 1:
                parameter.mul_(scale)
            else:  # norms that are not 1
                parameter.mul_(torch.linspace(0.5, 1.5 + number / 100, len(parameter)))
    model.init_buffers()
    for module in model.modules():
        if isinstance(module, Experts) and module.options.scores == "sigmoid":
            module.bias_E.copy_(torch.linspace(-0.2, 0.2, len(module.bias_E)).roll(3))
    set_kernels(model, CpuKernels())
    return model


def renamed(model: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in transformers."""
    hugging_face = model.formats.hugging_face
    assert hugging_face is not None
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if place := hugging_face.tensors.find(name):
            entry, theirs = place
            found[theirs.replace("{expert}.", "")] = tensor.transpose(-2, -1) if entry.transposed else tensor
    for gate in [name for name in found if name.endswith(".experts.gate_proj.weight")]:  # stacked in memory
        base = gate.removesuffix("gate_proj.weight")
        found[f"{base}gate_up_proj"] = torch.cat([found.pop(gate), found.pop(f"{base}up_proj.weight")], dim=1)
        found[f"{base}down_proj"] = found.pop(f"{base}down_proj.weight")
    return found


def oracle(model: Decoder) -> Any:
    """Return the model of transformers with the same weights, from the config.json that we write."""
    hugging_face = model.formats.hugging_face
    assert hugging_face is not None
    config = transformers.AutoConfig.for_model(**hugging_face.to_config(model.args))
    other = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    assert type(other).__name__ == hugging_face.architecture
    loaded = other.load_state_dict(renamed(model, model.state_dict()), strict=False)
    assert not loaded.unexpected_keys
    assert set(loaded.missing_keys) <= {"lm_head.weight"}
    return other.float().eval()
