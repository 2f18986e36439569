"""`checkpoint export --push`, to a stand-in for the Hugging Face Hub that huggingface_hub itself talks to."""

import base64
import json
import shutil
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest
import yaml
from huggingface_hub import constants

from tests.support.helpers import TinyRun, mentions
from tests.support.weights import one_process, random_model, save_model, save_random, small_toml
from titanlite.tools import cli


class FakeHub(ThreadingHTTPServer):
    """A Hub with one valid token, that of a user "me"."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, dict[str, Any]] = {"me/taken": {}}
        self.fails_at = ""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        code, answer = self.answer(self.path.split("/")[2:], body)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answer(self, path: list[str], body: bytes) -> tuple[int, dict[str, Any]]:
        hub = cast(FakeHub, self.server)
        repos = hub.repos
        if self.headers["Authorization"] != "Bearer hf_mine":
            return 401, {"error": "Invalid credentials"}
        if hub.fails_at and hub.fails_at in self.path:
            return 400, {"error": "no more room"}
        if path == ["validate-yaml"]:  # of README.md
            return 200, {"errors": [], "warnings": []}
        if path == ["repos", "create"]:
            wanted = json.loads(body)
            name = (
                f"{wanted['organization']}/{wanted['name']}" if wanted.get("organization") else f"me/{wanted['name']}"
            )
            if not name.startswith("me/"):
                return 403, {"error": "Forbidden"}
            if name in repos:
                return 409, {"error": "You already created this model repo"}
            repos[name] = {"private": wanted.get("private") or wanted.get("visibility") == "private"}
            return 200, {"url": f"https://huggingface.co/{name}"}
        name = "/".join(path[1:3])
        if path[3] == "preupload":
            files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return 200, {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                repos[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"https://huggingface.co/{name}/commit/1", "commitOid": "1", "success": True}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def export(*words: object) -> int:
    return cli.run(["checkpoint", "export", *map(str, words)])


def facts(card: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The card's metadata and table."""
    _, header, body = card.split("---\n", 2)
    rows = [line.strip("| ").split(" | ") for line in body.splitlines() if line.startswith("| ") and " | " in line]
    return cast(dict[str, Any], yaml.safe_load(header)), dict(row for row in rows if len(row) == 2)


@pytest.mark.long
@pytest.mark.usefixtures("own_process_group")
def test_a_run_is_pushed_with_a_card(tiny: TinyRun, hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        "--validation.enable=true",
        "--validation.freq=2",
        f"--validation.path={tiny.text}",
        "--training.steps=4",
    ]
    assert cli.run(["train", "--config", str(tiny.toml), "--checkpoint.interval=2", *options]) == 0
    run, out = tiny.folder / "outputs" / "tiny", tiny.folder / "hf"
    records = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    losses = {record["step"]: record["loss"] for record in [*tiny.records(), *records]}
    capsys.readouterr()

    assert export(run, "--out", out, "--push", "me/tiny", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert (out.exists(), set(hub.repos)) == (False, {"me/taken"}), "nothing is written or sent"
    assert export(run, "--out", out, "--push", "me/tiny") == 0
    assert f"{constants.ENDPOINT}/me/tiny" in capsys.readouterr().out
    pushed = hub.repos["me/tiny"]
    assert pushed.pop("private") is True
    assert pushed == {path.name: path.read_bytes() for path in out.iterdir()}
    assert all(f"{len(data):,}  {name}" in shown or name == "model.safetensors" for name, data in pushed.items())

    card = pushed["README.md"].decode()
    assert card in shown
    metadata, table = facts(card)
    assert metadata == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["titanlite"]}
    tokens = 4 * tiny.config().training.global_batch_size * tiny.config().training.seq_len
    expected = {"steps": "4", "tokens": f"{tokens:,}", "data": f"`{tiny.text}`"}
    assert table.items() >= expected.items()
    assert table["loss"] == f"{tiny.records()[-1]['loss']:.4f} at step 4"
    assert table["validation loss"] == f"{records[-1]['loss']:.4f} at step 4"
    assert losses.keys() == {1, 2, 3, 4}
    config = card.split("```toml\n")[1].split("```")[0]
    assert tomllib.loads(config) == tomllib.loads((run / "config.toml").read_text())
    assert card.split("```bash\n")[1].split("\n")[0] == " ".join(
        json.loads((run / "run.json").read_text())["starts"][0]["command"]
    )

    assert (
        export(run / "checkpoints" / "step-00000002", "--out", tiny.folder / "b", "--push", "me/tiny", "--dry-run") == 0
    )
    _, table = facts(capsys.readouterr().out)
    assert (table["steps"], table["tokens"]) == ("2", f"{tokens // 2:,}")
    assert table["loss"] == f"{tiny.records()[1]['loss']:.4f} at step 2", "that of the checkpoint"
    shutil.move(run / "checkpoints", tiny.folder / "elsewhere")
    assert export(tiny.folder / "elsewhere", "--out", tiny.folder / "b", "--push", "me/tiny", "--dry-run") == 0
    _, table = facts(capsys.readouterr().out)
    assert (table["steps"], table["data"], "loss" in table) == ("4", f"`{tiny.text}`", False), "without its run"


