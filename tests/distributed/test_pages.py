"""Each page's commands, in their order, with less to do: few steps, short sequences, few layers, a small text.

Commands of titanlite run in this process, others and several ranks in processes of their own. What a page presupposes
is made first. A comment in the page gives the reason why a command is not run (tests/support/documented.py).
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.chat_tokenizer import write_chat_tokenizer
from tests.support.documented import ROOT, VARIABLES, commands_to_run, pages_with_commands
from titanlite.tools import cli

TEXT = "text.jsonl"
SHORT = ["--training.seq_len=16", "--training.global_batch_size=4", "--metrics.loggers=[]", "--model.args.n_layers=1"]
OWN_DATA = [f"--data.path={TEXT}", f"--validation.path={TEXT}", "--validation.sequences=4"]
FEW_STEPS = ["--training.steps=2", "--lr_scheduler.warmup_steps=0"]
FEW_LAYERS = ["--model.args.n_layers=2"]
"""Depth of large models in plans and tables."""
AS_IN_PAGES = {"--training.steps=140", "--training.steps=280", "--training.steps=4"}
"""Steps that pages count with: the first run, and what continues it."""
LESS = {
    "plan": FEW_LAYERS,
    "inspect": FEW_LAYERS,
    "generate": ["--max-new-tokens", "4"],
    "evaluate": ["--sequences", "2"],
    "data tokenizer": ["--vocab-size", "600"],
    "parity": [*SHORT, *OWN_DATA],
    "distill cache": [*SHORT, *OWN_DATA],
}
"""Options added to a command."""
OWN_TEXT = ("sft_example", "gpt2.toml", "tutorial.toml", "--data.path")
"""Words of commands that name their text."""


def shortened(words: list[str]) -> list[str]:
    """Return a command of titanlite with less to do."""
    if words[0] == "train":
        steps = [] if AS_IN_PAGES.intersection(words) else FEW_STEPS
        data = [] if any(name in word for word in words for name in OWN_TEXT) else OWN_DATA
        return [*words, *SHORT, *data, *steps]
    names_folder = any(word.startswith("outputs/") for word in words)
    key = next((key for key in (" ".join(words[:2]), words[0]) if key in LESS), None)
    if words[0] == "parity" and not {"--where", "--dump"}.intersection(words):
        return [*words, *LESS["parity"], "--steps", "2", "--processes", "2", "--only", "FSDP"]
    if key is None or (words[0] == "inspect" and names_folder) or "--where" in words:
        return words
    # A run's own data is evaluated where it is stdlib://. Here it is a file, which a checkpoint's config may not name.
    data = ["--data", TEXT] if key == "evaluate" and "--data" not in words else []
    return [*words, *LESS[key], *data]


def run(command: str) -> None:
    """Run a command of a page in the current folder."""
    variables = VARIABLES.match(command)
    assert variables
    program, *words = shlex.split(command[variables.end() :], comments=True)
    if program.endswith("run_train.sh") and variables[0]:
        options = shlex.join(shortened(["train", *words])[1:])
        run_in_processes(f"{variables[0]} {ROOT}/run_train.sh {options}")
    elif program.endswith("run_train.sh"):
        is_check = words[:1] == ["check"]
        run_titanlite(["check", "--machines", *words[1:]] if is_check else ["train", *words])
    elif program.endswith("titanlite"):
        run_titanlite(words)
    else:
        run_in_processes(command)


def run_titanlite(words: list[str]) -> None:
    assert cli.run(shortened(words)) == 0, words


def run_in_processes(command: str) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


# What a page presupposes


def write_texts() -> None:
    lines = [json.dumps({"text": f"def f_{i}(x):\n    return x + {i}\n"}) for i in range(300)]
    for path in (TEXT, "mytexts/a.jsonl", "mydir/a.jsonl", "texts/a.jsonl"):
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("\n".join(lines))


def write_configs() -> None:
    debug = f"base = '{ROOT}/train_configs/debug.toml'\n"
    Path("my.toml").write_text(debug)
    Path("run.toml").write_text(debug)
    for name in ("old.toml", "OLD.toml"):
        shutil.copy(ROOT / "tests" / "data" / "torchtitan" / "70b.toml", name)
    Path("examples").mkdir()
    Path("examples/my_model").symlink_to(ROOT / "examples" / "my_model")
    Path("train_configs").symlink_to(ROOT / "train_configs")


def train_debug() -> None:
    run_titanlite(["train", "debug", "--training.steps=140", "--checkpoint.interval=70"])


def make_runs_to_compare() -> None:
    for name in ("first", "second"):
        shutil.copytree("outputs/debug", f"outputs/{name}")


def make_tuned() -> None:
    run_titanlite(
        ["train", "debug", "--job.name=tuned", "--lora.rank=4", "--checkpoint.initial_load_path=outputs/debug"]
    )


def make_prompts_and_tokens() -> None:
    Path("prompts.txt").write_text("def f\nclass A\n")
    run_titanlite(["data", "prepare", "mytexts/*.jsonl", "--out", "tok/", "--tokenizer", "python-2k"])


def make_chats() -> None:
    Path("path/to/folder").mkdir(parents=True)
    write_chat_tokenizer(Path("path/to/folder"), (ROOT / "train_configs" / "chat_template.jinja").read_text())
    shutil.copy(ROOT / "train_configs" / "chats.jsonl", "chats.jsonl")


def make_released_weights() -> None:
    """Save a small model of transformers in place of the one that a page downloads."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).save_pretrained("models/Qwen3-0.6B")
    write_chat_tokenizer(Path("models/Qwen3-0.6B"), None)


