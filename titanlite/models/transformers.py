"""Any decoder of transformers: `[model] name = "transformers"`; `path` is a folder with a config.json, or a model type.

The layers are those of transformers, and so is the order in which they are computed. titanlite gives them what its
contract asks for: attention, a head that takes a loss, and initial values by name. Names of parameters are theirs, so
that export is the identity.
"""

# ruff: noqa: SLF001 (transformers has no other name for the initialization of one module)

import copy
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, make_dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward
from transformers.masking_utils import sdpa_mask

from titanlite.models.base import Model, ModelArgs, unique_parameters
from titanlite.models.formats import Entry, Formats, HuggingFace, Table, complete
from titanlite.models.initial import Constant, InitialValues, Normal, TruncatedNormal, Uniform
from titanlite.models.layers import Loss
from titanlite.models.renaming import TransformersRenaming
from titanlite.ops.attention import Documents, additive_mask, seen_causally
from titanlite.ops.kernels import DEFAULT_KERNELS, Kernels
from titanlite.runtime.errors import UserError, did_you_mean
from titanlite.runtime.files import read_small
from titanlite.runtime.private_torch.tensors import TorchDispatchMode

ATTENTION = "titanlite"
"""Name of our attention and our experts among those of transformers, and of our form of its masks."""
SIZES = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size"
"""Fields of configs that are at least 1 in any decoder."""
INITIALIZED = "_is_hf_initialized"
"""Mark that transformers sets on modules and parameters whose values its initialization leaves alone."""
MAX_LENGTH = 2**20
"""Tokens of a sequence of models whose config has no limit."""


