"""Choice of the checkpoint at which a run resumes, its checks, and loading in place."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_read import RankReader, ShardReader
from titanlite.checkpoint.manifest import DAMAGED, SUPERSEDED, Manifest, folder_name
from titanlite.checkpoint.state import (
    AVERAGE,
    Difference,
    State,
    check_settings,
    difference,
    flat,
    model_state,
    selected,
)
from titanlite.models.registry import ModelSpec
from titanlite.optim.quantized import MIN_ELEMENTS
from titanlite.runtime.errors import DamagedCheckpoint, UserError
from titanlite.runtime.ranks import error_of_ranks, gather, on_each, on_rank_0
from titanlite.schema import Checkpoint, Config
from titanlite.storage.storage import MANIFEST, Storage, open_storage
from titanlite.techniques import used

logger = logging.getLogger(__name__)


# Settings that must match when a run resumes from a checkpoint.


LORA_ALPHA = "lora.alpha"
"""Setting with which adapters in a checkpoint compute."""


def resume_settings(config: Config, *, model_args: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that must match: with another value, a resumed run would be another experiment.

    Args:
        model_args: dataclass of the model's shape.
        inputs: fingerprints of the data sources and the targets.
    """
    ramps = {name: getattr(config.training, name) for name in ("batch_ramp", "seq_len_ramp")}
    return {
        **model_settings(config.model.title, model_args),
        **inputs,
        **{key: value for technique in used(config) for key, value in technique.resume_settings(config).items()},
        "training.seq_len": config.training.seq_len,
        "training.global_batch_size": config.training.global_batch_size,
        **{f"training.{name}": [stage.model_dump() for stage in ramp] for name, ramp in ramps.items() if ramp},
        "debug.seed": config.debug.seed,
    }


def model_settings(title: str, model_args: Any) -> dict[str, Any]:
    """Return the settings of a model that must match.

    Args:
        title: name of the model.
        model_args: dataclass of its shape.
    """
    args = {f"model.args.{name}": value for name, value in asdict(model_args).items() if name != "max_seq_len"}
    return {"model.name": title, **args}


PROGRESS = "progress"
"""Part of `initial_load` that is no tensor: the position of the run."""

# Interface of weights in other formats, which training is handed a function to open.


class ForeignWeights(RankReader):
    """Reader of weights of another program, under the names and in the layout of a model of ours."""

    where: str
    """Place, for errors."""
    metadata: Metadata
    """Our names and shapes of all tensors that the other format names."""
    unknown: dict[str, str]
    """Description of each tensor that it does not name, by the name there."""
    kept: set[str]
    """Our tensors that the other format does not know: they keep their initial values."""


class OpenWeights(Protocol):
    """Open weights of another program: `titanlite.tools.convert.weights.open_weights`.

    It returns None if the path may be a checkpoint of titanlite's, and raises UserError if the weights are of another
    model. `allow_changes` are globs of arguments of the model that may differ.
    """

    def __call__(self, path: str, spec: ModelSpec, allow_changes: list[str], /) -> ForeignWeights | None: ...


