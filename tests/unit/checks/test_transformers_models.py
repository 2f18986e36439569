"""Decoders of transformers as models: logits, initial values, documents, windows, sinks, export."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from tests.support.decoders import FAMILIES, SIZE, config_of
from tests.support.helpers import TinyRun, built, mentions, train_on_this_rank
from tests.support.layouts import whole as gathered
from tests.support.operators import Operators
from titanlite.checks.preflight import preflight
from titanlite.checks.transformers import check_forward
from titanlite.models.base import build_on_meta
from titanlite.models.pytorch_layers import use_kernels
from titanlite.models.registry import resolve_model
from titanlite.models.transformers import ATTENTION, Transformers, attend, decoder_of
from titanlite.ops.attention import Documents
from titanlite.ops.cpu import CpuKernels
from titanlite.parallelize.materialize import allocate, draw_weights
from titanlite.runtime.errors import ConfigError
from titanlite.runtime.process_group import Ranks
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_source

CPU = torch.device("cpu")


def model_of(name: str, **changes: Any) -> Transformers:
    """Return a model with its initial values."""
    cls = decoder_of(name)
    sizes = {"num_hidden_layers": 2, **SIZE, **FAMILIES.get(name, {}), **changes}
    args = next(iter(cls.flavors.values()))
    model = build_on_meta(cls, replace(args, vocab_size=64, **{k: v for k, v in sizes.items() if hasattr(args, k)}))
    assert isinstance(model, Transformers)
    allocate(model, CPU, CPU)
    draw_weights(model, device=CPU, seed=0)
    return model.eval()


@torch.no_grad()
def sharpen(model: Transformers) -> None:
    """Scale matrices so that attention is not even."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(5.0)


class Family:
    """A model with sharp attention, and what transformers has of the same config."""

    def __init__(self, name: str) -> None:
        self.model = model_of(name)
        self.initial = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        sharpen(self.model)
        torch.manual_seed(0)
        config = deepcopy(self.model._whole.config)  # or ours would have their attention, too
        theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        table = type(self.model).formats.hugging_face
        assert table
        names = {name: table.tensors.find(name) for name in self.model.state_dict()}
        own = {name: parameter.detach().clone() for name, parameter in theirs.named_parameters()}
        self.their_initial = {name: own[found[1]].float() for name, found in names.items() if found and found[1] in own}
        state = {found[1]: self.model.state_dict()[name] for name, found in names.items() if found}
        found = theirs.load_state_dict(state, strict=False)
        assert not found.unexpected_keys
        assert set(found.missing_keys) <= {"lm_head.weight"}
        theirs.tie_weights()
        self.their_logits = theirs.eval()(tokens_of()).logits


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return Family(request.param)