@pytest.mark.long
def test_what_goes_wrong_is_one_line_and_the_export_stays(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = save_random(tmp_path, "llama3")

    def refusal(repo: str) -> str:
        out = tmp_path / "hf"
        assert export(checkpoint, "--out", out, "--no-tokenizer", "--push", repo) == 2
        [line] = [line for line in capsys.readouterr().err.splitlines() if line]
        assert line.startswith("error: --push: ")
        assert mentions(line, f"hf upload --private {repo} {out}"), "how to go on"
        assert {path.name for path in out.iterdir()} == {
            "README.md",
            "config.json",
            "generation_config.json",
            "model.safetensors",
        }
        shutil.rmtree(out)
        return line

    assert mentions(refusal("me/taken"), "me/taken exists")
    assert mentions(refusal("others/model"), "others")
    hub.fails_at = "preupload"
    assert mentions(refusal("me/new"), "no more room")
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert mentions(refusal("me/new"), "token")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert mentions(refusal("me/new"), "refused")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert mentions(refusal("me/new"), "HF_TOKEN")
    for name in ("new", "a/b/c", "me/..", "me/new model", "--/x"):
        assert export(checkpoint, "--out", tmp_path / "hf", f"--push={name}") == 2
        assert mentions(capsys.readouterr().err, "--push", "USER/NAME", repr(name))
        assert not (tmp_path / "hf").exists()


@pytest.mark.long
def test_cards_of_adapters_and_of_other_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "small.toml"
    toml.write_text(small_toml("llama3") + "[lora]\nrank = 3\n")
    with one_process():
        checkpoint = save_model(tmp_path, random_model(toml), toml)
    rest = ("--no-tokenizer", "--push", "me/model", "--dry-run")
    assert export(checkpoint, "--out", tmp_path / "a", *rest) == 0
    shown = capsys.readouterr().out
    metadata, _ = facts(shown)
    assert (metadata["library_name"], "AutoModelForCausalLM" in shown) == ("peft", False)
    assert export(checkpoint, "--out", tmp_path / "hf", "--merge", "--no-tokenizer") == 0
    assert "README.md" not in {path.name for path in (tmp_path / "hf").iterdir()}, "only what is pushed has a card"
    capsys.readouterr()
    assert export(tmp_path / "hf", "--out", tmp_path / "b", *rest) == 0
    metadata, table = facts(capsys.readouterr().out)
    assert (metadata["library_name"], [*table]) == ("transformers", ["model"]), "nothing is known of their training"
    assert not [*tmp_path.glob("[ab]")]