class Loader:
    """Loader of a run's checkpoints.

    Rank 0 chooses for all: a network file system may show other ranks an older list, and checks on every rank would
    flood it.

    Args:
        settings: returns the settings that must match on resume, by the samples that the run has seen by then.
        may_change: globs of settings that may differ from the checkpoint's.
        open_weights: opens initial_load_path where other programs wrote it; returns None where titanlite did.
        is_cut: ranks have tensors of different names.
    """

    def __init__(
        self,
        config: Checkpoint,
        storage: Storage,
        *,
        group: dist.ProcessGroup,
        settings: Callable[[int], dict[str, Any]],
        may_change: Sequence[str],
        open_weights: Callable[[str], ForeignWeights | None] | None = None,
        is_cut: bool = False,
    ) -> None:
        self.config = config
        self.is_cut = is_cut
        self.open_weights = open_weights
        self.may_change = may_change
        self.storage = storage
        self.group = group
        self.settings = settings

    def find(self) -> Manifest | None:
        """Return the newest complete checkpoint; None if there is none. Quarantine damaged ones, with a warning.

        Raises:
            UserError: only damaged checkpoints are left, the one that load_step names is damaged, or settings changed.
            RunError: the store returns less than it lists. No checkpoint is taken for damaged then.
        """
        return on_rank_0(self.group, self._find)

    def load(self, manifest: Manifest, state: State) -> None:
        """Load all of a state, in place, on every rank.

        Raises:
            DamagedCheckpoint: a file has changed since it was written. The state is undefined then.
            UserError: the checkpoint belongs to another model, or not safe to load.
        """
        folder = folder_name(manifest.step)
        where = self.storage.url_of(folder)
        reader = on_each(self.group, lambda: ShardReader(self.storage, folder, manifest))
        found = self._difference(flat(state), reader.metadata, ["*"])
        if AVERAGE in state and found != found.without(missing=[AVERAGE], unexpected=[AVERAGE]):
            for tensor in state[AVERAGE].values():
                tensor.zero_()  # what a damaged checkpoint has left
            state = {part: tensors for part, tensors in state.items() if part != AVERAGE}
            logger.info(f"{where} has no such average of the weights: it begins anew at step {manifest.step}")
        wrong = found.without(missing=[AVERAGE], unexpected=[AVERAGE])
        on_each(self.group, lambda: _check_same(wrong, manifest, where))
        _read(reader, state, self.group)
        if self.config.load_step is not None:
            on_rank_0(self.group, lambda: self._quarantine_newer(manifest.step))

    def quarantine(self, manifest: Manifest, damage: DamagedCheckpoint) -> None:
        """Quarantine a checkpoint in which `load` has found damage, so that `find` returns the one before."""
        on_rank_0(self.group, lambda: self._quarantine(manifest.step, damage))

    def load_initial(self, state: State, *, added: Collection[str] = ()) -> Manifest | None:
        """Load the tensors that `initial_load` selects from `initial_load_path`, by name and shape.

        Args:
            added: parameters that keep their initial values if they are not there, such as adapters of a base.

        Returns:
            the manifest there if `initial_load` has the progress.

        Raises:
            UserError: there is no complete checkpoint, names differ without being allowed to, or settings do where the
                run goes on there.
        """
        path, wanted = (
            str(self.config.initial_load_path),
            [part for part in self.config.initial_load if part != PROGRESS],
        )
        continues = PROGRESS in self.config.initial_load
        names = flat(state)
        if nothing := [
            pattern for pattern in wanted if not any(selected(name, [pattern]) for name in self._everywhere(names))
        ]:
            raise UserError(f"checkpoint.initial_load: nothing here is called {', '.join(nothing)}")
        chosen = {name: tensor for name, tensor in names.items() if selected(name, wanted)}
        where, reader = self._open_initial(path)
        if continues and isinstance(reader, ForeignWeights):
            raise UserError(f"checkpoint.initial_load: {where} has no {PROGRESS}; only a checkpoint of titanlite has")
        if continues and isinstance(reader, ShardReader):
            self._check_settings(reader.manifest, where)
        if isinstance(reader, ForeignWeights):
            chosen = {name: tensor for name, tensor in chosen.items() if name not in reader.kept}
        stored = reader.metadata.state_dict_metadata
        new = {f"model.{name}" for name in added} - stored.keys()
        if isinstance(reader, ShardReader) and len(new) < len(added):
            self._check_scale(reader, where)
        chosen = {name: tensor for name, tensor in chosen.items() if name not in new}
        found = self._difference(chosen, reader.metadata, wanted)
        if isinstance(reader, ForeignWeights) and selected("model", wanted):
            found = Difference(found.missing, found.unexpected | reader.unknown)
        if further := of_further_token(found):
            left_out = "the module that predicts the token after the next is left out"
            logger.info(f"from {where}, {left_out}: training.multi_token_weight is 0")
            found = found.without(unexpected=further)
        unexpected = [*self.config.allow_unexpected, *found.missing]  # one of another shape is listed once
        wrong = found.without(missing=self.config.allow_missing, unexpected=unexpected)
        on_each(self.group, lambda: _check_fits(wrong, where))
        if found:
            logger.warning(f"from {where} are not loaded, as allowed:\n{found}")
        try:
            there = {name: tensor for name, tensor in chosen.items() if name not in found.missing}
            _read(reader, {"": there}, self.group)
        except DamagedCheckpoint as damage:
            raise UserError(f"checkpoint.initial_load_path: {damage}") from None
        logger.info(f"initial {', '.join(self.config.initial_load)} from {where}")
        return reader.manifest if continues and isinstance(reader, ShardReader) else None

    def _everywhere(self, names: Collection[str]) -> set[str]:
        """Return names of this rank and of all others."""
        return {name for of_rank in gather([*names], self.group) for name in of_rank} if self.is_cut else {*names}

    def _difference(self, wanted: dict[str, Tensor], there: Metadata, patterns: Sequence[str]) -> Difference:
        """Compare names and shapes; of this rank and of all."""
        found, names = difference(wanted, there, patterns), self._everywhere(wanted)
        return Difference(
            found.missing, {name: found_as for name, found_as in found.unexpected.items() if name not in names}
        )

    def _check_settings(self, manifest: Manifest, where: str) -> None:
        check_settings(self.settings(manifest.samples), manifest.settings, self.may_change, where)

    def _check_scale(self, reader: ShardReader, where: str) -> None:
        """Refuse adapters that were trained with another scale."""
        then, now = (settings.get(LORA_ALPHA) for settings in (reader.manifest.settings, self.settings(0)))
        if then != now:
            raise UserError(f"lora.alpha: {where} has adapters that were trained with {then}, and this is {now}")

    def _open_initial(self, path: str) -> tuple[str, ShardReader | ForeignWeights]:
        """Open the weights at a path on every rank, and return them with their place."""
        if (open_weights := self.open_weights) is not None:
            try:
                weights = on_each(self.group, lambda: open_weights(path))
            except UserError as error:
                raise UserError(f"checkpoint.initial_load_path: {error}") from None
            if weights is not None:
                return weights.where, weights
        url, folder, manifest = on_rank_0(self.group, lambda: find_checkpoint(path, "checkpoint.initial_load_path: "))
        storage = open_storage(url)
        return storage.url_of(folder), on_each(self.group, lambda: ShardReader(storage, folder, manifest))

    def _find(self) -> Manifest | None:
        listing = self.storage.list()
        steps = manifests.committed_steps(listing)
        aside = [folder for folder, names in listing.items() if f"{MANIFEST}.{DAMAGED}" in names]
        if self.config.load_step is not None:
            steps = self._of_branch(steps, self.config.load_step, listing)
        for step in reversed(steps):
            folder = folder_name(step)
            try:
                manifest = manifests.read_complete(self.storage, folder, listing[folder])
            except DamagedCheckpoint as damage:
                self._quarantine(step, damage)
                aside.append(folder)
                continue
            where = self.storage.url_of(folder)
            for lost in sorted(manifests.without_manifest(listing, since=step)):
                logger.warning(f"{self.storage.url_of(lost)} has lost its {MANIFEST}, and does not count")
            self._check_settings(manifest, where)
            if manifest.run_id != self.storage.owner:
                logger.warning(f"{where} was saved by another run (id {manifest.run_id}); this run resumes from it")
            return manifest
        if aside:
            raise UserError(
                f"no good checkpoint is left in {self.storage.url} (damaged: {', '.join(sorted(aside))}). Restore one, "
                "or begin anew under another job.name"
            )
        return None

    def _of_branch(self, steps: list[int], load_step: int, listing: dict[str, dict[str, int]]) -> list[int]:
        """Return the steps that count if load_step is set: that step, and what this setting has saved since.

        So the same command can be started again and again.
        """
        since = [step for step in steps if step > load_step and self._load_step_of(step, listing) == load_step]
        if load_step not in steps and not since:
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(
                f"checkpoint.load_step: {self.storage.url} has no checkpoint of step {load_step} (has: {there})"
            )
        return [step for step in steps if step == load_step or step in since]

    def _load_step_of(self, step: int, listing: dict[str, dict[str, int]]) -> int | None:
        folder = folder_name(step)
        try:
            return manifests.read_manifest(self.storage, folder, listing[folder][MANIFEST]).load_step
        except DamagedCheckpoint:
            return None

    def _quarantine_newer(self, step: int) -> None:
        for newer in manifests.committed_steps(self.storage.list()):
            if newer > step:
                self.storage.quarantine(folder_name(newer), SUPERSEDED)
                logger.warning(f"resuming from step {step}: {self.storage.url_of(folder_name(newer))} no longer counts")

    def _quarantine(self, step: int, damage: DamagedCheckpoint) -> None:
        if step == self.config.load_step:
            raise UserError(f"checkpoint.load_step names a damaged checkpoint: {damage}")
        logger.warning(f"damaged checkpoint: {damage}. It no longer counts; resuming from the one before")
        self.storage.quarantine(folder_name(step), DAMAGED)


