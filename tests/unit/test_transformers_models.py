"""Decoders of transformers as models: logits, initial values, documents, windows, sinks, export."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.decoders import FAMILIES, SIZE, config_of
from tests.helpers import TinyRun, built, titanlite, train_on_this_rank
from titanlite.models.base import build_on_meta
from titanlite.models.registry import resolve_model
from titanlite.models.transformers import Transformers, decoder_of
from titanlite.ops.attention import Documents
from titanlite.parallelize.materialize import allocate, draw_weights
from titanlite.runtime.errors import ConfigError

CPU = torch.device("cpu")
KEEPS_DOCUMENTS_APART = [name for name in FAMILIES if name not in ("lfm2", "qwen3_next")]


def model_of(name: str, *, gain: float = 5.0, **changes: Any) -> Transformers:
    cls = decoder_of(name)
    sizes = {"num_hidden_layers": 2, **SIZE, **FAMILIES[name], **changes}
    args = next(iter(cls.flavors.values()))
    model = build_on_meta(cls, replace(args, vocab_size=64, **{k: v for k, v in sizes.items() if hasattr(args, k)}))
    assert isinstance(model, Transformers)
    allocate(model, CPU, CPU)
    draw_weights(model, device=CPU, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)  # so that attention is not even
    return model.eval()


def theirs(model: Transformers) -> Any:
    """Return the model of transformers with the same weights and its own attention."""
    other = transformers.AutoModelForCausalLM.from_config(model._whole.config, attn_implementation="eager")
    table = type(model).formats.hugging_face
    assert table
    names = {name: table.tensors.find(name) for name in model.state_dict()}
    state = {found[1]: model.state_dict()[name] for name, found in names.items() if found}
    found = other.load_state_dict(state, strict=False)
    assert not found.unexpected_keys
    assert set(found.missing_keys) <= {"lm_head.weight"}
    other.tie_weights()
    return other.eval()


def tokens_of(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = model_of(name)
    expected = theirs(model)(tokens_of()).logits
    assert expected.std() > 0.05
    assert torch.allclose(model(tokens_of()), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_initial_values_have_the_scales_of_transformers(name: str) -> None:
    """Each parameter has the mean and the deviation of the family's own initialization."""
    model = model_of(name, gain=1.0)
    torch.manual_seed(0)
    other = transformers.AutoModelForCausalLM.from_config(model._whole.config)
    own = dict(other.named_parameters())
    table = type(model).formats.hugging_face
    assert table
    for name_here, parameter in model.named_parameters():
        found = table.tensors.find(name_here)
        assert found
        expected = own[found[1]].float()
        size = expected.numel() ** -0.5
        spread = float(expected.detach().std()) if expected.numel() > 1 else 0.0
        if spread and expected.numel() < 64:
            continue  # too few to compare
        assert float(parameter.mean()) == pytest.approx(float(expected.mean()), abs=8 * spread * size + 1e-6), name_here
        assert float(parameter.std()) == pytest.approx(spread, rel=8 * size, abs=1e-6), name_here


@pytest.mark.parametrize("name", KEEPS_DOCUMENTS_APART)
def test_documents_are_computed_as_if_alone(name: str) -> None:
    model, tokens = model_of(name), tokens_of(1)
    places, ids = torch.arange(24), (torch.arange(24) >= 11).int()
    documents = Documents((places - 11 * ids)[None], ids[None], torch.tensor([0, 11, 24], dtype=torch.int32))
    found = model(tokens, documents=documents)
    alone = torch.cat((model(tokens[:, :11]), model(tokens[:, 11:])), 1)
    assert torch.allclose(found, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, model(tokens), atol=1e-2), "otherwise they see each other"


def test_a_window_or_a_sink_that_is_left_out_shows() -> None:
    """A control of the tests above: the same weights with another window, or without sinks, give other logits."""
    model = model_of("gpt_oss")
    expected = theirs(model)(tokens_of()).logits
    other = model_of("gpt_oss", sliding_window=6)
    assert not torch.allclose(other(tokens_of()), expected, atol=1e-3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.fill_(-100.0)
    assert not torch.allclose(model(tokens_of()), expected, atol=1e-3)


def test_configs_may_come_from_a_folder_and_sizes_are_checked(tmp_path: Path) -> None:
    transformers.Olmo2Config(**SIZE, num_hidden_layers=3, vocab_size=99).save_pretrained(tmp_path)
    spec = resolve_model("transformers", None, {"num_hidden_layers": 1}, path=str(tmp_path), tokenizer_size=200)
    assert (spec.args.vocab_size, len(spec.build().layers)) == (256, 1)
    for args, key in (({"hidden_sise": 3}, "model.args.hidden_sise"), ({"hidden_size": "x"}, "model.args.hidden_size")):
        with pytest.raises(ConfigError, match=key):
            resolve_model("transformers", None, args, path=str(tmp_path))
    with pytest.raises(ConfigError, match=r"model\.args"):
        resolve_model("transformers", None, {"num_attention_heads": 0}, path=str(tmp_path)).build()
    for name, path, key in (
        ("transformers", "olmo22", r"model\.path"),
        ("transformers", None, r"model\.path"),
        ("llama3", "olmo2", r"model\.path"),
        ("transformers", "gemma2", r"model\.path: .*final_logit_softcapping"),
        ("transformers", "t5", r"model\.path"),
        ("transformers", "gpt2", r"model\.path"),
    ):
        with pytest.raises(ConfigError, match=key):
            resolve_model(name, None, {}, path=path)


@pytest.mark.slow
@pytest.mark.usefixtures("single_process_group")
def test_a_trained_model_is_exported_under_its_own_names(tiny: TinyRun) -> None:
    config_of(tiny, "olmo2")
    run = train_on_this_rank(tiny.config("--training.steps=3"), 0, 1)
    out, args = tiny.folder / "exported", ["--config", str(tiny.toml), "--no-tokenizer"]
    code, _, errors = titanlite("checkpoint", "export", str(tiny.folder / "outputs" / "tiny"), "--out", str(out), *args)
    assert code == 0, errors
    expected = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    tokens = tokens_of() % run.model.args.vocab_size
    found = run.model.eval()(tokens)
    assert torch.allclose(found, expected(tokens).logits, atol=1e-5)
    state = expected.state_dict()
    assert all(torch.equal(state[f"model.{name}"], tensor.full_tensor()) for name, tensor in whole(run).items())
    again = tiny.config("--job.name=again", f"--checkpoint.initial_load_path={out}", "--training.steps=1")
    other = built(0, 1, again)
    assert all(
        torch.equal(tensor.full_tensor(), whole(run)[name].full_tensor()) for name, tensor in whole(other).items()
    )


def whole(run: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in run.model.state_dict().items() if not name.startswith("lm_head")}
