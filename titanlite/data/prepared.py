"""Find and open prepared tokens: the local folder or URL that `data.path` names, instead of text."""

import os
from collections.abc import Collection, Sequence
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.data.foreign import TOKEN_SUFFIXES, find_all_foreign, find_foreign, open_foreign
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.tokens import INDEX, JoinedTokens, TokenStore
from titanlite.runtime.errors import UserError
from titanlite.runtime.files import is_file_url

if TYPE_CHECKING:  # processes that tokenize import this file, and need no config
    from titanlite.schema import Data

STDLIB = "stdlib://"
HUGGING_FACE = "hf://"
READER = "reader://"
"""Text that a user's function reads: reader://file.py:function?PATH."""


def prepared_tokens(paths: Sequence[str], form: str | None = None) -> list[str]:
    """Return the folders, files and URLs of prepared tokens that the paths name; none if one of them names text.

    Args:
        form: `data.format`, for files of other programs that do not say it.

    Raises:
        UserError: two name the same tokens, or a file's format is not known.
    """
    places: list[str] = []
    for path in map(os.path.expanduser, paths):
        places += _tokens_in(path, form)
    if not all(_holds_tokens(place, form) for place in places):
        return []
    if len({place if "://" in place else os.path.realpath(place) for place in places}) < len(places):
        raise UserError(f"data.path: {', '.join(places)} name the same tokens twice: name them once")
    return places


def _tokens_in(path: str, form: str | None) -> list[str]:
    """Return what holds tokens in a folder or a glob, or the path itself; none if other files are there too."""
    if "://" in path:
        return [path]
    if os.path.isdir(path):
        names = sorted(name for name in os.listdir(path) if not name.startswith(".") and name != INDEX)
        return find_all_foreign(path, names, form) or [path]
    found = sorted(glob(path)) if "*" in path else [path]
    files = [place for place in found if not os.path.isdir(place)]
    tokens = find_all_foreign("", files, form)
    folders = (inside for place in found if os.path.isdir(place) for inside in _tokens_in(place, form))
    return [path] if files and not tokens else [*folders, *tokens]


def _holds_tokens(place: str, form: str | None) -> bool:
    if "://" in place:
        if place.startswith((STDLIB, HUGGING_FACE, READER)):
            return False
        return place.endswith(TOKEN_SUFFIXES) or not is_file_url(place)
    return find_foreign(place, form) is not None or (os.path.isdir(place) and is_token_folder(os.listdir(place)))


def is_token_folder(names: Collection[str]) -> bool:
    """Return True if a folder with files of these names holds prepared tokens."""
    return INDEX in names and any(name.endswith(".tokens") for name in names)


def open_stores(places: Sequence[str], *, data: "Data", tokenizer: Tokenizer, cache_folder: Path) -> TokenStore:
    """Open prepared tokens, as one stream.

    Args:
        places: local folders, files and URLs, see `prepared_tokens`.
        cache_folder: for the local copy of tokens at a URL.

    Raises:
        UserError: the tokens are not complete.
        RunError: the URL cannot be read, or the cache cannot be written.
    """
    local: list[str] = []
    for place in places:
        if "://" in place:
            from titanlite.data.remote import localize

            local += _tokens_in(str(localize(place, cache_folder)), data.format)
        else:
            local.append(place)
    options = {"tokenizer": tokenizer, "cache_folder": cache_folder, "form": data.format}
    stores: list[TokenStore] = []
    for is_own, group in groupby(local, key=os.path.isdir):
        paths = [*group]
        own = (TokenStore(Path(path)) for path in paths)
        stores += own if is_own else open_foreign(paths, wanted=(data.add_bos, data.add_eos), **options)
    return stores[0] if len(stores) == 1 else JoinedTokens(stores)


def open_prepared(places: Sequence[str], *, data: "Data", tokenizer: Tokenizer, cache_folder: Path) -> TokenStore:
    """Open prepared tokens, and check that they were made with this tokenizer and these options.

    Arguments and errors: see `open_stores`.
    """
    opened = open_stores(places, data=data, tokenizer=tokenizer, cache_folder=cache_folder)
    for store in opened.parts:
        if data.chat_template is not None:
            raise UserError(
                f"data.chat_template: {store.folder} holds tokens, not chats: leave it out, or name the chats"
            )
        _check_tokenizer(store, tokenizer)
        for name, wanted in (("bos", data.add_bos), ("eos", data.add_eos)):
            if store.index[name] != wanted:
                had, wants = (str(value).lower() for value in (store.index[name], wanted))
                raise UserError(f"data.add_{name}: {store.folder} was made with {name} = {had}, the config has {wants}")
    return opened


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
