"""Resumption of a run: which states it may begin with, what must match, and loading in place."""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import tomli
import torch.distributed as dist
from torch import Tensor

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.dcp_read import ShardReader, read_tensors
from titanlite.checkpoint.difference import Difference, difference, names_of_ranks, selected, to_globs
from titanlite.checkpoint.history import RunHistory
from titanlite.checkpoint.manifest import CONFIG, DAMAGED, SUPERSEDED, Manifest, Progress, Settings, folder_name
from titanlite.checkpoint.save import Saver
from titanlite.models.base import ModelArgs
from titanlite.optim.quantized import MIN_ELEMENTS
from titanlite.runtime.errors import DamagedCheckpoint, UserError
from titanlite.runtime.ranks import on_each, on_rank_0
from titanlite.schema import Checkpoint, Config, Job
from titanlite.state import FURTHER, TrainingState, flat, parameter_of
from titanlite.storage.storage import MANIFEST, Listing, Storage, open_storage
from titanlite.techniques import used

logger = logging.getLogger(__name__)

# Settings that must match: with another value, the resumed run would be another experiment.


LORA_ALPHA = "lora.alpha"
"""Setting with which adapters in a checkpoint compute."""
ADD_PARAMETERS = "training.multi_token_weight", "lora"
"""Settings that add parameters to a model."""
TRAIN_OTHERS = *ADD_PARAMETERS, "freeze"
"""Settings that change which parameters are trained."""


def resume_settings(config: Config, *, model_args: ModelArgs, inputs: Mapping[str, object]) -> Settings:
    """Return the settings of a run that must match.

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


def model_settings(title: str, model_args: ModelArgs) -> Settings:
    """Return the settings of a model that must match.

    Args:
        title: name of the model.
        model_args: dataclass of its shape.
    """
    args = {f"model.args.{name}": value for name, value in asdict(model_args).items() if name != "max_seq_len"}
    return {"model.name": title, **args}


@dataclass(frozen=True)
class RunSettings:
    """Settings of this run that a checkpoint keeps, and those of them that may differ from a checkpoint's."""

    of_run: Callable[[int], Settings]
    """Returns the settings by the number of samples that the run has seen."""
    may_change: Sequence[str]
    """Globs."""
    model: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """Tensors of the model by name, of this rank."""
    is_cut: bool = False
    """Other ranks have other tensors."""
    layout: Mapping[str, int] = field(default_factory=dict[str, int])
    """Degrees of the mesh, by axis. They need not match."""

    def at(self, samples: int) -> Settings:
        """Return the settings as a manifest that was read has them: tuples are lists."""
        return json.loads(json.dumps(self.of_run(samples)))

    def changed(self, manifest: Manifest) -> list[str]:
        """Return the settings that differ from a checkpoint's.

        A setting that is missing is off: None, False, 0 or empty. An older version may not have known it.
        """
        now, then = self.at(manifest.samples), manifest.settings
        return [key for key in sorted(now | then) if (now.get(key) or None) != (then.get(key) or None)]

    def check(self, manifest: Manifest, where: str, *, open_reader: Callable[[], ShardReader] | None = None) -> None:
        """Refuse to resume with other settings than the checkpoint's.

        Args:
            open_reader: opens the checkpoint. Default: its tensors are not compared with the model's.

        Raises:
            UserError: listing every setting that changed without being allowed to, and the options that accept that,
                if its tensors are those of the model then.
        """
        now, then, all_changed = self.at(manifest.samples), manifest.settings, self.changed(manifest)
        changed = [key for key in all_changed if not selected(key, self.may_change)]
        if changed:
            lines = "\n".join(f"  {_change(key, then.get(key), now.get(key))}" for key in changed)
            if wrong := self._of_other_tensors(all_changed, open_reader):
                raise UserError(
                    f"{where} was trained with other settings, and its tensors are those of another model:\n{lines}\n"
                    f"{wrong}\nRestore them, or give the new run another job.name"
                )
            keys = ", ".join(f'"{key}"' for key in changed if not key.startswith("data."))
            accept = [f"checkpoint.allow_changes = [{keys}]"] if keys else []
            if any(key.startswith("data.") for key in changed):
                accept.append('data.on_change = "continue" or "restart"')
            raise UserError(
                f"{where} was trained with other settings, and a resumed run would be another experiment:\n{lines}\n"
                f"Restore them, or give the new run another job.name, or accept: {', '.join(accept)}"
            )

    def _of_other_tensors(self, changes: Sequence[str], open_reader: Callable[[], ShardReader] | None) -> Difference:
        """Return how the tensors of a checkpoint differ from the model's beyond what changed settings explain."""
        nothing = Difference({}, {})
        if open_reader is None or not self.model:
            return nothing
        try:
            metadata = open_reader().metadata
        except (DamagedCheckpoint, UserError):  # it is not loaded here
            return nothing
        found = difference(flat({"model": dict(self.model)}), metadata, ["model"])
        found = found if not self.is_cut else Difference(found.missing, {})
        own = {f"model.{name}" for name in self.model}
        return found.less(explained(found, changes, own=own, stored=metadata.state_dict_metadata))