def attend(
    module: nn.Module,
    q_BNLH: Tensor,
    k_BNLH: Tensor,
    v_BNLH: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    documents: Documents | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend -> ([B, L, N, H], None), in the form of transformers' `AttentionInterface`.

    Args:
        attention_mask: added to the scores. None: attend causally.
        softcap: bound of the scores, by tanh.
        s_aux: [N], a further logit of the softmax, whose value is zero (a sink).
    """
    seq_len = q_BNLH.shape[2]
    shared = q_BNLH.shape[1] // k_BNLH.shape[1]
    is_plain = softcap is None and s_aux is None
    dtype = q_BNLH.dtype if is_plain else torch.float32
    mask = None if attention_mask is None else attention_mask.to(dtype)
    if documents is not None or (mask is None and not is_plain):
        ids_BS = documents.ids_BS if documents else torch.zeros(1, seq_len, dtype=torch.int32, device=q_BNLH.device)
        apart = additive_mask(ids_BS, dtype)
        mask = apart if mask is None else mask + apart
    if is_plain:
        out_BNLH = F.scaled_dot_product_attention(
            q_BNLH, k_BNLH, v_BNLH, mask, dropout, mask is None, scale=scaling, enable_gqa=shared > 1
        )
        return out_BNLH.transpose(1, 2), None
    k_BNLH, v_BNLH = k_BNLH.repeat_interleave(shared, 1), v_BNLH.repeat_interleave(shared, 1)
    scores_BNLL = q_BNLH @ k_BNLH.transpose(2, 3) * (q_BNLH.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores_BNLL = softcap * torch.tanh(scores_BNLL / softcap)
    assert mask is not None
    scores_BNLL = scores_BNLL.float() + mask
    if s_aux is not None:
        sink_BNL1 = s_aux.float().view(1, -1, 1, 1).expand(*scores_BNLL.shape[:3], 1)
        scores_BNLL = torch.cat((scores_BNLL, sink_BNL1), -1)
    shares_BNLL = scores_BNLL.softmax(-1)[..., :seq_len]
    return (F.dropout(shares_BNLL, dropout).to(v_BNLH.dtype) @ v_BNLH).transpose(1, 2), None


def make_mask(*, dtype: torch.dtype, **options: Any) -> Tensor | None:
    """Return a mask [1, 1, L, L] that is added to scores, in the form of transformers' `AttentionMaskInterface`.

    None: causal attention of whole sequences, which needs no mask. Sequences are never padded here.
    """
    mask_11LL = sdpa_mask(**{**options, "batch_size": 1, "attention_mask": None})
    if mask_11LL is None:
        return None
    return torch.zeros_like(mask_11LL, dtype=dtype).masked_fill_(~mask_11LL, torch.finfo(dtype).min)


def compute_experts(
    module: nn.Module, x_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor, *others: Any, **options: Any
) -> Tensor:
    """Compute experts -> [T, D], in the form of transformers' `ExpertsInterface`.

    On a CPU in a narrow dtype, matmuls and sums of gradients are those of the kernels. Otherwise it is the function of
    transformers.
    """
    experts: Any = module
    kernels: Kernels = getattr(module, "kernels", DEFAULT_KERNELS)  # models beside ours may have our config
    if x_TD.itemsize >= 4 or kernels.is_gpu(x_TD.device) or experts.has_post_expert_norm:
        return grouped_mm_experts_forward(module, x_TD, chosen_TK, weights_TK, *others, **options)
    expert_S, order_S = chosen_TK.flatten().sort(stable=True)
    ends_E = torch.searchsorted(expert_S, torch.arange(experts.num_experts), right=True, out_int32=True)

    def linear(x_SD: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        out_SF = kernels.grouped_mm(x_SD, weight if experts.is_transposed else weight.mT, ends_E)
        return out_SF + kernels.embedding(expert_S, getattr(module, f"{name}_bias")) if experts.has_bias else out_SF

    x_SD = x_TD.index_select(0, order_S // chosen_TK.shape[1])
    if experts.has_gate:
        hidden_SF = experts._apply_gate(linear(x_SD, "gate_up_proj"))
    else:
        hidden_SF = experts.act_fn(linear(x_SD, "up_proj"))
    out_SD = linear(hidden_SF, "down_proj") * weights_TK.flatten().index_select(0, order_S).unsqueeze(1)
    return out_SD.index_select(0, order_S.argsort()).view(*chosen_TK.shape, -1).sum(dim=1).type_as(x_TD)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, make_mask)
ExpertsInterface.register(ATTENTION, compute_experts)


class Head(nn.Module):
    """Matmul with the vocabulary.

    Args:
        factor: of the logits.
    """

    kernels: Kernels = DEFAULT_KERNELS

    def __init__(self, weight_VD: nn.Parameter, factor: float) -> None:
        super().__init__()
        self.weight = weight_VD
        self.factor = factor

    def forward(self, x_BLD: Tensor, loss: Loss | None = None) -> Any:
        x_BLD = x_BLD if self.factor == 1 else x_BLD * self.factor
        return self.kernels.linear(x_BLD, self.weight) if loss is None else loss(x_BLD, self.weight)


class Transformers(Model):
    """Decoder of transformers. `decoder_of` makes a subclass for each config."""

    settings: ClassVar[Mapping[str, Any]]
    """The whole config, as config.json has it."""
    _whole: Any
    _values: dict[str, InitialValues]

    def __init__(self, args: ModelArgs) -> None:
        super().__init__(args)
        self.args: ModelArgs = args
        whole = _build(type(self).settings, args)
        for module in whole.modules():
            if hasattr(module, "_apply_gate"):  # experts
                module.kernels = DEFAULT_KERNELS
        for name, child in whole.base_model.named_children():
            self.add_module(name, child)
        self.lm_head = Head(whole.get_output_embeddings().weight, _factor(whole))
        # They are no children of this module, since what has parameters in them is one already.
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "_values", _initial_values(whole))

    def forward(self, tokens: Tensor, loss: Loss | None = None, *, documents: Documents | None = None) -> Any:
        # A mask of ones keeps transformers from looking for documents in positions, for which it waits for the device.
        inputs: dict[str, Any] = {"attention_mask": torch.ones_like(tokens, dtype=torch.bool)}
        if documents is not None:
            inputs |= {"documents": documents, "position_ids": documents.positions_BL}
        hidden_BLD = self._whole.base_model(input_ids=tokens, use_cache=False, **inputs).last_hidden_state
        return self.lm_head(hidden_BLD, loss)

    def train(self, mode: bool = True) -> Self:
        self._whole.train(mode)  # which is no child
        return super().train(mode)

    @classmethod
    def config_of(cls, args: ModelArgs) -> PretrainedConfig:
        """Return the config of transformers with these arguments."""
        return _config(cls.settings, args)

    def renaming(self) -> TransformersRenaming:
        return TransformersRenaming(self._whole)

    def init_weight(self, name: str, shape: torch.Size) -> InitialValues:
        return self._values[name]

    @torch.no_grad()
    def init_buffers(self) -> None:
        for module in self._whole.modules():
            if not (buffers := dict(module.named_buffers(recurse=False))):
                continue
            new = {name: torch.empty(buffer.shape, dtype=buffer.dtype) for name, buffer in buffers.items()}
            versions = {name: tensor._version for name, tensor in new.items()}
            for name, tensor in new.items():
                setattr(module, name, tensor)
            with _untouched(module.parameters(recurse=False)):
                self._whole._init_weights(module)
            if unset := [name for name, tensor in new.items() if tensor._version == versions[name]]:
                where = f"{type(module).__name__} without values: not supported"
                raise UserError(f"model.path: transformers' initialization leaves {', '.join(unset)} of {where}")

    def flops_per_token(self, seq_len: int, *, causal: bool = False) -> float:
        """Return the floating point operations of forward and backward for one token: of its matmuls and of
        attention."""
        config = self._whole.config
        weights = 0.0
        for name, parameter in unique_parameters(self):
            is_lookup = name.startswith("embed") and parameter is not self.lm_head.weight
            if parameter.ndim > 1 and not is_lookup:
                share = _share_of_experts(config) if parameter.ndim == 3 and ".experts." in name else 1.0
                weights += parameter.numel() * share * (6 if parameter.requires_grad else 4)
        heads = getattr(config, "num_attention_heads", 0) or 0
        size = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(self.layers)
        window = getattr(config, "sliding_window", None) or seq_len
        seen = {"full_attention": seq_len, "attention": seq_len, "sliding_attention": min(window, seq_len)}
        tokens = [seen.get(kind, 0) for kind in kinds]
        return weights + 12 * heads * size * sum(seen_causally(n, seq_len) if causal else n for n in tokens)


def own_name(whole: PreTrainedModel, name: str) -> str:
    """Return the name in our model of a tensor of transformers' model."""
    head = whole.get_output_embeddings()
    [place] = [place for place, module in whole.named_children() if module is head]
    return re.sub(rf"^{place}\.", "lm_head.", name.removeprefix(f"{whole.base_model_prefix}."))


class _Hidden(tuple[Tensor]):
    """Output of a decoder, of which only the hidden states are there."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class _Fixed(nn.Module):
    """Stands for a decoder whose hidden states are known."""

    def __init__(self, decoder: nn.Module, hidden_BLD: Tensor) -> None:
        super().__init__()
        object.__setattr__(self, "decoder", decoder)
        self.hidden_BLD = hidden_BLD

    def forward(self, *args: Any, **options: Any) -> _Hidden:
        return _Hidden((self.hidden_BLD,))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["decoder"], name)


def _factor(whole: PreTrainedModel) -> float:
    """Return the factor of the logits, by the forward of the model's own class. Here it is applied before the head.

    Raises:
        UserError: the forward does more than multiply the logits by a number, such as a soft cap.
    """
    with torch.device("cpu"), torch.no_grad():
        hidden_BLD = torch.linspace(-1000.0, 1000.0, 16).view(1, 1, -1)
        tokens = torch.zeros(1, 1, dtype=torch.int64)
        plain_head = nn.Linear(16, 16, bias=False, device="meta")
        plain_head.weight = nn.Parameter(torch.eye(16))
    head = whole.get_output_embeddings()
    alone = copy.copy(whole)
    alone._modules = {
        name: plain_head if child is head else _Fixed(child, hidden_BLD) if child is whole.base_model else child
        for name, child in whole._modules.items()
    }
    name = type(whole).__name__
    try:
        with torch.no_grad():
            found_BLD = alone(input_ids=tokens, use_cache=False).logits
        factor = float(found_BLD[0, 0, -1] / hidden_BLD[0, 0, -1])
        is_factor = torch.allclose(found_BLD, hidden_BLD * factor, rtol=1e-5)
    except Exception as error:  # whatever that forward raises
        reason = str(error).partition("\n")[0]
        raise UserError(f"{name} computes its logits in a way that is not supported: {reason}") from error
    if not is_factor:
        remedy = "set final_logit_softcapping to null in a copy of its config.json, if it has that"
        raise UserError(f"{name} does more with its logits than multiply them, which the loss does not: {remedy}")
    return factor


def _share_of_experts(config: PretrainedConfig) -> float:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return config.num_experts_per_tok / experts if experts else 1.0


# Initial values: transformers' own, taken from what its initialization does to parameters on the meta device.


@dataclass(frozen=True, eq=False)
class Given(InitialValues):
    """Values that are the same in every run."""

    table: Tensor

    def values(self, bits: Tensor, indices: Tensor) -> Tensor:
        return self.table.flatten()[indices.to(self.table.device)].to(bits.device, torch.float64)


class _Recorder(TorchDispatchMode):
    """Notes what is done to tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.done: dict[int, list[tuple[str, tuple[Any, ...]]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.endswith("_") and isinstance(args[0], Tensor):
            self.done.setdefault(id(args[0]), []).append((name, args[1:]))
        return func(*args, **(kwargs or {}))


def _initial_values(whole: PreTrainedModel) -> dict[str, InitialValues]:
    """Return the initial values of each parameter, by its name in our model."""
    for module in whole.modules():
        setattr(module, INITIALIZED, False)
    with _Recorder() as recorder, torch.random.fork_rng(devices=[]):
        whole.initialize_weights()
    found = {}
    for name, parameter in unique_parameters(whole):
        done = recorder.done.get(id(parameter), [])
        is_table = bool(done) and done[-1][0] == "copy_"
        found[own_name(whole, name)] = _table(whole, name) if is_table else _distribution(name, done)
    return found


def _table(whole: PreTrainedModel, name: str) -> Given:
    """Return the values that transformers computes for a parameter, once more with memory."""
    place, _, attribute = name.rpartition(".")
    module = copy.copy(whole.get_submodule(place))
    shapes = {own: parameter.shape for own, parameter in module.named_parameters(recurse=False)}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        module._parameters = dict.fromkeys(module._parameters) | {
            own: nn.Parameter(torch.empty(shape)) for own, shape in shapes.items()
        }
        torch.manual_seed(zlib.crc32(name.encode()))
        whole._init_weights(module)
    return Given(module.get_parameter(attribute).detach())


def _distribution(name: str, done: list[tuple[str, tuple[Any, ...]]]) -> InitialValues:
    found: InitialValues | None = None
    for operation, args in done:
        match operation, found:
            case "normal_", _:
                mean, std = (*args, *(0.0, 1.0)[len(args) :])
                found = Normal(std=std, mean=mean)
            case "uniform_", _:
                low, high = (*args, *(0.0, 1.0)[len(args) :])
                found = Uniform(low=low, high=high)
            case "zero_", _:
                found = Constant(0.0)
            case "fill_", _:
                found = Constant(float(args[0]))
            case "erfinv_", Uniform():
                found = Normal(std=0.5**0.5)  # a truncated normal distribution is made of these steps
            case "mul_", Normal():
                found = Normal(std=found.std * args[0], mean=found.mean * args[0])
            case "add_", Normal():
                found = Normal(std=found.std, mean=found.mean + args[0])
            case "clamp_", Normal():
                low, high = args
                found = TruncatedNormal(std=found.std, mean=found.mean, low=low, high=high)
            case _:
                found = None
                break
    if found is None:
        raise UserError(f"model.path: the initial values of {name} are not known ({done or 'none are given'})")
    return found


@contextmanager
def _untouched(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep transformers' initialization from touching these parameters."""
    kept = [*parameters]
    for parameter in kept:
        setattr(parameter, INITIALIZED, True)
    try:
        yield
    finally:
        for parameter in kept:
            delattr(parameter, INITIALIZED)


# Configs


def decoder_of(path: str) -> type[Transformers]:
    """Return the model class of a folder with a config.json, or of a model type with its defaults.

    Raises:
        UserError: there is no such config, or no decoder that we can train.
    """
    try:
        config = _read(path)
        settings = config.to_dict()
        settings.pop("quantization_config", None)  # of files: the model that is trained has wide weights
    except UserError:
        raise
    except Exception as error:  # whatever the checks of a config raise
        reason = str(error).strip().split("\n")[0]
        raise UserError(f"model.path: {path}: its config.json cannot be read: {reason}") from None
    try:
        return decoder_class(settings)
    except UserError as error:
        raise UserError(f"model.path: {path}: {error}") from error


def decoder_class(settings: dict[str, Any]) -> type[Transformers]:
    """Return the model class of a config.

    Args:
        settings: content of its config.json.

    Raises:
        UserError: it is of no decoder that we can train.
    """
    if not isinstance(settings.get("vocab_size"), int):
        raise UserError(f"a model of type {settings.get('model_type')} has no vocab_size: not supported")
    fields = [
        (name, bool | int | float | str | None if value is None else type(value), field(default=value))
        for name, value in _scalars(settings).items()
    ]
    args_cls = make_dataclass("TransformersArgs", fields, bases=(ModelArgs,), frozen=True, kw_only=True)
    length = settings.get("max_position_embeddings") or MAX_LENGTH
    args = args_cls(vocab_size=settings["vocab_size"], max_seq_len=length)
    with torch.device("meta"):
        whole = _build(settings, args)
    _check(whole)
    name = f"Transformers{type(whole.config).__name__.removesuffix('Config')}"
    members = {"settings": settings, "flavors": {"default": args}, "__module__": __name__}
    return type(name, (Transformers,), {**members, "formats": Formats(hugging_face=_format(whole, settings))})


def _scalars(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a config that can be arguments of a model, beside vocab_size."""
    skipped = {*PretrainedConfig().to_dict(), "model_type", "vocab_size"} - {"tie_word_embeddings"}
    theta = (settings.get("rope_parameters") or {}).get("rope_theta")  # of transformers 5
    return ({} if theta is None else {"rope_theta": theta}) | {
        name: value
        for name, value in settings.items()
        if isinstance(value, bool | int | float | str | None) and name not in skipped and name.isidentifier()
    }


def _read(path: str) -> PretrainedConfig:
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if path not in CONFIG_MAPPING:
            near = did_you_mean(path, CONFIG_MAPPING)
            raise UserError(f"model.path: there is no folder {path}, and no model type of that name{near}")
        return AutoConfig.for_model(path)
    stated = json.loads(read_small(folder / "config.json"))
    if "auto_map" in stated and stated.get("model_type") not in CONFIG_MAPPING:
        raise UserError(f"model.path: {path} has code of its own (auto_map), which is not run: name it in model.file")
    return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _config(settings: Mapping[str, Any], args: ModelArgs) -> PretrainedConfig:
    own = {name: value for name, value in asdict(args).items() if name != "max_seq_len"}
    if rope := settings.get("rope_parameters"):
        own["rope_parameters"] = {**rope, "rope_theta": own.pop("rope_theta")} if "rope_theta" in own else rope
    changed = {**settings, **own}
    if small := next((name for name in SIZES if type(changed.get(name)) is int and changed[name] < 1), None):
        raise ValueError(f"{small} must be at least 1, got {changed[small]}")
    kinds, blocks = changed.get("layer_types"), changed.get("num_hidden_layers")
    if kinds and blocks and len(kinds) != blocks:
        changed["layer_types"] = [kinds[number % len(kinds)] for number in range(blocks)]
    for name, value in changed.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= args.vocab_size:
            changed[name] = None  # of another tokenizer
    return AutoConfig.for_model(**changed)


def _build(settings: Mapping[str, Any], args: ModelArgs) -> PreTrainedModel:
    """Return the model of transformers, on the default device.

    Raises:
        UserError: there is none of this config.
    """
    try:
        named = {"attn_implementation": ATTENTION, "experts_implementation": ATTENTION}
        return AutoModelForCausalLM.from_config(_config(settings, args), **named)
    except Exception as error:  # whatever the checks of a config raise
        reason = str(error.__cause__ or error).splitlines()[0]
        raise UserError(f"transformers builds no decoder of type {settings['model_type']}: {reason}") from error


def _check(whole: PreTrainedModel) -> None:
    decoder, head = whole.base_model, whole.get_output_embeddings()
    problem = None
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        problem = "has no list `layers` of its blocks"
    elif not isinstance(head, nn.Linear) or head.bias is not None:
        problem = "has a head that is no plain matmul"
    elif own := [name for name, _ in decoder.named_parameters(recurse=False)]:
        problem = f"has parameters outside of its layers: {', '.join(own)}"
    if problem:
        raise UserError(f"{type(whole).__name__} {problem}: not supported")
    _factor(whole)


def _format(whole: PreTrainedModel, settings: Mapping[str, Any]) -> HuggingFace:
    names = {re.sub(r"\blayers\.\d+\.", "layers.{layer}.", name): None for name in whole.state_dict()}
    entries = [Entry(own_name(whole, name), name) for name in names]
    return _WholeConfig(
        architecture=type(whole).__name__,
        model_type=settings["model_type"],
        tensors=Table(entries),
        fields={},
        settings=settings,
    )


@dataclass(frozen=True, kw_only=True)
class _WholeConfig(HuggingFace):
    settings: Mapping[str, Any]

    def to_args(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a config.json that are arguments of the model, and that its logits can depend on.

        Raises:
            ValueError: it describes another model type, or has another RoPE.
        """
        super().to_args(config)
        found, _ = complete(config, self.model_type)
        if found.get("rope_parameters") != self.settings.get("rope_parameters"):
            raise ValueError(f"rope_parameters are {found.get('rope_parameters')}: name this folder in model.path")
        names = [name for name in _scalars(self.settings) if name in found and not name.endswith("_token_id")]
        return {name: found[name] for name in names if name not in ("initializer_range", "use_cache")}

    def to_config(self, args: Any) -> dict[str, Any]:
        stated = json.loads(_config(self.settings, args).to_json_string(use_diff=False))  # without infinities
        return {**stated, "architectures": [self.architecture]}