def _check_same(wrong: Difference, manifest: Manifest, where: str) -> None:
    """Refuse a checkpoint of the run with other tensors."""
    if not wrong:
        return
    if wrong.is_of_quantization():
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in manifest.mesh.items())
        raise UserError(
            f"{where} keeps moments that this layout keeps in another format:\n{wrong}\n"
            f"Shards below {MIN_ELEMENTS:,} elements keep float32 moments, larger ones quantized moments, so the state "
            f"of the same optimizer differs with another number of shards. Use the number that saved it ({mesh}), or "
            "begin a new run with another optimizer for these parameters in [[optimizer.groups]]"
        )
    section = "model" if wrong.without(missing=["optimizer"], unexpected=["optimizer"]) else "optimizer"
    raise UserError(
        f"{where} is of another {section}:\n{wrong}\nRestore [{section}], or give the new run another job.name"
    )


def _check_fits(wrong: Difference, where: str) -> None:
    """Refuse initial weights with other tensors than those that may differ."""
    if wrong:
        raise UserError(f"{where} does not fit this model:\n{wrong}\nTo load the rest all the same:\n{wrong.options()}")


def _read(reader: StorageReader, state: State, group: dist.ProcessGroup) -> None:
    planner = DefaultLoadPlanner(allow_partial_load=False)
    try:
        dcp.load(_nested(state), storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise error_of_ranks(error) from None


def read_model(model: nn.Module, reader: StorageReader, *, where: str, key: str, group: dist.ProcessGroup) -> None:
    """Read all parameters and persistent buffers of a (sharded) model in place, every rank its own part. Buffers that
    another program does not have keep their values.

    Args:
        where, key: place of the weights, and the option that names it, for errors.

    Raises:
        UserError: the weights are of another model, or damaged.
    """
    try:
        tensors = stored_tensors(reader, model_state(model), where=where)
        _read(reader, {"model": tensors}, group)
    except (UserError, DamagedCheckpoint) as error:
        raise UserError(f"{key}: {error}") from None


def stored_tensors(reader: StorageReader, model: dict[str, Tensor], *, where: str) -> dict[str, Tensor]:
    """Return the tensors of a model that its weights hold: all but buffers that another program does not have.

    Raises:
        UserError: the weights have other tensors than the model.
    """
    kept, unknown = set[str](), dict[str, str]()
    if isinstance(reader, ForeignWeights):
        kept, unknown = reader.kept, reader.unknown
    stored = {name: tensor for name, tensor in model.items() if f"model.{name}" not in kept}
    named = {f"model.{name}": tensor for name, tensor in stored.items()}
    found = difference(named, reader.read_metadata(), ["model"])
    found = found.without(unexpected=of_further_token(found))
    if wrong := Difference(found.missing, found.unexpected | unknown):
        raise UserError(f"{where} belongs to another model:\n{wrong}")
    return stored


def of_further_token(found: Difference) -> list[str]:
    """Return the names of a `FurtherToken` and its norm, which serve training only, that a model lacks."""
    blocks = [name.removesuffix("next_norm.weight") for name in found.unexpected if name.endswith(".next_norm.weight")]
    return [name for name in found.unexpected if name.startswith((*blocks, "model.head.further_norm"))]


def newest_saved(config: Checkpoint, run: Path) -> tuple[int, str | None]:
    """Return (step, run id) of the newest checkpoint whose manifest is not damaged; (0, None) if there is none.

    Args:
        run: folder of the run.
    """
    storage = open_storage(config.folder or str(run / "checkpoints"))
    listing = storage.list()
    for step in reversed(manifests.committed_steps(listing)):
        with suppress(DamagedCheckpoint):
            newest = manifests.read_manifest(storage, folder_name(step), listing[folder_name(step)][MANIFEST])
            return newest.step, newest.run_id
    return 0, None


def _nested(state: State) -> dict[str, Any]:
    return dict(state[""]) if "" in state else {part: dict(tensors) for part, tensors in state.items()}


def find_checkpoint(path: str, key: str = "") -> tuple[str, str, Manifest]:
    """Return (storage URL, folder, manifest) of a checkpoint, or of the newest complete one in a run's folder.

    Args:
        key: option that names the path, with which errors begin.

    Raises:
        UserError: there is no complete checkpoint.
    """
    if "://" not in path and os.path.islink(path.rstrip("/")):  # one that its user names; links are not listed
        path = os.path.realpath(path)
    place, _, folder = path.rstrip("/").rpartition("/")
    if manifests.step_of(folder) is not None:
        storage, candidates = open_storage(place or "."), [folder]
    else:
        of_run = None if "://" in path else open_storage(f"{path}/checkpoints")
        storage = of_run if of_run and manifests.committed_steps(of_run.list()) else open_storage(path)
        candidates = [folder_name(step) for step in manifests.committed_steps(storage.list())][::-1]
    listing = storage.list()
    for candidate in candidates:
        try:
            return storage.url, candidate, manifests.read_complete(storage, candidate, listing.get(candidate, {}))
        except DamagedCheckpoint as damage:
            logger.warning(f"{key}damaged checkpoint: {damage}")
    raise UserError(f"{key}no good checkpoint in {path}")