def explained(
    found: Difference, changes: Sequence[str], *, own: Collection[str], stored: Collection[str]
) -> Difference:
    """Return the part of a difference that changed settings explain: parameters that only one side has, and moments of
    parameters that only one side trains.

    Args:
        changes: the settings.
        own, stored: names of all tensors of this run, and of the checkpoint.
    """
    adds = any(selected(key, ADD_PARAMETERS) for key in changes)
    trains = any(selected(key, TRAIN_OTHERS) for key in changes)

    def only(names: Mapping[str, str], others: Collection[str]) -> dict[str, str]:
        trained_there = {parameter_of(name) for name in others if ".state." in name}
        is_moment = {name: "optimizer.state." in name for name in names}
        return {
            name: text
            for name, text in names.items()
            if (trains and parameter_of(name) not in trained_there if is_moment[name] else adds and name not in others)
        }

    return Difference(only(found.missing, stored), only(found.unexpected, own))


def _change(key: str, then: object, now: object) -> str:
    """Return a changed setting in words. The setting of a data source is its fingerprint, its packing and its weight
    (0a1b-2c3d x 0.5), which people cannot read."""
    if not key.startswith("data.sources."):
        return f"{key} was {then}, is {now}"
    if then is None or now is None:
        return f"{key} is {'new' if then is None else 'gone'}"
    (old, _, old_weight), (new, _, new_weight) = (str(setting).rpartition(" x ") for setting in (then, now))
    if old == new:
        return f"{key}.weight was {old_weight}, is {new_weight}"
    if old.partition("-")[0] == new.partition("-")[0]:
        return f"{key} has its tokens in other sequences (data.packing, training.seq_len)"
    options = "data.tokenizer, chat_template, add_bos or add_eos"
    return f"{key} has other tokens (other text in data.path, or another {options})"


# Choice of the checkpoint, and loading.


def _raise(damage: DamagedCheckpoint) -> None:
    raise damage


@dataclass(frozen=True)
class Candidate:
    """A state that a run may begin with."""

    step: int
    """0: the run begins anew."""
    load: Callable[[], Progress]
    """Loads it in place, on every rank. It raises DamagedCheckpoint if it cannot be read. The state is undefined then.
    """
    reject: Callable[[DamagedCheckpoint], None] = _raise
    """Is called after that, so that the source does not offer it again."""


class Source(Protocol):
    """Where a run may begin."""

    def newest(self, after: int) -> Candidate | None:
        """Return the newest state of a step after `after`, the same one on all ranks; None if there is none.

        Raises:
            UserError: there is one, and the run may not continue with it.
        """


