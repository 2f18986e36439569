"""Weights that a model begins with: a checkpoint of another run, or what another program wrote.

For the model that is trained, `initial_load_path` names them, and tensors are taken by name and shape. A frozen model,
such as a teacher, is read whole.
"""

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_read import RankReader, ShardReader, read_tensors
from titanlite.checkpoint.difference import Difference, difference, names_of_ranks, selected
from titanlite.checkpoint.manifest import Manifest, Progress, folder_name
from titanlite.checkpoint.resume import LORA_ALPHA, Candidate, RunSettings
from titanlite.checkpoint.vocabulary import VOCABULARY, ResizedReader, resized
from titanlite.models.base import added_parameters
from titanlite.models.registry import ModelSpec
from titanlite.runtime.errors import DamagedCheckpoint, UserError
from titanlite.runtime.ranks import on_each, on_rank_0
from titanlite.schema import Checkpoint
from titanlite.state import State, TrainingState, flat, model_state
from titanlite.storage.storage import open_storage

logger = logging.getLogger(__name__)

PROGRESS = "progress"
"""Part of `initial_load` that is no tensor: the position of the run."""


OpenWeights = Callable[[str, ModelSpec, list[str]], RankReader | None]
"""(path, model, globs of its arguments that may differ): opens weights of another program, as
`titanlite.tools.convert.weights.open_weights` does. It returns None if the path may be a checkpoint of titanlite's, and
raises UserError if the weights are of another model."""
Opener = Callable[[str], RankReader | None]
"""`OpenWeights` for the model of this run."""


@dataclass(frozen=True)
class InitialWeights:
    """The initial weights of a run, as the last source of a state.

    Args:
        open_weights: opens weights of another program; returns None for a checkpoint of titanlite's.
        check_beginning: raises UserError if a run with checkpoints may not begin anew.
    """

    config: Checkpoint
    state: TrainingState
    settings: RunSettings
    group: dist.ProcessGroup
    open_weights: Opener | None
    check_beginning: Callable[[], None]

    def newest(self, after: int) -> Candidate | None:
        if after:
            return None
        if self.config.enable:
            self.check_beginning()
        return Candidate(0, self._load)

    def _load(self) -> Progress:
        """Load the tensors that `initial_load` selects from `initial_load_path` in place, if it is set, on every rank.

        Returns:
            the progress there if `initial_load` has it.

        Raises:
            UserError: there is no complete checkpoint, names differ without being allowed to, or settings do where the
                run goes on there.
        """
        if self.config.initial_load_path is None:
            return Progress()
        has_moments = any(name.startswith("optimizer") for name in self.config.initial_load)
        state = self.state.to_load(moments=has_moments)
        manifest, loaded = load_initial(
            self.config,
            state,
            settings=self.settings,
            added=added_parameters(self.state.model),
            open_weights=self.open_weights,
            group=self.group,
            is_cut=self.state.is_cut,
        )
        self.state.end_load(state, loaded)
        return manifest.progress if manifest else Progress()


def load_initial(
    config: Checkpoint,
    state: State,
    *,
    settings: RunSettings,
    added: Collection[str],
    open_weights: Opener | None,
    group: dist.ProcessGroup,
    is_cut: bool,
) -> tuple[Manifest | None, set[str]]:
    """Load the tensors that `initial_load` selects from `initial_load_path` in place, on every rank.

    Args:
        added: parameters that keep their initial values if they are not there, such as adapters of a base.
        open_weights: opens weights of another program; returns None for a checkpoint of titanlite's.
        is_cut: ranks have tensors of different names.

    Returns:
        the manifest there if `initial_load` has the progress, and the names of the tensors that were loaded.

    Raises:
        UserError: there is no complete checkpoint, names differ without being allowed to, or settings do where the
            run goes on there.
    """
    wanted, continues = [part for part in config.initial_load if part != PROGRESS], PROGRESS in config.initial_load
    everywhere = names_of_ranks(state, group if is_cut else None)
    if nothing := [glob for glob in wanted if not any(selected(name, [glob]) for name in everywhere)]:
        raise UserError(f"checkpoint.initial_load: nothing here is called {', '.join(nothing)}")
    reader = _open(str(config.initial_load_path), open_weights, group)
    where = reader.where
    manifest = reader.manifest if isinstance(reader, ShardReader) else None
    if continues:
        if manifest is None:
            raise UserError(f"checkpoint.initial_load: {where} has no {PROGRESS}; only a checkpoint of titanlite has")
        settings.check(manifest, where)
    new = {f"model.{name}" for name in added} - reader.metadata.state_dict_metadata.keys()
    if manifest is not None and len(new) < len(added):
        then, now = manifest.settings.get(LORA_ALPHA), settings.at(0).get(LORA_ALPHA)
        if then != now:
            raise UserError(f"lora.alpha: {where} has adapters that were trained with {then}, and this is {now}")
    chosen = {name: tensor for name, tensor in flat(state).items() if selected(name, wanted)}
    chosen = {name: tensor for name, tensor in chosen.items() if name not in new and name not in reader.kept}
    vocab_size = int(settings.at(0).get(VOCABULARY, 0))
    other = resized(chosen, reader.metadata, vocab_size)
    if other and selected(VOCABULARY, config.allow_changes):
        for name, count in other.items():
            rest = "others are their mean" if count < vocab_size else "others are left out"
            logger.info(f"from {where}: {name} has rows of {min(count, vocab_size):,} tokens; {rest}")
        reader, other = ResizedReader(reader, dict.fromkeys(other, vocab_size)), {}
    found = difference(chosen, reader.metadata, wanted, everywhere=everywhere)
    if selected("model", wanted):
        found = Difference(found.missing, {**found.unexpected, **reader.unknown})
    if further := of_further_token(found):
        left_out = "the module that predicts the token after the next is left out"
        logger.info(f"from {where}, {left_out}: training.multi_token_weight is 0")
        found = found.without(unexpected=further)
    unexpected = [*config.allow_unexpected, *found.missing]  # else reported twice
    wrong = found.without(missing=config.allow_missing, unexpected=unexpected)
    on_each(group, lambda: _check_fits(wrong, where, other))
    if found:
        logger.warning(f"from {where} are not loaded, as allowed:\n{found}")
    loaded = {name: tensor for name, tensor in chosen.items() if name not in found.missing}
    try:
        read_tensors(reader, loaded, group)
    except DamagedCheckpoint as damage:
        raise UserError(f"checkpoint.initial_load_path: {damage}") from None
    logger.info(f"initial {', '.join(config.initial_load)} from {where}")
    return (manifest if continues else None), {*loaded}


