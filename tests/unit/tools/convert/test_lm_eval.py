"""Scores are those of lm-evaluation-harness: with its own model on an export, and with a checkpoint as its model.

These run where its package lm_eval is installed. `test_tasks.py` compares with logits of each answer alone anywhere.
"""

import json
import runpy
from pathlib import Path
from typing import Any, cast

import pytest

from tests.support.helpers import TinyRun, mentions, one_process, train_on_this_rank
from titanlite.tools import cli

pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

from tests.unit.tools.tasks.test_tasks import QUESTIONS, SHIPPED, scores_of, write
from titanlite.data.tokenizer import load_tokenizer
from titanlite.ops.cpu import CpuKernels
from titanlite.tools.convert.prompts import opening_ids
from titanlite.tools.convert.source import load_model, open_source
from titanlite.tools.tasks.harness import CheckpointLM, evaluate_tasks
from titanlite.tools.tasks.read import SHIPPED as FOLDER
from titanlite.tools.tasks.read import read_tasks

SEQ_LEN = 64


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    tiny = TinyRun(tmp_path_factory.mktemp("harness"))
    write(tiny.folder, [*QUESTIONS, {"context": "four", "choices": ["one", " two"], "answer": 1}])
    options = ["--data.tokenizer=python-2k", "--model.args.vocab_size=2432", f"--training.seq_len={SEQ_LEN}"]
    with one_process():
        train_on_this_rank(tiny.config(*options, f"--model.args.max_seq_len={SEQ_LEN}"), 0, 1)
    run = str(tiny.folder / "outputs" / "tiny")
    assert cli.run(["checkpoint", "export", run, "--out", str(tiny.folder / "hf")]) == 0
    return tiny


def harness_tasks(tiny: TinyRun) -> list[dict[str, Any]]:
    """The same files, as the harness takes them."""
    files = [*(FOLDER / f"{name}.jsonl" for name in SHIPPED), tiny.folder / "mine.jsonl"]
    kinds = [
        {"output_type": "loglikelihood", "metric_list": [{"metric": "acc"}, {"metric": "perplexity"}]},
        *[
            {
                "output_type": "multiple_choice",
                "doc_to_choice": "choices",
                "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
            }
        ]
        * 2,
    ]
    return [
        {
            "task": file.stem,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tiny.folder / "cache")},
            "test_split": "test",
            "doc_to_text": "context",
            "doc_to_target": "answer",
            **kind,
        }
        for file, kind in zip(files, kinds, strict=True)
    ]


def scored_by_harness(tiny: TinyRun, model: Any) -> tuple[dict[str, Any], dict[str, list[tuple[float, bool]]]]:
    found = simple_evaluate(model=model, tasks=harness_tasks(tiny), bootstrap_iters=0, log_samples=True)
    assert found is not None
    samples = {
        name: [answer for sample in sorted(its, key=lambda sample: sample["doc_id"]) for [answer] in sample["resps"]]
        for name, its in found["samples"].items()
    }
    return found["results"], samples


def own_scores(tiny: TinyRun) -> tuple[dict[str, Any], dict[str, list[tuple[float, bool]]]]:
    source = open_source(str(tiny.folder / "outputs" / "tiny"))
    tokenizer = load_tokenizer("python-2k")
    names = [*SHIPPED, str(tiny.folder / "mine.jsonl")]
    tasks = read_tasks(names, tokenizer=tokenizer, opening=opening_ids(tokenizer, source.config), seq_len=SEQ_LEN)
    model = load_model(source)
    scores = {task.name: scores_of(model, [task], seq_len=SEQ_LEN) for task in tasks}
    pairs = {name: [(-nats, misses == 0) for nats, misses in rows.tolist()] for name, rows in scores.items()}
    return {task.name: task.measure(scores[task.name]) for task in tasks}, pairs


def adapter_of(tiny: TinyRun) -> CheckpointLM:
    source = open_source(str(tiny.folder / "outputs" / "tiny"))
    tokenizer = load_tokenizer("python-2k")
    opening = opening_ids(tokenizer, source.config)
    options: dict[str, Any] = {"tokenizer": tokenizer, "opening": opening, "kernels": CpuKernels()}
    return CheckpointLM(load_model(source), **options, seq_len=SEQ_LEN, batch_size=5)


@pytest.mark.long
def test_scores_are_those_of_the_harness(tiny: TinyRun) -> None:
    metrics, answers = own_scores(tiny)
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "batch_size": 4}
    exported = HFLM(pretrained=str(tiny.folder / "hf"), **options, logits_cache=False)  # see findings/
    assert exported.max_length == SEQ_LEN
    for model in (exported, adapter_of(tiny)):
        results, samples = scored_by_harness(tiny, model)
        assert samples.keys() == answers.keys() == {*SHIPPED, "mine"}
        for name, its in samples.items():
            assert [likelihood for likelihood, _ in its] == pytest.approx(
                [score for score, _ in answers[name]], rel=1e-4
            )
            assert [greedy for _, greedy in its] == [greedy for _, greedy in answers[name]]
            for metric, value in metrics[name].items():
                if metric != "questions":
                    assert results[name][f"{metric},none"] == pytest.approx(value, rel=1e-4), (name, metric)