def tokens_of(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(0, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def test_logits_are_those_of_transformers(family: Family) -> None:
    assert family.their_logits.std() > 0.05
    assert torch.allclose(family.model(tokens_of()), family.their_logits, rtol=1e-5, atol=1e-5)


def test_initial_values_have_the_scales_of_transformers(family: Family) -> None:
    """Each parameter has the mean and the deviation of the family's own initialization."""
    for name, parameter in family.initial.items():
        expected = family.their_initial[name]
        size = expected.numel() ** -0.5
        spread = float(expected.std()) if expected.numel() > 1 else 0.0
        if spread and expected.numel() < 64:
            continue  # too few to compare
        assert float(parameter.mean()) == pytest.approx(float(expected.mean()), abs=8 * spread * size + 1e-6), name
        assert float(parameter.std()) == pytest.approx(spread, rel=8 * size, abs=1e-6), name


@pytest.mark.parametrize("family", [*FAMILIES][:-2], indirect=True)  # hybrid ones do not
def test_documents_are_computed_as_if_alone(family: Family) -> None:
    model, tokens = family.model, tokens_of(1)
    places, ids = torch.arange(24), (torch.arange(24) >= 11).int()
    documents = Documents((places - 11 * ids)[None], ids[None], torch.tensor([0, 11, 24], dtype=torch.int32))
    found = model(tokens, documents=documents)
    alone = torch.cat((model(tokens[:, :11]), model(tokens[:, 11:])), 1)
    assert torch.allclose(found, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found, model(tokens), atol=1e-2), "otherwise they see each other"


def test_a_window_or_a_sink_that_is_left_out_shows() -> None:
    """A control of the tests above: the same weights with another window, or without sinks, give other logits."""
    found = Family("gpt_oss")
    model, expected = found.model, found.their_logits
    other = model_of("gpt_oss", sliding_window=6)
    sharpen(other)
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
        ("transformers", "gemma2", r"model\.path: .*logits"),
        ("transformers", "gemma3", r"model\.path: .*vocab_size"),
        ("transformers", "gemma4_assistant", r"model\.path"),
        ("transformers", "t5", r"model\.path"),
        ("transformers", "gpt2", r"model\.path"),
    ):
        with pytest.raises(ConfigError, match=key):
            resolve_model(name, None, {}, path=path)


def test_mistakes_of_a_path_are_one_short_line(tmp_path: Path) -> None:
    """transformers itself names all of its model types, or asks for code to be trusted."""
    (tmp_path / "config.json").write_text('{"model_type": "new", "auto_map": {"AutoConfig": "configuration_new.New"}}')
    (tmp_path / "configuration_new.py").write_text("raise SystemExit('run')")
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.json").write_text("{")
    for path, args, named in (
        ("olmo99", {}, ["olmo99", "olmo"]),
        ("Qwen/Qwen3-8B", {}, ["Qwen/Qwen3-8B"]),
        (str(tmp_path), {}, [tmp_path, "auto_map", "model.file"]),
        (str(tmp_path / "empty"), {}, [tmp_path / "empty"]),
        (str(tmp_path / "damaged"), {}, [tmp_path / "damaged"]),
        ("qwen3", {"num_hidden_layers": 0}, ["num_hidden_layers", 1, 0]),
        ("qwen3", {"hidden_size": -8}, ["hidden_size", 1, "-8"]),
    ):
        with pytest.raises(ConfigError) as error:
            resolve_model("transformers", None, args, path=path).build()
        assert mentions(str(error.value), "model.args" if args else "model.path", *named)
        assert len(str(error.value).splitlines()) == 1
        assert len(str(error.value)) < 250 + len(path)


def tried(name: str, *, with_documents: bool = False, **changes: Any) -> None:
    """Compare a decoder of transformers' own sizes with transformers' own forward."""
    check_forward(resolve_model("transformers", None, changes, path=name), with_documents=with_documents)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("qwen2_moe", {"sliding_window": 4096}),
        ("phimoe", {"sliding_window": 2047}),
        ("doge", {"sliding_window": 512}),
        ("hyperclovax", {"logits_scaling": 0.125}),
        ("granite", {"logits_scaling": 8.0}),
        ("cohere2", {"logit_scale": 0.25}),
        ("qwen3_5_text", {}),
        ("zamba2", {}),
    ],
)
def test_decoders_that_are_taken_compute_what_transformers_does(name: str, changes: dict[str, Any]) -> None:
    """Windows that only masks know, masks that depend on the tokens, factors of logits, and kinds of layers."""
    tried(name, **changes)


@pytest.mark.long
@pytest.mark.parametrize("name", ["xglm", "gpt_neox_japanese", "inkling_text"])
def test_decoders_that_would_be_computed_otherwise_are_refused(name: str) -> None:
    """Two are not causal without a mask, and one adds biases to scores."""
    with pytest.raises(ConfigError, match=r"^model\.path"):
        tried(name)


@pytest.mark.long
def test_decoders_that_mix_documents_are_refused() -> None:
    tried("olmo2", with_documents=True)
    tried("gemma3_text", with_documents=True)
    for name in ("lfm3", "doge"):
        tried(name)
        with pytest.raises(ConfigError, match=r"^data\.document_mask"):
            tried(name, with_documents=True)


LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 4.0, 9.0], "rope_theta": 10000.0}


