"""Model of foreign weights: as they describe themselves, or as the user names it."""

from pathlib import Path

from titanlite.checks.preflight import select_model
from titanlite.config.load import load
from titanlite.data.tokenizer import load_tokenizer
from titanlite.models.registry import ModelSpec, resolve_model
from titanlite.runtime.errors import UserError
from titanlite.schema import Config, Data, ModelSelection
from titanlite.tools.convert.weights import ForeignSource, check_args, find_flavor, table_of


def resolve_source(
    source: ForeignSource, *, model: str | None = None, flavor: str | None = None, config: str | Path | None = None
) -> tuple[ModelSpec, Config]:
    """Return the model of foreign weights, and a config that has it and the tokenizer beside the weights.

    Args:
        model: name of the family; None takes what the weights describe.
        config: config with the model, instead of name and flavor.

    Raises:
        UserError: the weights are of another model, or do not describe it.
    """
    if config is not None:
        resolved = load(config)
        spec = select_model(resolved.model, load_tokenizer(resolved.data.tokenizer))
        if (args := source.read_args(spec.model_cls)) is not None:
            check_args(source.where, args, spec, [])
        return spec, resolved
    name, spec = describe(source, name=model, flavor=flavor)
    args = vars(spec.args)
    flavor = flavor or find_flavor(spec.model_cls, args)
    base = spec.model_cls.flavors[flavor] if flavor else next(iter(spec.model_cls.flavors.values()))
    changed = {key: value for key, value in args.items() if value != getattr(base, key) or key == "vocab_size"}
    selection = ModelSelection(name=name, flavor=flavor, args=changed)
    tokenizer = source.tokenizer()
    data = Data(tokenizer=str(tokenizer.absolute())) if tokenizer else Data()
    return spec, Config(model=selection, data=data)


def describe(source: ForeignSource, *, name: str | None = None, flavor: str | None = None) -> tuple[str, ModelSpec]:
    """Return (family, model) of a source: as it describes itself, or a flavor.

    Args:
        name: model family; None takes that of the source.

    Raises:
        UserError: the source is of another model, or does not describe its model.
    """
    name = name or source.family()
    if name is None:
        raise UserError(f"{source.where} does not describe its model: name it (--model, --config)")
    model_cls = resolve_model(name, flavor, {}).model_cls
    table_of(source, model_cls)
    args = source.read_args(model_cls)
    if flavor is not None:
        spec = ModelSpec(model_cls, model_cls.flavors[flavor])
        if args is not None:
            check_args(source.where, args, spec, [])
        return name, spec
    if args is None:
        raise UserError(f"{source.where} does not describe its model: name it (--flavor, --config)")
    try:
        resolve_model(name, None, args)  # checks the type of each value
        return name, ModelSpec(model_cls, type(next(iter(model_cls.flavors.values())))(**args))
    except (ValueError, TypeError) as error:  # values that fit no model
        raise UserError(f"{source.where}: {error}") from None
