"""Upload of an export to the Hugging Face Hub, with a model card that the checkpoint and the run's records fill."""

import re
import shlex
from contextlib import suppress
from importlib.util import find_spec

import tomli

from titanlite.checkpoint.initial import find_checkpoint
from titanlite.checkpoint.manifest import CONFIG, read_checked
from titanlite.runtime.console import hide_secrets, install_hint
from titanlite.runtime.errors import UserError
from titanlite.storage.storage import open_storage
from titanlite.tools.convert.source import OpenedWeights
from titanlite.tools.convert.weights import find_source
from titanlite.tools.report.run_records import RunRecords, read_run
from titanlite.version import __version__

USE = """
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}")
```
"""


def check_repo(repo: str) -> None:
    """Check what can be checked before an export: the name of the repository, and the package.

    Raises:
        UserError: the name is none of the Hub, or huggingface_hub is not installed.
    """
    if find_spec("huggingface_hub") is None:
        raise UserError(f"--push needs huggingface_hub: {install_hint('transformers')}")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise HFValidationError("it has no user or organization")
    except HFValidationError as error:
        raise UserError(f"--push: expected USER/NAME, got {repo!r}: {error}") from None


def model_card(source: OpenedWeights, path: str, repo: str, *, is_whole: bool) -> bytes:
    """Return README.md of a repository. The licence is left to the user.

    Args:
        path: of the weights, as in `open_source`.
        is_whole: whether the export is a model, or else adapters.
    """
    model = source.spec.build()
    facts = {"model": f"{type(model).__name__}, {sum(weight.numel() for weight in model.parameters()):,} parameters"}
    parts, config = [USE.format(repo=repo)] * is_whole, ""
    if find_source(path) is None:
        url, folder, manifest = find_checkpoint(path)
        config = read_checked(open_storage(url), folder, CONFIG, manifest).decode() if CONFIG in manifest.files else ""
        facts["steps"] = f"{manifest.step:,}"
        if isinstance(seq_len := manifest.settings.get("training.seq_len"), int):
            facts["tokens"] = f"{manifest.samples * seq_len:,}"
        for place in (path, url.rpartition("/")[0]):
            with suppress(UserError):
                if (run := read_run(place)).run_id == manifest.run_id:
                    facts |= _losses(run, manifest.step)
                    command = shlex.join(run.starts[-1].get("command", ())) if run.starts else ""
                    parts.append(f"\n## Command\n\n```bash\n{command}\n```\n")
                    break
    if data := tomli.loads(config).get("data"):
        named = [source["path"] for source in data.get("sources", ())] or [data.get("path", "stdlib://")]
        facts["data"] = ", ".join(f"`{one}`" for name in named for one in ([name] if isinstance(name, str) else name))
    if config:
        parts.append(f"\n## Config\n\n```toml\n{config.strip()}\n```\n")
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items())
    text = f"""---
library_name: {"transformers" if is_whole else "peft"}
pipeline_tag: text-generation
tags: [titanlite]
# license: choose one, without which nobody may use the weights
---

# {repo.partition("/")[2]}

Trained with titanlite {__version__}.

| | |
|---|---|
{rows}"""
    return hide_secrets("".join([text, *parts])).encode()


def _losses(run: RunRecords, step: int) -> dict[str, str]:
    """Return the last losses up to a step."""
    found = {}
    for name, records in {"loss": run.metrics, "validation loss": run.validation}.items():
        if known := [record for record in records if record["step"] <= step and record.get("loss") is not None]:
            found[name] = f"{known[-1]['loss']:.4f} at step {known[-1]['step']:,}"
    return found


def upload(folder: str, repo: str) -> str:
    """Make a private repository, upload a folder to it, and return its address.

    Raises:
        UserError: it is there already, there is no token or no network, or the Hub refuses. The folder stays.
    """
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    by_status = {
        401: "the token is not valid: log in with `hf auth login`",
        403: f"the token may not write to {repo.partition('/')[0]}",
        409: f"{repo} exists already",
    }
    again = (
        f"The export is in {folder}; to upload it by hand: {shlex.join(['hf', 'upload', '--private', repo, folder])}"
    )
    if get_token() is None:
        raise UserError(f"--push: there is no token: log in with `hf auth login`, or set HF_TOKEN. {again}")
    try:
        url = HfApi().create_repo(repo, private=True)
        HfApi().upload_folder(repo_id=repo, folder_path=folder, commit_message=f"titanlite {__version__}")
    except (OSError, ValueError, HTTPError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        text = "" if status else "the Hub cannot be reached: "
        text += by_status.get(status) or re.sub(r"\s+", " ", hide_secrets(str(error))).strip(" .")
        raise UserError(f"--push: {text}. {again}") from None
    return str(url)
