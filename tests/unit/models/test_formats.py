"""Tables of other formats against transformers' own names and configs, in both directions."""

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.checkpoint.metadata import MetadataIndex

from titanlite.models.base import Model, ModelArgs, build_on_meta
from titanlite.models.decoder import DecoderArgs
from titanlite.models.formats import Entry, HuggingFace, Table
from titanlite.models.llama3 import SCALING
from titanlite.models.registry import MODELS
from titanlite.tools.convert.reader import ForeignReader, ForeignTensor, Part, read_whole

CASES = [(family, tied) for family in MODELS for tied in (False, True)]


def small(family: str, **changes: Any) -> tuple[type[Model], ModelArgs, HuggingFace]:
    model_cls = MODELS[family]
    hugging_face = model_cls.formats.hugging_face
    assert hugging_face is not None
    return model_cls, replace(model_cls.flavors["debug"], **changes), hugging_face


def persistent(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("family", "tied"), CASES)
def test_names_and_shapes_are_those_of_transformers(family: str, tied: bool) -> None:
    model_cls, args, hugging_face = small(family, tied_head=tied)
    ours = persistent(build_on_meta(model_cls, args))
    if tied:
        del ours["head.output.weight"]
    config = transformers.AutoConfig.for_model(**hugging_face.to_config(args))
    with torch.device("meta"):
        other = transformers.AutoModelForCausalLM.from_config(config)
    assert type(other).__name__ == hugging_face.architecture
    theirs = persistent(other)
    if tied:
        del theirs["lm_head.weight"]
    mapped: dict[str, list[int]] = {}
    for name, shape in ours.items():
        if name.endswith("bias_E") and family in ("gpt_oss", "qwen3_moe", "qwen3_next"):  # no other program has it
            assert hugging_face.tensors.find(name) is None
            continue
        found = hugging_face.tensors.find(name)
        assert found, name
        entry, their_name = found
        own = [*shape[:-2], shape[-1], shape[-2]] if entry.transposed else [*shape]
        own[-1] *= 1 if entry.column is None else 2
        for expert in range(shape[0]) if "{expert}" in their_name else [None]:
            key = their_name if expert is None else their_name.replace("{expert}", str(expert))
            mapped[key] = own if expert is None else own[1:]
            assert (name, entry, expert) in [*hugging_face.tensors.places(key)]
    for name, shape in theirs.items():  # transformers 5 stacks the experts in memory; its files have one for each
        if name not in mapped and name.endswith("experts.gate_up_proj"):
            base = name.removesuffix("gate_up_proj")
            for expert in range(shape[0]):
                assert mapped.pop(f"{base}{expert}.gate_proj.weight") == [shape[1] // 2, shape[2]]
                assert mapped.pop(f"{base}{expert}.up_proj.weight") == [shape[1] // 2, shape[2]]
        elif name not in mapped and name.endswith("experts.down_proj"):
            base = name.removesuffix("down_proj")
            for expert in range(shape[0]):
                assert mapped.pop(f"{base}{expert}.down_proj.weight") == [*shape[1:]]
        else:
            assert mapped.pop(name) == [*shape]
    assert not mapped


@pytest.mark.parametrize("family", MODELS)
def test_every_flavor_survives_its_config(family: str) -> None:
    model_cls, _, hugging_face = small(family)
    for args in model_cls.flavors.values():
        config = hugging_face.to_config(args)
        assert type(args)(**hugging_face.to_args(config)) == replace(args, **_not_in_config(args))
        theirs = transformers.AutoConfig.for_model(**config)
        assert type(args)(**hugging_face.to_args(theirs.to_dict())) == replace(args, **_not_in_config(args))


def _not_in_config(args: Any) -> dict[str, Any]:
    return {"balance_rate": type(args).balance_rate} if hasattr(args, "balance_rate") else {}


def test_other_models_are_refused_with_every_reason() -> None:
    _, args, hugging_face = small("llama3")
    config = hugging_face.to_config(args)
    with pytest.raises(ValueError, match=r"model_type.*'gpt2'.*'llama'"):
        hugging_face.to_args({**config, "model_type": "gpt2"})
    yarn = {"rope_type": "yarn", "factor": 4.0}
    with pytest.raises(ValueError, match=r"\bmlp_bias\b.*\bTrue\b.*\byarn\b"):
        hugging_face.to_args({**config, "mlp_bias": True, "rope_scaling": yarn})
    _, args, hugging_face = small("qwen3_moe")
    with pytest.raises(ValueError, match=r"norm_topk_prob = False.* True"):
        hugging_face.to_args({**hugging_face.to_config(args), "norm_topk_prob": False})


@pytest.mark.parametrize("family", ["llama3", "olmo3", "smollm3"])
def test_heads_of_another_size_are_refused_by_name(family: str) -> None:
    """Some models of Llama's architecture have them, such as pruned ones. Their tensors have other shapes."""
    _, args, hugging_face = small(family)
    assert isinstance(args, DecoderArgs)
    config = hugging_face.to_config(args)
    size = args.dim // args.n_heads
    assert hugging_face.to_args({**config, "head_dim": size}) == hugging_face.to_args(config)
    with pytest.raises(ValueError, match=rf"head_dim = {2 * size}\b.*only {size}\b.*transformers"):
        hugging_face.to_args({**config, "head_dim": 2 * size})


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_without_transformers_every_key_is_needed(family: str, is_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its classes have the defaults; those of version 4 have other keys. What we write is whole."""
    _, args, hugging_face = small(family)
    config = hugging_face.to_config(args)
    expected = hugging_face.to_args(config)
    if is_old:
        monkeypatch.setattr("transformers.__version__", "4.57.1")
    else:
        monkeypatch.setitem(sys.modules, "transformers", None)
    assert hugging_face.to_args(config) == expected
    for key in {*hugging_face.fields.values(), *hugging_face.constants}:
        with pytest.raises(ValueError, match=rf"\b{key}\b"):
            hugging_face.to_args({name: value for name, value in config.items() if name != key})
    ropes = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
    with pytest.raises(ValueError, match=r"\b(rope_theta|full_attention)\b"):
        hugging_face.to_args({name: value for name, value in config.items() if name not in ropes})


def test_without_transformers_two_ropes_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _, args, hugging_face = small("llama3")
    config = hugging_face.to_config(args)
    monkeypatch.setitem(sys.modules, "transformers", None)
    scaling = {"factor": 8.0, "rope_type": "llama3", **SCALING}
    plain = {"rope_type": "default", "rope_theta": 700.0}
    assert hugging_face.to_args({**config, "rope_scaling": scaling})["rope_scaling_factor"] == 8.0
    assert hugging_face.to_args({**config, "rope_parameters": plain})["rope_theta"] == 700.0
    with pytest.raises(ValueError, match="rope_scaling"):
        hugging_face.to_args({**config, "rope_parameters": plain, "rope_scaling": scaling})


def test_names_of_no_entry_have_no_place() -> None:
    table = Table([Entry("layers.{layer}.w", "h.{layer}.e.{expert}.w")])
    assert table.place("h.3.e.12.w") == ("layers.3.w", table.entries[0], 12)
    assert table.find("layers.3.w") == (table.entries[0], "h.3.e.{expert}.w")
    for name in ("h.x.e.1.w", "h.1.e.01.w", "h.1.e.1.w.more", "h.1.e.1xw"):
        assert table.place(name) is None


@pytest.mark.parametrize("family", MODELS)
def test_files_without_a_base_of_rope_have_that_of_transformers(family: str) -> None:
    _, args, hugging_face = small(family)
    config = hugging_face.to_config(args)
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        config.pop(key, None)
    theirs = transformers.AutoConfig.for_model(**config).rope_parameters
    assert hugging_face.to_args(config)["rope_theta"] == theirs.get("full_attention", theirs)["rope_theta"]


@pytest.mark.parametrize("column", [0, 1])
def test_every_second_column_is_read_by_regions(column: int) -> None:
    """As ranks read that have some of the columns each."""
    whole = torch.arange(2 * 3 * 16).view(2, 3, 16)
    stored = ForeignTensor.in_one_part("theirs", whole.shape, whole.dtype, whole.__getitem__)
    table = Table([Entry("ours.0", "theirs", column=0), Entry("ours.1", "theirs", column=1)])
    reader = ForeignReader("here", [stored], table, head_size=None, model_names=["ours.0", "ours.1"])
    name = f"ours.{column}"
    assert reader.shape(f"model.{name}") == (2, 3, 8)
    assert table.find(name) == (table.entries[column], "theirs")
    region = slice(1, 2), slice(0, 3), slice(2, 5)
    found = reader._read(MetadataIndex(f"model.{name}", torch.Size([0, 0, 0])), region)
    assert torch.equal(found, whole[..., column::2][region])


def test_parts_of_a_stack_are_read_one_by_one() -> None:
    whole, seen = torch.arange(5 * 3 * 4).view(5, 3, 4), list[int]()

    def part(first: int, last: int) -> Part:
        def read(region: tuple[slice, ...]) -> torch.Tensor:
            seen.append(region[0].stop - region[0].start)
            return whole[first:last][region]

        return Part((first, 0, 0), (last - first, 3, 4), read)

    stored = ForeignTensor("theirs", (5, 3, 4), whole.dtype, [part(0, 2), part(2, 2), part(2, 5)])
    table = Table([Entry("ours", "theirs", transposed=True)])
    reader = ForeignReader("here", [stored], table, head_size=None, model_names=["ours"])
    assert torch.equal(read_whole(reader, "ours"), whole.transpose(1, 2))
    assert seen == [2, 3]