def with_limit(name: str, limit: int, folder: Path) -> str:
    """Return the folder of a config whose positions depend on the length beyond `limit` tokens."""
    sizes: dict[str, Any] = {**SIZE, "num_hidden_layers": 2, "vocab_size": 64, "pad_token_id": 0}
    if name in ("phi3", "phimoe"):
        scales = {"short_mscale": 1.0, "long_mscale": 1.2, "factor": 8.0} if name == "phimoe" else {}
        rope = {"rope_type": "longrope", **LONG, **scales, "original_max_position_embeddings": limit}
        sizes |= {"max_position_embeddings": 8 * limit, "original_max_position_embeddings": limit}
    else:
        rope = {"rope_type": name.partition(" ")[2], "factor": 4.0, "rope_theta": 10000.0}
        sizes["max_position_embeddings"] = limit
        if "dynamic" not in name:
            rope |= {"original_max_position_embeddings": limit // 4}
    config = transformers.AutoConfig.for_model(name.partition(" ")[0], **sizes, rope_parameters=rope)
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["phi3", "phimoe", "llama dynamic"])
def test_positions_that_depend_on_the_length_are_refused_with_documents(name: str, tmp_path: Path) -> None:
    """Where sequences are longer than the limit, a short document would be computed as the longest one asks for."""
    spec = resolve_model("transformers", None, {}, path=with_limit(name, 256, tmp_path))
    check_forward(spec, with_documents=True, seq_len=256)
    check_forward(spec, with_documents=False, seq_len=512)
    with pytest.raises(ConfigError) as error:
        check_forward(spec, with_documents=True, seq_len=512)
    assert mentions(str(error.value), "data.document_mask", "training.seq_len", "256")


def test_positions_that_only_depend_on_the_place_are_taken(tmp_path: Path) -> None:
    spec = resolve_model("transformers", None, {}, path=with_limit("llama yarn", 256, tmp_path))
    check_forward(spec, with_documents=True, seq_len=512)


def without_masks(*arguments: Any, **options: Any) -> Any:
    module, q, k, v, _ = arguments
    return attend(module, q, k, v, None, **options)


def without_scaling(*arguments: Any, **options: Any) -> Any:
    return attend(*arguments, **{**options, "scaling": None})


def backwards(*arguments: Any, **options: Any) -> Any:
    out_BLNH, _ = attend(*arguments, **options)
    return out_BLNH.flip(1), None


@pytest.mark.parametrize(
    ("name", "plant"), [("mistral", without_masks), ("gpt_oss", without_masks), ("granite", without_scaling)]
)
def test_a_planted_mistake_of_attention_shows(name: str, plant: Any) -> None:
    changes: dict[str, Any] = {"attention_multiplier": 0.01} if name == "granite" else {}
    AttentionInterface.register(ATTENTION, plant)
    try:
        with pytest.raises(ConfigError, match=r"^model\.path"):
            tried(name, **changes)
    finally:
        AttentionInterface.register(ATTENTION, attend)
    tried(name, **changes)


def test_soft_caps_of_attention_are_kept_and_those_of_logits_are_refused(tmp_path: Path) -> None:
    def write(cap_of_logits: float | None) -> None:
        caps: Any = {"attn_logit_softcapping": 0.05, "final_logit_softcapping": cap_of_logits}
        transformers.Gemma2Config(**SIZE, **caps, head_dim=8, num_hidden_layers=2).save_pretrained(tmp_path)

    write(30.0)
    with pytest.raises(ConfigError) as error:
        tried(str(tmp_path))
    assert mentions(str(error.value), "model.path", "final_logit_softcapping", "null")
    write(None)
    tried(str(tmp_path))
    tried(str(tmp_path), with_documents=True)
    AttentionInterface.register(ATTENTION, lambda *args, softcap, **options: attend(*args, **options))
    try:
        with pytest.raises(ConfigError, match=r"^model\.path"):
            tried(str(tmp_path))
    finally:
        AttentionInterface.register(ATTENTION, attend)


