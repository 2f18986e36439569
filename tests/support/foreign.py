"""Tiny models of transformers, and their weights in the formats of other programs."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from titanlite.models.base import Model
from titanlite.models.registry import MODELS, ModelSpec

N_HEADS, N_KV_HEADS = 4, 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def config_of(family: str, *, tied: bool = False, **changes: Any) -> Any:
    """Return transformers' config of a tiny model. Heads are cut where four ranks share the rows."""
    import transformers  # here and below: each rank imports this file, and takes a second for transformers

    common: dict[str, Any] = {
        "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": N_HEADS, "num_key_value_heads": N_KV_HEADS, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": tied, "rope_parameters": dict(ROPE),
    }  # fmt: skip
    experts: dict[str, Any] = {
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    qwen: Any = common | {"head_dim": 10} | changes
    match family:
        case "llama3":
            plain: Any = common | changes
            return transformers.LlamaConfig(**plain)
        case "qwen3":
            return transformers.Qwen3Config(**qwen)
        case "glm4_moe":
            routed = {"n_routed_experts": 5, "attention_bias": True, "use_qk_norm": True, "head_dim": 12}
            return transformers.Glm4MoeConfig(**(experts | qwen | routed))
        case _:
            return transformers.Qwen3MoeConfig(**(experts | qwen))


def oracle_of(family: str, *, tied: bool = False, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Return a model of transformers with random weights of a size that makes attention far from uniform."""
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, tied=tied, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    model.to(dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # float32 in files of any dtype
            buffer.data = 0.3 * torch.randn(buffer.shape)
    return model.eval()


def expected_tensors(oracle: Any) -> dict[str, Tensor]:
    """Return the tensors that our model must have, by our names, written independently of the tables."""
    names = {
        "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "self_attn": "attention",
        "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "post_attention_layernorm": "ffn_norm",
        "mlp": "feed_forward", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
    }  # fmt: skip
    found = {}
    for name, tensor in oracle.state_dict().items():
        theirs = str(name).removeprefix("model.").split(".")
        ours = ".".join(names.get(part, part) for part in theirs)
        match theirs:
            case ["norm", _]:
                found["head.norm.weight"] = tensor
            case ["lm_head", _]:
                if not oracle.config.tie_word_embeddings:
                    found["head.output.weight"] = tensor
            case ["layers", layer, "mlp", "gate", "weight"]:
                found[f"layers.{layer}.feed_forward.router"] = tensor
            case ["layers", layer, "mlp", "experts", "gate_up_proj"]:
                w1, w3 = tensor.transpose(1, 2).chunk(2, dim=2)
                found |= {f"layers.{layer}.feed_forward.w1": w1, f"layers.{layer}.feed_forward.w3": w3}
            case ["layers", layer, "mlp", "experts", "down_proj"]:
                found[f"layers.{layer}.feed_forward.w2"] = tensor.transpose(1, 2)
            case _:
                found[ours] = tensor
    return {name: tensor.detach().contiguous() for name, tensor in found.items()}


def spec_of(family: str, oracle: Any) -> ModelSpec:
    """Return our model of the same shape."""
    model_cls = MODELS[family]
    assert model_cls.formats.hugging_face
    args = model_cls.formats.hugging_face.to_args(oracle.config.to_dict())
    return ModelSpec(model_cls, type(next(iter(model_cls.flavors.values())))(**args))


def options_of(spec: ModelSpec) -> list[str]:
    """Return the options of a config that select a model."""
    [name] = [name for name, model_cls in MODELS.items() if model_cls is spec.model_cls]
    args = {key: value for key, value in asdict(spec.args).items() if key != "max_seq_len"}
    return [f"--model.name={name}", *(f"--model.args.{key}={json.dumps(value)}" for key, value in args.items())]


class Payload:
    """Pickled, it is a call: unpickled, it would be made."""

    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call = call, args

    def __reduce__(self) -> Any:
        return self.call


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows of halves (i, i + H/2) as neighbours, one row at a time."""
    size = weight.shape[0] // heads
    rows = []
    for head in range(heads):
        for i in range(size // 2):
            rows += [weight[head * size + i], weight[head * size + i + size // 2]]
    return torch.stack(rows)


def meta_tensors(oracle: Any) -> dict[str, Tensor]:
    """Return the tensors of a Llama under Meta's names and in Meta's order of rows."""
    found = {}
    for name, tensor in expected_tensors(oracle).items():
        theirs = name.removeprefix("head.")
        if name.endswith("attention.wq.weight"):
            tensor = interleaved(tensor, N_HEADS)
        if name.endswith("attention.wk.weight"):
            tensor = interleaved(tensor, N_KV_HEADS)
        found[theirs] = tensor
    if oracle.config.tie_word_embeddings:
        found["output.weight"] = found["tok_embeddings.weight"].clone()
    return found


def torchtitan_tensors(family: str, oracle: Any) -> dict[str, Tensor]:
    """Return the tensors of a model under torchtitan's names: its Llama has Meta's rows, its Qwen3 has our halves."""
    if family == "llama3":
        return meta_tensors(oracle)
    found = {}
    for name, tensor in expected_tensors(oracle).items():
        theirs = name.removeprefix("head.").replace("feed_forward.router", "moe.router.gate.weight")
        if family == "qwen3_moe" and ".feed_forward.w" in name:
            theirs, tensor = name.replace("feed_forward.", "moe.experts."), tensor.transpose(1, 2).contiguous()
        found[theirs] = tensor
    if oracle.config.tie_word_embeddings:
        found["output.weight"] = found["tok_embeddings.weight"]
    return found


def save_torchtitan(family: str, oracle: Any, folder: Path) -> None:
    """Save a model as torchtitan's checkpoints have it, beside the states of an optimizer and of a data loader."""
    tensors = torchtitan_tensors(family, oracle)
    others = {
        "optimizer": {f"state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in tensors.items()},
        "lr_scheduler": {"last_epoch": 3},
        "train_state": {"step": torch.tensor(3)},
        "dataloader": {"dp_rank_0": b"any bytes"},
    }
    dcp.save({**tensors, **others}, checkpoint_id=folder)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


def logits(model: Model | Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found).float()