def _open(path: str, open_weights: Opener | None, group: dist.ProcessGroup) -> RankReader:
    """Open the weights at a path on every rank."""
    if open_weights is not None:
        try:
            weights = on_each(group, lambda: open_weights(path))
        except UserError as error:
            raise UserError(f"checkpoint.initial_load_path: {error}") from None
        if weights is not None:
            return weights
    url, folder, manifest = on_rank_0(group, lambda: find_checkpoint(path, "checkpoint.initial_load_path: "))
    return on_each(group, lambda: ShardReader(open_storage(url), folder, manifest))


def _check_fits(wrong: Difference, where: str, resized: Collection[str]) -> None:
    """Refuse weights with other tensors than those that may differ.

    Args:
        resized: those of which only the number of tokens differs.
    """
    if not wrong:
        return
    rest = wrong.without(missing=resized)
    offers = [rest.offer()] if rest else []
    if len(rest.missing) < len(wrong.missing):
        offers.append(f'To keep the rows of the tokens that are there:\n  checkpoint.allow_changes = ["{VOCABULARY}"]')
    raise UserError("\n".join([f"{where} does not fit this model:\n{wrong}", *offers]))


def read_model(model: nn.Module, reader: RankReader, *, where: str, key: str, group: dist.ProcessGroup) -> None:
    """Read all parameters and persistent buffers of a (sharded) model in place, every rank its own part. Buffers that
    another program does not have keep their values.

    Args:
        where, key: place of the weights, and the option that names it, for errors.

    Raises:
        UserError: the weights belong to another model, or are damaged.
    """
    try:
        tensors = stored_tensors(reader, model_state(model), where=where)
        read_tensors(reader, flat({"model": tensors}), group)
    except (UserError, DamagedCheckpoint) as error:
        raise UserError(f"{key}: {error}") from None


def stored_tensors(reader: RankReader, model: dict[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """Return the tensors of a model that its weights hold: all but buffers that another program does not have.

    Raises:
        UserError: the weights have other tensors than the model.
    """
    stored = {name: tensor for name, tensor in model.items() if f"model.{name}" not in reader.kept}
    found = difference(flat({"model": stored}), reader.metadata, ["model"])
    found = found.without(unexpected=of_further_token(found))
    if wrong := Difference(found.missing, {**found.unexpected, **reader.unknown}):
        raise UserError(f"{where} belongs to another model:\n{wrong}")
    return stored


def of_further_token(found: Difference) -> list[str]:
    """Return the names of a `FurtherToken` and its norm, which serve training only, that a model lacks."""
    blocks = [name.removesuffix("next_norm.weight") for name in found.unexpected if name.endswith(".next_norm.weight")]
    return [name for name in found.unexpected if name.startswith((*blocks, "model.head.further_norm"))]


def find_checkpoint(path: str, key: str = "") -> tuple[str, str, Manifest]:
    """Return (storage URL, folder, manifest) of a checkpoint, or of the newest complete one in a run's folder.

    Args:
        key: option that names the path, with which errors begin.

    Raises:
        UserError: there is no complete checkpoint.
    """
    if "://" not in path and os.path.islink(path.rstrip("/")):  # a link that is named counts; links are not listed
        path = os.path.realpath(path)
    place, _, folder = path.rstrip("/").rpartition("/")
    if manifests.step_of(folder) is not None:
        storage, candidates = open_storage(place or "."), [folder]
    else:
        of_run = [] if "://" in path else [manifests.checkpoints_of(path), f"{path}/checkpoints"]
        places = [open_storage(place) for place in [*of_run, path]]
        storage = next((place for place in places[:-1] if manifests.committed_steps(place.list())), places[-1])
        candidates = [folder_name(step) for step in manifests.committed_steps(storage.list())][::-1]
    listing = storage.list()
    for candidate in candidates:
        try:
            return storage.url, candidate, manifests.read_complete(storage, candidate, listing.get(candidate, {}))
        except DamagedCheckpoint as damage:
            logger.warning(f"{key}damaged checkpoint: {damage}")
    raise UserError(f"{key}no good checkpoint in {path}")
