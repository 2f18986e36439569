"""Code of the user's own, found by name: `package.module:Name`, `package.module.Name` or `folder/file.py:Name`."""

import importlib
import inspect
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from titanlite.runtime.errors import UserError, did_you_mean


def load_module(place: str) -> ModuleType:
    """Import `package.module` or `folder/file.py`.

    A module may also be in the current folder. A file may import the files beside it.

    Raises:
        UserError: the import fails; the message has the reason and the line.
    """
    path = Path(place).expanduser().resolve() if place.endswith(".py") else None
    if path and not path.is_file():
        raise UserError(f"no file {place}")
    name = path.stem if path else place
    folder = str(path.parent) if path else os.getcwd()
    if folder not in sys.path:
        # Worker processes get sys.path too. They could not find a module under a made-up name.
        sys.path.insert(0 if path else len(sys.path), folder)
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise UserError(f"cannot import {place}: {describe_error(error, path and str(path))}") from error
    if path and (module.__file__ is None or Path(module.__file__).resolve() != path):
        raise UserError(f"cannot import {place}: there is another module called {name}; give the file another name")
    return module


def find_object(name: str) -> Any:
    """Return the object of a name.

    Raises:
        UserError: the object does not exist; the message has the nearest name.
    """
    if ":" in name:
        place, _, attribute = name.rpartition(":")
    else:
        place, _, attribute = name.rpartition(".")
    if not place or not attribute or (":" not in name and name.endswith(".py")):
        raise UserError(f"expected package.module:Name or file.py:Name, got {name!r}")
    module = load_module(place)
    if not hasattr(module, attribute):
        raise UserError(f"{place} has no {attribute}{did_you_mean(attribute, vars(module))}")
    return getattr(module, attribute)


def find_callable(name: str) -> Any:
    """Return the function or class of a name.

    Raises:
        UserError: it does not exist, or is something else.
    """
    if not callable(found := find_object(name)):
        raise UserError(f"{name} is not a function or class")
    return found


def check_call(name: str, *args: Any, **keywords: Any) -> None:
    """Check that the named function or class accepts these arguments.

    Raises:
        UserError: it does not exist, is something else, or takes others.
    """
    found = find_callable(name)
    try:
        parameters = inspect.signature(found)
    except (TypeError, ValueError):  # not of Python
        return
    try:
        parameters.bind(*args, **keywords)
    except TypeError as error:
        names = ", ".join([*map(str, args), *keywords])
        raise UserError(f"{name} is called with {names}, and takes {parameters}: {error}") from None


def describe_error(error: BaseException, file: str | None = None) -> str:
    """Return an exception of the user's code on one line: model.py:12: KeyError: 'dim'.

    Args:
        file: file whose innermost line is named. Default: the innermost line outside Python's import machinery.
    """
    words = " ".join(f"{type(error).__name__}: {error}".split())
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {words}"
    ours = (__file__, importlib.__file__)
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename not in ours and not frame.filename.startswith("<")]
    frames = [frame for frame in frames if frame.filename == file] or frames
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: {words}" if frames else words
