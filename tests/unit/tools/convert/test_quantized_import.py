"""Import of released files with quantized weights: float8 in blocks (DeepSeek-V3) and MXFP4 (gpt-oss)."""

import gc
import json
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from tests.support import quantized as files
from tests.support.families import built, oracle, renamed
from tests.support.foreign import assert_same
from tests.support.helpers import TinyRun, mentions
from tests.support.whole_runs import trained
from titanlite.models.decoder import Decoder
from titanlite.models.deepseek_v3 import DeepseekV3
from titanlite.models.formats import Entry, Table
from titanlite.models.gpt_oss import GptOss
from titanlite.state import model_state
from titanlite.tools import cli
from titanlite.tools.convert import quantized
from titanlite.tools.convert.hugging_face import HuggingFaceFolder
from titanlite.tools.convert.reader import ForeignReader, ForeignTensor, read_whole
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.convert.weights import find_flavor

RANDOM = torch.Generator().manual_seed(3)
TOKENS = torch.randint(0, 101, (2, 40), generator=torch.Generator().manual_seed(0))


def stored(name: str, tensor: Tensor) -> ForeignTensor:
    return ForeignTensor.in_one_part(name, tensor.shape, tensor.dtype, tensor.__getitem__)


def weight_of(config: dict[str, Any], **tensors: Tensor) -> ForeignTensor:
    """Return the weight that codes and scales stand for, by the form that a config.json describes."""
    form = quantized.form_of({"quantization_config": config}, "config.json")
    assert form
    found = form.widened({name: stored(name, tensor) for name, tensor in tensors.items()})
    assert [*found] == ["w"]
    return found["w"]


def read(weight: ForeignTensor) -> Tensor:
    return weight.read(tuple(slice(0, size) for size in weight.shape))


def float8(rows: int = 20, columns: int = 26, block: tuple[int, int] = (8, 6)) -> tuple[ForeignTensor, Tensor]:
    """Return a weight and what it must be. The last blocks are smaller ones."""
    codes, scales = files.to_float8(torch.randn(rows, columns, generator=RANDOM), *block)
    config = {**files.FLOAT8, "weight_block_size": [*block]}
    return weight_of(config, w=codes, w_scale_inv=scales), files.of_float8(codes, scales, *block)


def mxfp4() -> tuple[ForeignTensor, Tensor]:
    """Return a weight with each byte and each exponent, and what transformers reads."""
    blocks = torch.arange(256).repeat(3).view(2, 8, 3, 16).to(torch.uint8)
    scales = torch.linspace(0, 252, 48).round().view(2, 8, 3).to(torch.uint8)
    found = weight_of(files.MXFP4, w_blocks=blocks, w_scales=scales)
    return found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)


def test_the_sixteen_values() -> None:
    expected = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
    assert quantized.FP4.tolist() == expected == FP4_VALUES
    assert quantized.FP4.signbit().tolist() == [False] * 8 + [True] * 8
    one = weight_of(
        files.MXFP4,
        w_blocks=torch.arange(16, dtype=torch.uint8).mul(17).view(1, 1, 1, 16),
        w_scales=torch.full((1, 1, 1), 128, dtype=torch.uint8),
    )
    assert read(one).flatten().tolist() == [2 * value for value in expected for _ in range(2)]


def check_values(make: Callable[[], tuple[ForeignTensor, Tensor]]) -> None:
    """Check a weight as a whole, and regions that begin and end within blocks."""
    weight, expected = make()
    assert weight.shape == expected.shape
    assert torch.equal(read(weight).float(), expected)
    for _ in range(40):
        ends = [sorted(torch.randperm(size + 1, generator=RANDOM)[:2].tolist()) for size in weight.shape]
        region = tuple(slice(*of_dim) for of_dim in ends)
        assert torch.equal(weight.read(region).float(), expected[region]), region


@pytest.mark.parametrize("make", [float8, mxfp4])
def test_values_are_exact_in_any_region(make: Callable[[], tuple[ForeignTensor, Tensor]]) -> None:
    check_values(make)


FACTORS, BLOCKS = quantized._factors, quantized._blocks
PLANTED: dict[str, tuple[str, Any]] = {
    "halves of bytes swapped": (
        "PAIRS",
        quantized.PAIRS.view(torch.bfloat16).view(256, 2).flip(1).view(torch.int32).flatten(),
    ),
    "neighbour's scale": ("_factors", lambda *words: FACTORS(*words).roll(1, -1)),
    "scale of the block above": ("_factors", lambda *words: FACTORS(*words).roll(1, -2)),
    "first block": ("_blocks", lambda wanted, size: BLOCKS(slice(0, wanted.stop - wanted.start), size)),
}


@pytest.mark.parametrize(
    ("make", "mistake"), [(mxfp4, fault) for fault in PLANTED] + [(float8, fault) for fault in [*PLANTED][1:]]
)
def test_planted_mistakes_show(
    make: Callable[[], tuple[ForeignTensor, Tensor]], mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, *PLANTED[mistake])
    with pytest.raises((AssertionError, RuntimeError)):
        check_values(make)


