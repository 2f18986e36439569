"""Find and open prepared tokens: the local folder or URL that `data.path` names, instead of text."""

import os
from collections.abc import Collection, Sequence
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.data.megatron import MegatronTokens, megatron_prefix
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import INDEX, TokenStore
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import is_file_url

if TYPE_CHECKING:  # processes that tokenize import this file, and need no config
    from titanlite.schema import Data

STDLIB = "stdlib://"
HUGGING_FACE = "hf://"
READER = "reader://"
"""Text that a user's function reads: reader://file.py:function?PATH."""


def prepared_tokens(paths: Sequence[str]) -> list[str]:
    """Return the folders and URLs of prepared tokens that the paths name; none if one of them names text.

    Raises:
        UserError: two name the same tokens.
    """
    places: list[str] = []
    for path in map(os.path.expanduser, paths):
        found = sorted(glob(path)) if "*" in path and "://" not in path else [path]
        found = [inside for place in found for inside in _inside(place)]
        places += dict.fromkeys(megatron_prefix(place) or place for place in found)
    if not all(map(_holds_tokens, places)):
        return []
    if len({place if "://" in place else os.path.realpath(place) for place in places}) < len(places):
        raise UserError(f"data.path: {', '.join(places)} name the same tokens twice: name them once")
    return places


def _inside(place: str) -> list[str]:
    """Return the tokens of Megatron-LM in a folder that holds nothing else; the place itself if it is none."""
    if "://" in place or not os.path.isdir(place):
        return [place]
    names = sorted(name for name in os.listdir(place) if not name.startswith("."))
    found = [path for name in names if name.endswith(".idx") and megatron_prefix(path := os.path.join(place, name))]
    return found if found and all(name.endswith((".bin", ".idx")) for name in names) else [place]


def _holds_tokens(place: str) -> bool:
    if "://" in place:
        return not place.startswith((STDLIB, HUGGING_FACE, READER)) and not is_file_url(place)
    if megatron_prefix(place):
        return True
    return os.path.isdir(place) and is_token_folder(os.listdir(place))


def is_token_folder(names: Collection[str]) -> bool:
    """Return True if a folder with files of these names holds prepared tokens."""
    return INDEX in names and any(name.endswith(".tokens") for name in names)


def open_prepared(place: str, *, data: "Data", tokenizer: Tokenizer, cache_folder: Path) -> TokenStore:
    """Open prepared tokens, and check that they were made with this tokenizer and these options.

    Args:
        place: one local folder or URL, see `prepared_tokens`.
        cache_folder: for the local copy of tokens at a URL.

    Raises:
        UserError: the tokens are not complete, or were made with other options or another tokenizer.
        RunError: the URL cannot be read, or the cache cannot be written.
    """
    folder = Path(place)
    if "://" in place:
        from titanlite.data.remote import localize

        folder = localize(place, cache_folder)
    store = MegatronTokens(folder, tokenizer) if megatron_prefix(place) else TokenStore(folder)
    if data.chat_template is not None:
        raise UserError(f"data.chat_template: {store.folder} holds tokens, not chats: leave it out, or name the chats")
    _check_tokenizer(store, tokenizer)
    for name, wanted in (("bos", data.add_bos), ("eos", data.add_eos)):
        if store.index[name] != wanted:
            had, wants = (str(value).lower() for value in (store.index[name], wanted))
            raise UserError(f"data.add_{name}: {store.folder} was made with {name} = {had}, the config has {wants}")
    return store


def _check_tokenizer(store: TokenStore, tokenizer: Tokenizer) -> None:
    made_with = store.index["tokenizer"]
    if made_with["fingerprint"] == tokenizer.fingerprint:
        return
    name = made_with.get("name")
    if name == tokenizer.name:
        raise UserError(
            f"data.tokenizer: {store.folder} was made with {name}, and that tokenizer has changed since: restore it, "
            "or prepare the text again"
        )
    fix = f'set data.tokenizer = "{name}"' if name else "set data.tokenizer to that tokenizer"
    raise UserError(
        f"data.tokenizer: {store.folder} was made with {store.tokenizer_name}, and the config names {tokenizer.name} "
        f"({tokenizer.vocab_size:,} tokens): {fix}, or prepare the text again"
    )
