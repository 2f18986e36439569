"""Small Qwen3 models, dense and with experts, and the same models in transformers."""

from typing import Any

import torch
import transformers
from torch import Tensor

from tests import models
from titanlite.models.decoder import Decoder
from titanlite.models.qwen3 import Qwen3, Qwen3Args
from titanlite.models.qwen3_moe import Qwen3Moe, Qwen3MoeArgs
from titanlite.parallelize.materialize import draw_weights

SHAPE: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 24, "vocab_size": 101, "max_seq_len": 64,
    "rope_theta": 10000.0,
}  # fmt: skip
DENSE = Qwen3Args(hidden_dim=96, **SHAPE)
MOE = Qwen3MoeArgs(hidden_dim=32, n_experts=8, n_active_experts=2, balance_rate=1e-3, **SHAPE)


def built(args: Qwen3Args) -> Decoder:
    model = Qwen3Moe(args) if isinstance(args, Qwen3MoeArgs) else Qwen3(args)
    draw_weights(model, device=torch.device("cpu"), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5)  # so that attention and routing are far from uniform
    model.init_buffers()
    return model


def renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and lay out values like transformers."""
    found = models.renamed(tensors)
    for name in [name for name in found if name.endswith(("mlp.gate_proj", "mlp.down_proj"))]:
        prefix, _, which = name.rpartition(".")
        if which == "gate_proj":
            both = torch.cat([found.pop(name), found.pop(f"{prefix}.up_proj")], dim=2)
            found[f"{prefix}.experts.gate_up_proj"] = both.transpose(1, 2)
        else:
            found[f"{prefix}.experts.down_proj"] = found.pop(name).transpose(1, 2)
    return found


def oracle(model: Decoder) -> Any:
    args = model.args
    assert isinstance(args, Qwen3Args)
    options: dict[str, Any] = {
        "vocab_size": args.vocab_size, "hidden_size": args.dim, "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads, "num_key_value_heads": args.n_kv_heads, "head_dim": args.head_dim,
        "rms_norm_eps": args.norm_eps, "max_position_embeddings": args.max_seq_len,
        "tie_word_embeddings": args.tied_head, "intermediate_size": args.hidden_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": args.rope_theta},
    }  # fmt: skip
    if isinstance(args, Qwen3MoeArgs):
        config = transformers.Qwen3MoeConfig(
            moe_intermediate_size=args.hidden_dim, num_experts=args.n_experts,
            num_experts_per_tok=args.n_active_experts, norm_topk_prob=True, decoder_sparse_step=1, **options,
        )  # fmt: skip
        other = transformers.Qwen3MoeForCausalLM(config)
    else:
        other = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options))
    result = other.load_state_dict(renamed(dict(model.named_parameters(remove_duplicate=False))), strict=False)
    assert not result.unexpected_keys
    assert not result.missing_keys
    return other.float().eval()
