"""Settings that must match when a run resumes: with another value, the resumed run would be another experiment."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from titanlite.checkpoint.manifest import Manifest, Settings
from titanlite.checkpoint.state import selected
from titanlite.models.base import ModelArgs
from titanlite.runtime.errors import UserError
from titanlite.schema import Config
from titanlite.techniques import used

LORA_ALPHA = "lora.alpha"
"""Setting with which adapters in a checkpoint compute."""


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

    def at(self, samples: int) -> Settings:
        """Return the settings as a manifest that was read has them: tuples are lists."""
        return json.loads(json.dumps(self.of_run(samples)))

    def check(self, manifest: Manifest, where: str) -> None:
        """Refuse to resume with other settings than the checkpoint's.

        A setting that is missing is off: None, False, 0 or empty. An older version may not have known it.

        Raises:
            UserError: listing every setting that changed without being allowed to.
        """
        now, then = self.at(manifest.samples), manifest.settings
        differing = (key for key in sorted(now | then) if (now.get(key) or None) != (then.get(key) or None))
        changed = [key for key in differing if not selected(key, self.may_change)]
        if changed:
            lines = "\n".join(f"  {_change(key, then.get(key), now.get(key))}" for key in changed)
            keys = ", ".join(f'"{key}"' for key in changed if not key.startswith("data."))
            accept = [f"checkpoint.allow_changes = [{keys}]"] if keys else []
            if any(key.startswith("data.") for key in changed):
                accept.append('data.on_change = "continue" or "restart"')
            raise UserError(
                f"{where} was trained with other settings, and a resumed run would be another experiment:\n{lines}\n"
                f"Restore them, or give the new run another job.name, or accept: {', '.join(accept)}"
            )


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