@dataclass
class SharedCheckpoints:
    """The checkpoints of a run, as a source.

    Rank 0 alone chooses: a network file system may show other ranks an older list, and checks on every rank would flood
    it.
    """

    state: TrainingState
    saver: Saver
    history: RunHistory
    settings: RunSettings

    def __post_init__(self) -> None:
        self.config, self.storage, self.group = self.saver.config, self.saver.storage, self.saver.group

    def newest(self, after: int) -> Candidate | None:
        manifest = on_rank_0(self.group, self._choose)
        # On all ranks: rank 0 alone has that of its last save.
        self.saver.newest = (manifest.step, manifest.saved_at) if manifest else (0, 0.0)
        if manifest is None or manifest.step <= after:
            return None
        return Candidate(manifest.step, partial(self._load, manifest), partial(self._reject, manifest.step))

    def _load(self, manifest: Manifest) -> Progress:
        open_reader = partial(ShardReader, self.storage, folder_name(manifest.step), manifest)
        load_checkpoint(self.state, manifest, open_reader, settings=self.settings, group=self.group)
        if self.config.load_step is not None:
            on_rank_0(self.group, lambda: self._quarantine_newer(manifest.step))
        return manifest.progress

    def _reject(self, step: int, damage: DamagedCheckpoint) -> None:
        on_rank_0(self.group, partial(self._quarantine, step, damage))

    def _choose(self) -> Manifest | None:
        """Return the newest complete checkpoint of this run; None if there is none. Quarantine damaged ones, with a
        warning.

        Raises:
            UserError: the one that load_step names is damaged, or settings changed.
            RunError: the store returns less than it lists. No checkpoint is taken for damaged then.
        """
        listing = self.storage.list()
        steps = manifests.committed_steps(listing)
        if self.config.load_step is not None:
            steps = self._of_branch(steps, self.config.load_step, listing)
        for step in reversed(steps):
            folder = folder_name(step)
            try:
                manifest = manifests.read_manifest(self.storage, folder, listing[folder][MANIFEST])
                if manifest.run_id != self.storage.owner:
                    continue
                manifests.check_sizes(self.storage, folder, manifest, listing[folder])
            except DamagedCheckpoint as damage:
                self._quarantine(step, damage)
                continue
            where = self.storage.url_of(folder)
            for lost in sorted(manifests.without_manifest(listing, since=step)):
                logger.warning(f"{self.storage.url_of(lost)} has lost its {MANIFEST}, and does not count")
            self.settings.check(manifest, where, open_reader=partial(ShardReader, self.storage, folder, manifest))
            return manifest
        return None

    def check_beginning(self) -> None:
        """Refuse to begin anew where there were checkpoints.

        Raises:
            UserError: all are damaged, or they have disappeared.
        """
        on_rank_0(self.group, self._check_beginning)

    def _check_beginning(self) -> None:
        listing = self.storage.list()
        damaged = sorted(folder for folder, names in listing.items() if f"{MANIFEST}.{DAMAGED}" in names)
        if damaged:
            raise UserError(
                f"no good checkpoint is left in {self.storage.url} (damaged: {', '.join(damaged)}). Restore one, or "
                "begin anew under another job.name"
            )
        if self.history.has_saved:
            raise UserError(
                f"this run has saved checkpoints, and none is in {self.storage.url}. Is that the right place, and "
                "is it mounted? To begin anew, give another job.name, or delete the run's folder"
            )

    def _quarantine(self, step: int, damage: DamagedCheckpoint) -> None:
        """Make a damaged checkpoint no longer count, so that `newest` returns the one before.

        Raises:
            UserError: it is the one that load_step names.
        """
        if step == self.config.load_step:
            raise UserError(f"checkpoint.load_step names a damaged checkpoint: {damage}")
        logger.warning(f"damaged checkpoint: {damage}. It no longer counts; resuming from the one before")
        self.storage.quarantine(folder_name(step), DAMAGED)

    def _of_branch(self, steps: list[int], load_step: int, listing: Listing) -> list[int]:
        """Return the steps that count if load_step is set: that step, and what was saved with this setting since.

        So the same command can be started again and again.
        """
        since = [step for step in steps if step > load_step and self._load_step_of(step, listing) == load_step]
        if load_step not in steps and not since:
            there = ", ".join(map(str, steps)) or "none"
            raise UserError(
                f"checkpoint.load_step: {self.storage.url} has no checkpoint of step {load_step} (has: {there})"
            )
        return [step for step in steps if step == load_step or step in since]

    def _load_step_of(self, step: int, listing: Listing) -> int | None:
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


