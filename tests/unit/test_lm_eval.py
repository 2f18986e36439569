"""EleutherAI's lm-evaluation-harness on an exported folder: its values are those of our own model."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.weights import random_model, save_model, small_toml
from titanlite.tools import cli
from titanlite.tools.convert.source import load_model, open_source

TEXTS = ["one two three", "Größe: 12 €, and more of it"]
ROLLING = """
task: tiny_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/texts.jsonl"}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
CHOICE = """
task: tiny_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{folder}/choices.jsonl"}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_an_exported_folder_in_the_harness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    why = "needs the harness: pip install 'lm_eval[hf]'"
    pytest.importorskip("accelerate", reason=why)
    harness = pytest.importorskip("lm_eval", reason=why)
    manager = pytest.importorskip("lm_eval.tasks").TaskManager

    toml = tmp_path / "small.toml"
    toml.write_text(small_toml("qwen3", max_seq_len=128))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        save_model(tmp_path / "run", random_model(toml), toml)
    finally:
        dist.destroy_process_group()
    assert cli.run(["checkpoint", "export", str(tmp_path / "run"), "--out", str(tmp_path / "hf")]) == 0
    model = load_model(open_source(str(tmp_path / "run")))

    def log_probability(context: str, text: str) -> float:
        before, ids = [256, *context.encode()], [*text.encode()]
        with torch.no_grad():
            rows = model(torch.tensor([before + ids]))[0, len(before) - 1 : -1].log_softmax(-1)
        return float(rows[range(len(ids)), ids].sum())

    choices = [["a", "b!", "c"], ["zz", "y y", "é"], ["1", "22", "3"], ["no", "yes", "or"]]
    best = [
        max(range(3), key=lambda i, it=it, n=n: log_probability(f"Question {n}?", f" {it[i]}"))
        for n, it in enumerate(choices)
    ]
    answers = [*best[:3], (best[3] + 1) % 3]  # three of four are what the model prefers
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "rolling.yaml").write_text(ROLLING.format(folder=tmp_path))
    (tasks / "choice.yaml").write_text(CHOICE.format(folder=tmp_path))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "choices.jsonl").write_text(
        "".join(
            json.dumps({"question": f"Question {n}?", "choices": it, "answer": answer}) + "\n"
            for n, (it, answer) in enumerate(zip(choices, answers, strict=True))
        )
    )
    found = {}
    for task, more in (("tiny_choice", {}), ("tiny_text", {"add_bos_token": False})):
        results = harness.simple_evaluate(
            model="hf",
            model_args={"pretrained": str(tmp_path / "hf"), "dtype": "float32", **more},
            tasks=[task],
            task_manager=manager(include_path=str(tasks), include_defaults=False),
            device="cpu",
            batch_size=2,
            bootstrap_iters=0,
        )
        assert results is not None
        found |= results["results"][task]
    nats = -sum(log_probability("", text) for text in TEXTS)
    expected = nats / math.log(2) / sum(len(text.encode()) for text in TEXTS)
    assert found["acc,none"] == 0.75
    assert found["bits_per_byte,none"] == pytest.approx(expected, rel=1e-5)