def test_a_score_does_not_depend_on_other_requests(tiny: TinyRun) -> None:
    """The same tokens are divided into context and answer in two ways, which the harness's own model takes for one."""
    adapter = adapter_of(tiny)
    requests = [(("", ""), [5, 6, 7], [8]), (("", ""), [5, 6], [7, 8]), (("", ""), [5, 6, 7], [9])]
    alone = [adapter._loglikelihood_tokens([request])[0] for request in requests]
    together = adapter._loglikelihood_tokens(requests)
    assert [score for score, _ in together] == pytest.approx([score for score, _ in alone], rel=1e-5)
    assert len({round(score, 3) for score, _ in together}) == 3


def test_each_filter_of_a_task_has_a_metric(tiny: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gsm8k's strict-match and flexible-extract."""
    monkeypatch.setattr(
        CheckpointLM, "generate_until", lambda self, requests: ["3, so the answer is 4"] * len(requests)
    )
    task = next(task for task in harness_tasks(tiny) if task["task"] == "mine")
    for key in ("doc_to_choice", "metric_list"):
        task.pop(key, None)
    last = {"function": "take_first"}
    task |= {
        "task": "two", "output_type": "generate_until", "doc_to_text": "x", "doc_to_target": "4",
        "generation_kwargs": {"until": ["."]},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "filter_list": [
            {"name": "strict", "filter": [{"function": "regex", "regex_pattern": r"answer is (\d)"}, last]},
            {"name": "flexible", "filter": [{"function": "regex", "regex_pattern": r"(\d)"}, last]},
        ],
    }  # fmt: skip
    found = evaluate_tasks(adapter_of(tiny), cast(Any, [task]))["two"]
    assert (found["exact_match,strict"], found["exact_match,flexible"]) == (1.0, 0.0)


@pytest.mark.long
def test_a_checkpoint_is_a_model_of_the_harness(tiny: TinyRun) -> None:
    """Rolling likelihoods and texts are those of its own model on the export."""
    adapter = adapter_of(tiny)
    folder = str(tiny.folder / "hf")
    bare = HFLM(pretrained=folder, dtype="float32", device="cpu", add_bos_token=False)
    exported = HFLM(pretrained=folder, dtype="float32", device="cpu")

    class Request:
        def __init__(self, *args: Any) -> None:
            self.args = args

    texts = [Request("one two three"), Request("four five one " * 60)]
    expected = bare.loglikelihood_rolling(texts, disable_tqdm=True)
    assert adapter.loglikelihood_rolling(texts) == pytest.approx(expected, rel=1e-4)
    options = {"until": ["\n", "four"], "max_gen_toks": 16, "do_sample": False}
    prompts = [Request("one two", options), Request("three " * 100, options)]
    assert adapter.generate_until(prompts) == exported.generate_until(prompts, disable_tqdm=True)


@pytest.mark.long
def test_the_command_runs_tasks_of_the_harness(
    tiny: TinyRun, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(tiny.folder / "outputs" / "tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert cli.run(["evaluate", run, "--lm-eval", "no_such_task"]) == 2
    assert mentions(capfd.readouterr().err.splitlines()[-1], "--lm-eval", "no_such_task")
    monkeypatch.setattr("titanlite.tools.tasks.harness.simple_evaluate", lambda model, tasks, **_: _fixed(tasks))
    assert cli.run(["evaluate", run, "--lm-eval", "a", "--lm-eval", "b", "--task", "python_cloze", "--json"]) == 0
    tasks = json.loads(capfd.readouterr().out)["tasks"]
    assert [*tasks] == ["python_cloze", "a", "b"]
    assert tasks["a"] == {
        "acc": 0.25, "acc_stderr": 0.1, "exact_match,strict": 0.75, "exact_match,flexible": 0.5, "questions": 4,
    }  # fmt: skip


def _fixed(names: list[str]) -> dict[str, Any]:
    values = {"alias": "x", "acc,none": 0.25, "acc_stderr,none": 0.1, "f1_stderr,none": "N/A"}
    values |= {"exact_match,strict": 0.75, "exact_match,flexible": 0.5}
    return {"results": dict.fromkeys(names, values), "n-samples": {name: {"effective": 4} for name in names}}


def test_a_task_of_the_harness_becomes_json_lines(tmp_path: Path) -> None:
    """Its templates, description and targets by text are those of the harness."""
    (tmp_path / "data.jsonl").write_text('{"q": "one", "options": ["two", "three"], "right": "three"}\n')
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}, "cache_dir": str(tmp_path / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "description": "Count. ",
        "doc_to_text": "{{q}},",
        "doc_to_choice": "options",
        "doc_to_target": "{{options.index(right)}}",
        "target_delimiter": "_",
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(task))
    lines = runpy.run_path(str(Path(__file__).parents[4] / "examples" / "harness_task.py"))["lines"]
    expected = {"context": "Count. one,", "choices": ["two", "three"], "answer": 1, "delimiter": "_"}
    assert [*lines(str(tmp_path / "mine.yaml"))] == [expected]