def load_checkpoint(
    state: TrainingState,
    manifest: Manifest,
    open_reader: Callable[[], ShardReader],
    *,
    settings: RunSettings,
    group: dist.ProcessGroup,
) -> None:
    """Load a checkpoint into all tensors of a state, on every rank.

    Raises:
        DamagedCheckpoint: a file has changed since it was written. The state is undefined then.
        UserError: the checkpoint belongs to another model, or is not safe to load.
    """
    to_load = state.to_load()
    tensors = state.as_saved(to_load)
    reader = on_each(group, open_reader)
    where = reader.where
    everywhere = names_of_ranks(tensors, group if state.is_cut else None)
    found = difference(flat(tensors), reader.metadata, ["*"], everywhere=everywhere)
    wrong = found.without(missing=FURTHER, unexpected=FURTHER)
    for part in FURTHER:
        if part in tensors and found != found.without(missing=[part], unexpected=[part]):
            for tensor in tensors.pop(part).values():
                tensor.zero_()  # a damaged checkpoint may have been read into it
            logger.info(f"{where} has no such part of the state, {part}: it begins anew at step {manifest.step}")
    stored = reader.metadata.state_dict_metadata
    accepted = explained(wrong, settings.changed(manifest), own=everywhere, stored=stored)
    on_each(group, lambda: _check_same(wrong.less(accepted), manifest, where))
    for line in _lines(accepted):
        logger.info(f"{where} {line}")
    chosen = {name: tensor for name, tensor in flat(tensors).items() if name not in accepted.missing}
    read_tensors(reader, chosen, group)
    state.end_load(to_load, {*chosen})


def _lines(accepted: Difference) -> Iterator[str]:
    """Yield what becomes of the parameters and moments that only a run, or only its checkpoint has."""
    for names, of_moments, of_parameters in (
        (accepted.missing, "does not train {}: their moments begin anew", "lacks {}: they keep their initial values"),
        (accepted.unexpected, "trains {}: their moments are dropped", "has {}: they are dropped"),
    ):
        moments = [parameter_of(name).partition("state.")[2] for name in names if "optimizer.state." in name]
        parameters = [name.partition("model.")[2] for name in names if "optimizer.state." not in name]
        for text, those in ((of_parameters, parameters), (of_moments, moments)):
            if those:
                yield text.format(", ".join(to_globs(those)))


def _check_same(wrong: Difference, manifest: Manifest, where: str) -> None:
    """Refuse a checkpoint whose tensors are not those of this run.

    Args:
        wrong: tensors that differ.
        where: the checkpoint, for errors.
    """
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


def newest_saved(config: Checkpoint, job: Job, run: Path) -> tuple[int, str | None]:
    """Return (step, run id) of the newest checkpoint whose manifest is not damaged; (0, None) if there is none.

    Args:
        run: folder of the run. Without run.json, as on a machine that takes the place of another, the run owns the
            checkpoints in its folder, and those elsewhere that a run of the same name and dump_folder has saved. The
            id of others is None.
    """
    storage = open_storage(config.folder or str(run / "checkpoints"))
    listing = storage.list()
    for step in reversed(manifests.committed_steps(listing)):
        with suppress(DamagedCheckpoint):
            folder = folder_name(step)
            newest = manifests.read_manifest(storage, folder, listing[folder][MANIFEST])
            is_own = config.folder is None or (run / "run.json").exists() or _is_of(job, storage, folder, newest)
            return newest.step, newest.run_id if is_own else None
    return 0, None


def _is_of(job: Job, storage: Storage, folder: str, manifest: Manifest) -> bool:
    """Return whether a run of the same name and dump_folder has saved a checkpoint."""
    try:
        there = tomli.loads(manifests.read_checked(storage, folder, CONFIG, manifest).decode())["job"]
        return (there["name"], there["dump_folder"]) == (job.name, job.dump_folder)
    except (DamagedCheckpoint, ValueError, KeyError, TypeError, RecursionError):
        return False
