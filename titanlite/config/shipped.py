"""Configs that titanlite ships, and the names that find them."""

from pathlib import Path

from titanlite.runtime.errors import nearest_name


def shipped_folder() -> Path:
    """Return the folder of shipped configs. In a checkout, titanlite/train_configs is a link to train_configs/."""
    return Path(__file__).parents[1] / "train_configs"


def shipped_names() -> list[str]:
    """Return the names of all shipped configs, which every command accepts."""
    return sorted(file.stem for file in shipped_folder().glob("*.toml"))


def find_config(name: str, folder: Path = Path()) -> Path:
    """Return the file that a name of a config means, which may not exist.

    An existing file comes first, as named or with .toml added. Bare names are then looked up in the shipped configs.

    Args:
        folder: where relative names begin.
    """
    path = folder / name
    candidates = [path, Path(f"{path}.toml")]
    if Path(name).name == name:
        candidates.append(shipped_folder() / f"{name.removesuffix('.toml')}.toml")
    return next((candidate for candidate in candidates if candidate.is_file()), path)


def nearest_config(path: Path) -> str | None:
    """Return the config that a missing file was probably meant to be: one beside it, or the name of a shipped one."""
    stem = path.name.removesuffix(".toml")
    beside = {file.stem: str(file) for file in path.parent.glob("*.toml")} if path.parent.is_dir() else {}
    known = {name: name for name in shipped_names()} | beside
    near = nearest_name(stem, sorted(known))
    return known[near] if near else None