def test_scales_may_be_exponents() -> None:
    codes, _ = files.to_float8(torch.randn(8, 8, generator=RANDOM), 4, 4)
    exponents = torch.tensor([[120, 127], [128, 130]], dtype=torch.uint8)
    config = {**files.FLOAT8, "weight_block_size": [4, 4]}
    expected = codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(4, 0).repeat_interleave(4, 1)
    for scales in (exponents, exponents.view(torch.float8_e8m0fnu)):
        assert torch.equal(read(weight_of(config, w=codes, w_scale_inv=scales)), expected)


# Folders


def folder_of(family: str, place: Path) -> Path:
    """Write a folder of a tiny model as its release has it."""
    model = built(family, vocab_size=260, **{"hidden_dim": 64} if family == "gpt_oss" else {})
    theirs = oracle(model).bfloat16()
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # float32 in files of any dtype
            buffer.data = buffer.float()
    theirs.save_pretrained(place)
    files.quantize_folder(place, None if family == "gpt_oss" else (4, 4))
    return place


def theirs_of(folder: Path, dtype: torch.dtype) -> Any:
    """Return the model with the weights that transformers reads."""
    kind = transformers.Mxfp4Config if "gpt_oss" in folder.name else transformers.FineGrainedFP8Config
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=kind(dequantize=True), dtype=dtype, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module", params=["deepseek_v3", "gpt_oss"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(request.param, tmp_path_factory.mktemp("quantized") / request.param)


@pytest.mark.long
def test_weights_and_logits_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        theirs = theirs_of(folder, dtype)
        out = str(tmp_path / str(dtype))
        words = ["--dtype", "float32"] if dtype == torch.float32 else []
        assert cli.run(["checkpoint", "import", str(folder), "--out", out, *words]) == 0
        source = open_source(out)
        stored_dtypes = {entry.properties.dtype for entry in source.metadata.state_dict_metadata.values()}  # pyright: ignore
        ours = load_model(source, dtype=dtype)
        assert isinstance(ours, Decoder)
        found, expected = renamed(ours, model_state(ours)), theirs.state_dict()
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name].to(tensor.dtype), tensor), name
        if dtype == torch.float32:
            assert stored_dtypes == {torch.float32}
            with torch.no_grad():
                logits = theirs(TOKENS).logits
                assert logits.std() > 0.05
                assert (ours(TOKENS) - logits).abs().max() < 5e-6
        else:
            assert stored_dtypes <= {torch.bfloat16, torch.float32}
            assert source.metadata.state_dict_metadata["model.layers.3.feed_forward.w1"].properties.dtype == dtype  # pyright: ignore


@pytest.mark.long
def test_exports_are_not_quantized(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.run(["checkpoint", "export", str(folder), "--out", str(out), "--no-tokenizer", "--check"]) == 0
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    theirs = theirs_of(folder, torch.bfloat16).state_dict()
    found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16).state_dict()
    assert_same(found, theirs)


ONE_STEP = ["--training.steps=1", "--lr_scheduler.warmup_steps=1", "--optimizer.lr=0.0"]


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_run_begins_with_them(folder: Path, tiny: TinyRun) -> None:
    args = {key: value for key, value in vars(open_source(str(folder)).spec.args).items() if key != "max_seq_len"}
    model = [f"--model.name={folder.name}", *(f"--model.args.{key}={json.dumps(value)}" for key, value in args.items())]
    found = trained(tiny.config(*model, *ONE_STEP, f"--checkpoint.initial_load_path={folder}"))
    expected = dict(load_model(open_source(str(folder))).named_parameters())
    assert {name: found[name] for name in expected}.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.long