def test_preflight_compares_a_decoder_of_transformers(tiny: TinyRun) -> None:
    config_of(tiny, "olmo2")
    preflight(tiny.config(), Ranks(0, 1, 0, 1), CPU)
    tiny.toml.write_text(tiny.toml.read_text().replace('"olmo2"', '"xglm"').replace("hidden_size", "d_model"))
    text = tiny.toml.read_text()
    start = text.index("args = {")
    tiny.toml.write_text(text[:start] + "args = {num_layers = 2}" + text[text.index("}", start) + 1 :])
    with pytest.raises(ConfigError, match=r"^model\.path"):
        preflight(tiny.config(), Ranks(0, 1, 0, 1), CPU)


@pytest.mark.parametrize("name", ["gemma3_text", "stablelm", "glm4_moe", "gpt_oss"])
def test_gradients_in_bfloat16_on_a_cpu_are_added_up_in_float32(name: str) -> None:
    """Of the table, also in a subclass of nn.Embedding, of LayerNorm and of experts. Matmuls are of the kernels."""

    def is_router(matmul: tuple[Tensor, ...]) -> bool:
        return 4 in [size for tensor in matmul for size in tensor.shape]  # experts, which nothing else has

    kept: list[dict[str, Tensor]] = []
    tokens = torch.randint(0, 8, (32, 64), generator=torch.Generator().manual_seed(0)) ** 2 // 2
    for dtype in (torch.bfloat16, torch.float32):
        model = model_of(name, tie_word_embeddings=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data = parameter.bfloat16().to(dtype)
        use_kernels(model, CpuKernels(hardware_bfloat16=False), CPU)
        with Operators() as mode:
            model(tokens).float().square().mean().backward()
        matmuls = [args[:3] for func, args in mode.calls if func.overloadpacket.__name__ in ("mm", "addmm")]
        assert {tensors[0].dtype for tensors in matmuls if not is_router(tensors)} == {torch.float32}
        kept.append({name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None})
    found, expected = kept
    for key in expected:
        module = model.get_submodule(key.rpartition(".")[0])
        if isinstance(module, nn.Embedding | nn.LayerNorm) or hasattr(module, "_apply_gate"):
            assert (found[key] - expected[key]).norm() < 0.012 * expected[key].norm(), key


def test_dropout_of_the_decoder_itself_ends_in_evaluation() -> None:
    """The decoder of transformers is no child of ours, and hears of `eval` and `train` all the same."""
    model, tokens = model_of("biogpt"), tokens_of()
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.slow
@pytest.mark.usefixtures("single_process_group")
def test_a_trained_model_is_exported_under_its_own_names(tiny: TinyRun) -> None:
    config_of(tiny, "olmo2")
    run = train_on_this_rank(tiny.config("--training.steps=3"), 0, 1)
    out, args = tiny.folder / "exported", ["--config", str(tiny.toml), "--no-tokenizer"]
    assert cli.run(["checkpoint", "export", str(tiny.folder / "outputs" / "tiny"), "--out", str(out), *args]) == 0
    source = open_source(str(tiny.folder / "outputs" / "tiny"), config=tiny.toml)
    AttentionInterface.register(ATTENTION, backwards)
    try:
        with pytest.raises(ConfigError, match=r"^model\.path"):
            load_model(source)
    finally:
        AttentionInterface.register(ATTENTION, attend)
    load_model(source)
    expected = transformers.AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
    tokens = tokens_of() % run.model.args.vocab_size
    found = run.model.eval()(tokens)
    assert torch.allclose(found, expected(tokens).logits, atol=1e-5)
    state = expected.state_dict()
    assert all(torch.equal(state[f"model.{name}"], gathered(tensor)) for name, tensor in whole(run).items())
    again = tiny.config("--job.name=again", f"--checkpoint.initial_load_path={out}", "--training.steps=1")
    other = built(0, 1, again)
    assert all(torch.equal(gathered(tensor), gathered(whole(run)[name])) for name, tensor in whole(other).items())


def whole(run: Any) -> dict[str, Any]:
    return {name: tensor for name, tensor in run.model.state_dict().items() if not name.startswith("lm_head")}
