"""Real token sequences to check an export with: data of the run, or a text that every installation has."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from titanlite.data.prepared import is_token_folder
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import TokenStore
from titanlite.runtime.errors import UserError
from titanlite.schema import Data, Job
from titanlite.tools.convert.source import Source


def check_tokens(source: Source, *, sequences: int, length: int) -> tuple[Tensor, str]:
    """Return (tokens [sequences, length], where they are from)."""
    count = sequences * length
    found, origin = None, ""
    if source.config and source.tokenizer:
        found, origin = _of_run(source.config.job, source.config.data, source.tokenizer, count)
    if found is None and source.tokenizer:
        text = Path(__file__).with_name("generation.py").read_text() + Path(__file__).read_text()
        ids = source.tokenizer.encode(text)
        found, origin = np.resize(ids, count), "Python source"
    if found is None:
        found, origin = np.arange(count) * 7919, "numbers, as there is no tokenizer"
    ids = torch.from_numpy(found.astype(np.int64)) % source.spec.args.vocab_size
    return ids.view(sequences, length), origin


def _of_run(job: Job, data: Data, tokenizer: Tokenizer, count: int) -> tuple[np.ndarray | None, str]:
    """Return the first tokens of data of the run that are on this machine."""
    named = [data.path] if isinstance(data.path, str) else []
    cache = Path(data.cache_folder or Path(job.dump_folder, "data_cache"))
    for folder in [*map(Path, named), *(sorted(cache.iterdir()) if cache.is_dir() else [])]:
        with suppress(OSError, UserError, ValueError, KeyError):
            if folder.is_dir() and is_token_folder([path.name for path in folder.iterdir()]):
                store = TokenStore(folder)
                if store.index["tokenizer"]["fingerprint"] == tokenizer.fingerprint and len(store) >= count:
                    return store.read(0, count), str(folder)
    return None, ""
