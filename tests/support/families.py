"""Small models of the families with declared attention or experts, and the same models in transformers."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

from titanlite.models.base import vector_names
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.deepseek_v3 import DeepseekV3, DeepseekV3Args
from titanlite.models.gemma3 import Gemma3, Gemma3Args
from titanlite.models.glm4_moe import Glm4Moe, Glm4MoeArgs
from titanlite.models.gpt_oss import GptOss, GptOssArgs
from titanlite.models.olmo3 import Olmo3, Olmo3Args
from titanlite.models.qwen3_next import Qwen3Next, Qwen3NextArgs
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
}  # fmt: skip
PLAIN = {"q_rank": 0, "rope_scaling_factor": 1.0, "n_groups": 1, "n_active_groups": 1}
FAMILIES: dict[str, tuple[type[Decoder], DecoderArgs]] = {
    "smollm3": (SmolLM3, SmolLM3Args(**SHAPE, tied_head=True)),
    "deepseek_v3": (
        DeepseekV3,
        DeepseekV3Args(**LATENT, q_rank=24, rope_most_turns=1.0, n_groups=4, n_active_groups=2),
    ),
    "moonlight": (DeepseekV3, DeepseekV3Args(**LATENT | PLAIN, n_shared_experts=2)),
    "gemma3": (
        Gemma3,
        Gemma3Args(**{**SHAPE, "n_layers": 6, "rope_theta": 50000.0}, head_dim=24, window=7, query_pre_attn_scalar=20),
    ),
    "gpt_oss": (
        GptOss,
        GptOssArgs(**{**SHAPE, "hidden_dim": 40}, head_dim=24, window=7, n_experts=6, n_active_experts=2),
    ),
    "olmo3": (Olmo3, Olmo3Args(**SHAPE, window=7)),
    "qwen3_next": (
        Qwen3Next,
        Qwen3NextArgs(
            **{**SHAPE, "hidden_dim": 40},
            head_dim=24,
            rotary_factor=0.5,
            full_every=2,
            n_linear_key_heads=2,
            n_linear_value_heads=4,
            linear_key_dim=12,
            linear_value_dim=10,
            n_experts=6,
            n_active_experts=2,
            shared_hidden_dim=48,
        ),
    ),
    "glm4_moe": (
        Glm4Moe,
        Glm4MoeArgs(
            **SHAPE,
            head_dim=24,
            dense_hidden_dim=80,
            n_experts=8,
            n_active_experts=3,
            n_groups=4,
            n_active_groups=2,
            n_shared_experts=2,
            routed_scaling_factor=2.5,
            qk_norm=True,
        ),
    ),
}


def built(family: str, scale: float = 5, **changes: Any) -> Decoder:
    """Return a small model whose attention is far from uniform.

    Args:
        scale: of matrices, beyond the initial one.
    """
    model_cls, args = FAMILIES[family]
    model = model_cls(type(args)(**{**vars(args), **changes}))
    vectors = vector_names(model)
    draw_weights(model, device=torch.device("cpu"), seed=0)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            if name not in vectors:
                parameter.mul_(scale)
            else:  # norms that do not multiply by 1, biases and sinks
                parameter.add_(torch.linspace(-0.5, 0.5 + number / 100, parameter.numel()).view_as(parameter))
    model.init_buffers()
    for name, bias_E in model.named_buffers():
        if name.endswith("bias_E") and renamed(model, {name: bias_E}):  # transformers' model has it, too
            bias_E.copy_(0.2 * torch.randn(bias_E.shape, generator=torch.Generator().manual_seed(0)))
    set_kernels(model, CpuKernels())
    return model


def renamed(model: Decoder, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in transformers, which stacks experts in memory."""
    hugging_face = model.formats.hugging_face
    assert hugging_face is not None
    theirs: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if place := hugging_face.tensors.find(name):
            theirs.setdefault(place[1], []).append(tensor)
    # Two of ours are every second column of one of theirs.
    found = {
        name: parts[0] if len(parts) == 1 else torch.stack(parts, -1).flatten(-2) for name, parts in theirs.items()
    }
    for name in [name for name in found if name.endswith("{expert}.gate_proj.weight")]:
        gate, up, down = (found.pop(name.replace("gate", kind)) for kind in ("gate", "up", "down"))
        prefix = name.partition(".{expert}")[0]
        found[f"{prefix}.gate_up_proj"] = torch.cat([gate, up], dim=2).transpose(1, 2)
        found[f"{prefix}.down_proj"] = down.transpose(1, 2)
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