def name_the_teacher() -> None:
    Path("my.toml").write_text(f"base = '{ROOT}/train_configs/distill_example.toml'\n")


def write_tutorial() -> None:
    """Write the config that the page shows, with few steps, and what it names of the repository."""
    for name in ("docs", "README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        Path(name).symlink_to(ROOT / name)
    [toml] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
    Path("tutorial.toml").write_text(toml.replace("warmup_steps = 10", "warmup_steps = 0"))


FIRST = {
    "docs/checkpoints.md": [train_debug],
    "docs/convert.md": [train_debug, make_released_weights],
    "docs/data.md": [make_chats],
    "docs/distill.md": [name_the_teacher],
    "docs/finetune.md": [train_debug, make_tuned],
    "docs/generate.md": [train_debug, make_prompts_and_tokens],
    "docs/see_the_run.md": [train_debug, make_runs_to_compare],
    "docs/tutorial.md": [write_tutorial],
}
LEFT = {
    "CONTRIBUTING.md": ["outputs/try/checkpoints/step-00000002/manifest.json"],
    "README.md": ["outputs/debug/checkpoints/step-00000002/manifest.json"],
    "docs/add_a_model.md": ["outputs/gpt2/run.json", "outputs/wider/run.json", "outputs/sharded/run.json"],
    "docs/checkpoints.md": ["full.pt"],
    "docs/convert.md": ["outputs/qwen3/step-00000000/manifest.json", "debug_hf/config.json"],
    "docs/data.md": ["tok/index.json", "tokens/chats/index.json", "tokenizer"],
    "docs/distill.md": ["outputs/distill_example/metrics.jsonl", "outputs/my/run.json"],
    "docs/finetune.md": ["outputs/sft_example/run.json", "tuned_adapters/adapter_config.json", "tuned_hf/config.json"],
    "docs/generate.md": ["debug_hf/config.json"],
    "docs/index.md": [
        "outputs/debug/checkpoints/step-00000280/manifest.json", "outputs/wide/run.json", "outputs/experts/run.json",
        "outputs/mine/run.json", "outputs/hsdp/run.json", "own.toml",
    ],
    "docs/memory.md": ["outputs/run/checkpoints/step-00000002/manifest.json"],
    "docs/migrate.md": ["NEW.toml"],
    "docs/see_the_run.md": ["outputs/debug/report.html", "compare.html", "dumps/after", "dumps/before"],
    "docs/tutorial.md": [
        "outputs/tutorial/checkpoints/step-00000004/manifest.json", "tutorial.html", "tutorial_hf/config.json",
    ],
}  # fmt: skip
"""Files that the commands of a page leave behind."""
REPLACED = {"/nvme/scratch": "scratch", "--training.steps=150": "--training.steps=4"}
"""A folder that no test may write to, and steps of the run that the tutorial continues."""


@pytest.mark.nightly
@pytest.mark.usefixtures("own_process_group")
@pytest.mark.parametrize("page", pages_with_commands())
def test_commands_of_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_texts()
    write_configs()
    for make in FIRST.get(page, []):
        make()
    for command in commands_to_run(page):
        for before, after in REPLACED.items():
            command = command.replace(before, after)
        run(command)
    assert [path for path in LEFT.get(page, []) if not Path(path).exists()] == []
