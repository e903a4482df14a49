"""Plug-in tables: name → `module:Class`, loaded when first used.

Any `package.module:Class` of the user's own works in place of a name, without a change here.
Called by services to load what a recipe names, and by the gateway and the command line to refuse
unknown names before anything starts.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any, Literal

from pydantic import BaseModel, JsonValue, ValidationError

from shared.errors import FieldProblem, Invalid, UnknownPlugin

Kind = Literal["environment", "reward", "engine", "algorithm", "routing"]

TABLES: dict[Kind, dict[str, str]] = {
    "environment": {
        "frozenlake": "services.environment.envs.frozen_lake:FrozenLake",
        "guess_number": "services.environment.envs.guess_number:GuessNumber",
    },
    "reward": {
        "episode_return": "services.reward.scorers:EpisodeReturn",
        "success": "services.reward.scorers:Success",
        "posted": "services.reward.scorers:Posted",
    },
    "engine": {
        "torch": "services.generation.engines.torch_engine:TorchEngine",
        "vllm": "services.generation.engines.vllm_engine:VllmEngine",
        "instant": "services.generation.engines.instant:InstantEngine",
    },
    "algorithm": {
        "grpo": "services.training.algorithms.grpo:Grpo",
    },
    "routing": {
        "sticky_least_loaded": "services.router.strategies:StickyLeastLoaded",
        "least_loaded": "services.router.strategies:LeastLoaded",
    },
}


def check_name(kind: Kind, name: str, *, field: str) -> None:
    """Refuse a name that is in no table and is not of the form `package.module:Class`.

    Raises UnknownPlugin naming `field` and the nearest known name. Imports nothing.
    """
    table = TABLES[kind]
    if name in table:
        return
    module, _, attribute = name.partition(":")
    if attribute.isidentifier() and module and all(part.isidentifier() for part in module.split(".")):
        return
    near = difflib.get_close_matches(name, table, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(table))}"
    message = f"unknown {kind} {name!r}; {hint} (or package.module:Class)"
    raise UnknownPlugin(message, fields=[FieldProblem(field=field, message=message)])


def load(kind: Kind, name: str, *, field: str = "") -> Any:
    """The class behind a name.

    Raises UnknownPlugin where the name, the module or the class does not exist.
    """
    field = field or kind
    check_name(kind, name, field=field)
    module, _, attribute = TABLES[kind].get(name, name).partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module of the user's raises, or exits, as it likes
        said = (
            error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        )
        message = f"cannot load {kind} {name!r}: {said}"
        raise UnknownPlugin(message, fields=[FieldProblem(field=field, message=message)]) from error


def configure(
    kind: Kind, name: str, config: dict[str, JsonValue], *, field: str = "config"
) -> tuple[Any, BaseModel]:
    """The class behind a name and its validated nested `Config`.

    Raises UnknownPlugin, or Invalid naming each wrong key below `field`.
    """
    cls = load(kind, name, field=field)
    if not isinstance(getattr(cls, "Config", None), type) or not issubclass(cls.Config, BaseModel):
        message = f"{name!r} is no {kind}: it has no nested pydantic model `Config`"
        raise UnknownPlugin(message, fields=[FieldProblem(field=field, message=message)])
    try:
        return cls, cls.Config.model_validate(config)
    except ValidationError as error:
        fields = problems(error, prefix=field)
        raise Invalid("; ".join(f"{f.field}: {f.message}" for f in fields), fields=fields) from error


def problems(error: ValidationError, *, prefix: str = "") -> list[FieldProblem]:
    """Each fault of a pydantic error as a dotted path and a sentence."""
    found = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        path = ".".join(str(part) for part in item["loc"])
        name = ".".join(part for part in (prefix, path) if part)
        text = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            text = "unknown key; check its spelling and its section"
        found.append(FieldProblem(field=name or "(whole input)", message=text))
    return found