@pytest.mark.usefixtures("single_process_group")
def test_a_model_of_transformers_begins_with_them(tmp_path: Path, tiny: TinyRun) -> None:
    folder = folder_of("gpt_oss", tmp_path / "gpt_oss")
    text = tiny.toml.read_text()
    sizes = text[text.index("[model.args]") : text.index("[training]")]
    tiny.toml.write_text(text.replace(sizes, f'[model]\nname = "transformers"\npath = "{folder}"\n'))
    found = trained(tiny.config(*ONE_STEP, f"--checkpoint.initial_load_path={folder}"))
    expected = {
        name.removeprefix("model."): parameter
        for name, parameter in theirs_of(folder, torch.float32).named_parameters()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    out, run = tmp_path / "out", tiny.folder / "outputs" / "tiny"
    words = ["checkpoint", "export", str(run), "--config", str(tiny.toml), "--out", str(out), "--no-tokenizer"]
    assert cli.run(words) == 0
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


# What cannot be read


def edited(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edited_tensors(folder: Path, ending: str, change: Callable[[Tensor], Tensor | None]) -> None:
    """Change the first tensor whose name has an ending; None takes it out."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    name = next(name for name in sorted(index["weight_map"]) if name.endswith(ending))
    file = folder / index["weight_map"][name]
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    if changed is None:
        del index["weight_map"][name]
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file(tensors | ({} if changed is None else {name: changed.contiguous()}), file, {"format": "pt"})


MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "method": (lambda folder: edited(folder, quantization_config={"quant_method": "gptq", "bits": 4}), "'gptq'"),
    "no method": (lambda folder: edited(folder, quantization_config={"bits": 4}), "None"),
    "no blocks": (lambda folder: edited(folder, quantization_config={"quant_method": "fp8"}), "weight_block_size"),
    "no description": (lambda folder: edited(folder, quantization_config=None), "float8_e4m3fn"),
    "no scales": (lambda folder: edited_tensors(folder, "_scale_inv", lambda _: None), "weight_scale_inv"),
    "fewer scales": (
        lambda folder: edited_tensors(folder, "_scale_inv", lambda scales: scales[1:]),
        "weight_scale_inv [15, ",
    ),
    "no codes": (lambda folder: edited_tensors(folder, "q_a_proj.weight", lambda _: None), "q_a_proj.weight"),
    "bytes": (
        lambda folder: edited_tensors(folder, "norm.weight", lambda _: torch.ones(64, dtype=torch.uint8)),
        "norm.weight",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_read_is_named_in_one_line(
    mistake: str, tmp_path: Path, float8_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    change, word = MISTAKES[mistake]
    shutil.copytree(float8_folder, tmp_path / "hf")
    change(tmp_path / "hf")
    assert cli.run(["checkpoint", "import", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert mentions(lines[0], "error")
    assert any(word in line for line in lines)
    assert len(lines) == 1 or mistake == "no codes"
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def float8_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("deepseek_v3", tmp_path_factory.mktemp("float8") / "deepseek_v3")


# Memory


def peak_of(action: Callable[[], object]) -> int:
    """Return the bytes of memory by which an action raises the most that this process has used."""

    def kilobytes(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1])

    gc.collect()  # what is freed while the action runs would count as its own
    Path("/proc/self/clear_refs").write_text("5")  # the most is what is in use now
    before = kilobytes("VmRSS")
    action()
    return 1024 * (kilobytes("VmHWM") - before)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_a_stack_of_experts_takes_no_more_memory_than_an_unquantized_one(
    block: tuple[int, int] | None, tmp_path: Path
) -> None:
    """Of 32 MiB in bfloat16, which the system gets back at once."""
    if block:
        entry, shape, names = Entry("w", "w.{expert}"), (1024, 1024), [f"w.{i}" for i in range(16)]
        codes = torch.ones(shape).to(torch.float8_e4m3fn), torch.full((8, 8), 0.5)
        ends, config = ("", "_scale_inv"), {**files.FLOAT8, "weight_block_size": [*block]}
    else:
        entry, shape, names = Entry("w", "w", column=0), (16, 1024, 2048), ["w"]
        rows = 16, 2048, 32
        codes = torch.full((*rows, 16), 34, dtype=torch.uint8), torch.full(rows, 126, dtype=torch.uint8)
        ends, config = ("_blocks", "_scales"), files.MXFP4
    wide = {name: torch.ones(shape, dtype=torch.bfloat16) for name in names}
    narrow = {f"{name}{end}": code.clone() for name in names for end, code in zip(ends, codes, strict=True)}
    peaks = []
    for value, tensors, settings in ((1.0, wide, {}), (0.5, narrow, {"quantization_config": config})):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
        save_file(tensors, folder / "model.safetensors")
        tensors.clear()
        table = Table([entry])
        there = HuggingFaceFolder(folder).tensors(table, {})
        reader = ForeignReader("here", there, table, head_size=None, model_names=["w"])
        peaks.append(peak_of(partial(read_whole, reader, "w")))
        assert (read_whole(reader, "w") == value).all()
    assert peaks[0] > 2**25
    assert peaks[1] < 1.1 * peaks[0]


# Configs of releases


def test_configs_of_releases_give_the_flavors(tmp_path: Path) -> None:
    float8 = {**files.FLOAT8, "weight_block_size": [128, 128]}
    yarn = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
    deepseek = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
        "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "hidden_act": "silu",
        "attention_bias": False, "attention_dropout": 0.0, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "first_k_dense_replace": 3,
        "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": False,
        "rope_scaling": {**yarn, "factor": 40, "beta_fast": 32, "beta_slow": 1}, "quantization_config": float8,
    }  # fmt: skip
    kimi = {
        **deepseek, "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64,
        "vocab_size": 163840, "max_position_embeddings": 131072, "rope_theta": 50000.0, "n_routed_experts": 384,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**yarn, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
    }  # fmt: skip
    gpt_oss = {
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880, "vocab_size": 201088,
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 150000, "hidden_act": "silu",
        "attention_bias": True, "attention_dropout": 0.0, "sliding_window": 128, "num_local_experts": 32,
        "num_experts_per_tok": 4, "swiglu_limit": 7.0, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "quantization_config": files.MXFP4,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    for config, name, flavor in (
        (deepseek, DeepseekV3, "671B"),
        (kimi, DeepseekV3, "Kimi-K2"),
        (gpt_oss, GptOss, "20B"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        folder = HuggingFaceFolder(tmp_path)
        assert folder.family() == name.__module__.rpartition(".")[2]
        assert find_flavor(name, folder.read_args(name) or {}) == flavor
