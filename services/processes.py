"""Which processes a stack on one machine has, and what each is given. Used by `services.launcher`, the doctor
and the commands.

Every service is one process but `generation`: `LAUNCHER__WORKERS` asks for one per worker, each with a device
class and a role of its own.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, get_args

from pydantic import TypeAdapter, ValidationError

from services.host import APPS, worker_label
from shared.errors import FieldProblem, Invalid
from shared.events import AUTO, Role
from shared.settings import GenerationSettings, Group, Label, Settings

MAX_WORKERS = 64
_LABEL: TypeAdapter[str] = TypeAdapter(Label)
_ROLES: tuple[Role, ...] = get_args(Role)
_EXAMPLE = "LAUNCHER__WORKERS=compute:prefill,bandwidth:decode*2"


@dataclass(frozen=True)
class Process:
    """One process of a service."""

    name: str
    """Unique in the stack: its log file, and what people are told."""
    service: str
    settings: Settings

    @property
    def worker(self) -> str:
        """`class:role` of a generation worker."""
        return worker_label(self.settings.generation)


def serve_command(service: str) -> list[str]:
    """The command line of one service's process."""
    return [sys.executable, "-m", "services.cli", "serve", service]


def environment(settings: Settings) -> dict[str, str]:
    """The variables from which a process loads these very settings."""
    values: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Group):
            for key, inner in value.model_dump(mode="json", exclude_none=True).items():
                text = json.dumps(inner) if isinstance(inner, dict | list) else str(inner)
                values[f"{name.upper()}__{key.upper()}"] = text
        elif isinstance(field.validation_alias, str) and str(value):
            values[field.validation_alias] = str(value)
    return values


def plan(settings: Settings, services: Sequence[str] = tuple(APPS)) -> list[Process]:
    """The processes of these services, in the order in which they are stopped.

    Raises Invalid naming LAUNCHER__WORKERS or GENERATION__KV_PORT and the fix.
    """
    known = [name for name in APPS if name in services]
    found: list[Process] = []
    for service in [*known, *(name for name in services if name not in APPS)]:
        found += _workers(settings) if service == "generation" else [Process(service, service, settings)]
    return found


def describe(processes: Sequence[Process]) -> str:
    """The workers among them, as a person reads it: `compute:prefill, bandwidth:decode ×2`."""
    counts = Counter(process.worker for process in processes if process.service == "generation")
    return ", ".join(f"{worker} ×{count}" if count > 1 else worker for worker, count in counts.items())


def kv_ports(generation: GenerationSettings) -> range:
    """Ports that a worker serves KV on, where they are fixed."""
    first = generation.kv_port if generation.role == "prefill" else 0
    return range(first, first + generation.max_policies) if first else range(0)


def _workers(settings: Settings) -> list[Process]:
    if not settings.launcher.workers.strip():
        return [Process("generation", "generation", settings)]
    kinds = [kind for entry in settings.launcher.workers.split(",") for kind in _entry(entry)]
    if len(kinds) > MAX_WORKERS:
        _refuse(f"asks for {len(kinds)} workers; at most {MAX_WORKERS} can be started on one machine")
    roles = {role for _, role in kinds}
    if "both" not in roles and not roles >= {"prefill", "decode"}:
        lacking = "decode" if "prefill" in roles else "prefill"
        _refuse(
            f"has no worker of role `{lacking}`, so that no turn could be served: add one, or one of role "
            f"`both`; for example {_EXAMPLE}"
        )
    return [
        Process(name, "generation", settings.model_copy(update={"generation": generation}))
        for name, generation in zip(_names(kinds), _settings(kinds, settings.generation), strict=True)
    ]


def _entry(entry: str) -> list[tuple[str, Role]]:
    """`class:role` or `class:role*n`."""
    given = entry.strip()
    kind, star, times = (part.strip() for part in given.partition("*"))
    label, colon, role = (part.strip() for part in kind.partition(":"))
    known: Role | None = next((name for name in _ROLES if name == role), None)
    if not given or not colon:
        _refuse(f"{given!r} is not `class:role`; for example {_EXAMPLE}")
    if known is None:
        _refuse(f"unknown role {role!r} in {given!r}; known: {', '.join(_ROLES)}")
    try:
        _LABEL.validate_python(label)
    except ValidationError:
        _refuse(f"{label!r} is no device class: use up to 31 of a-z, 0-9 and -, for example `compute`")
    if label == AUTO:
        _refuse(f"{AUTO!r} is not a device class of a worker; name the class of its hardware")
    if star and not (times.isascii() and times.isdigit() and int(times[:9]) > 0 and len(times) <= 9):
        _refuse(f"{times!r} in {given!r} is no number of workers: use 1 to {MAX_WORKERS}, or leave it out")
    if star and int(times) > MAX_WORKERS:
        _refuse(f"{given!r} asks for {times} workers; at most {MAX_WORKERS} can be started on one machine")
    return [(label, known)] * (int(times) if star else 1)


def _names(kinds: Sequence[tuple[str, Role]]) -> list[str]:
    """`generation` for a single worker; else its class and role, and its number among those alike."""
    if len(kinds) == 1:
        return ["generation"]
    total, seen = Counter(kinds), Counter[tuple[str, Role]]()
    names = []
    for kind in kinds:
        seen[kind] += 1
        number = f"-{seen[kind]}" if total[kind] > 1 else ""
        # A class may end in a number too: the role between the two keeps names apart.
        names.append(f"generation-{kind[0]}-{kind[1]}{number}")
    return names


def _settings(kinds: Sequence[tuple[str, Role]], generation: GenerationSettings) -> list[GenerationSettings]:
    """A fixed port for KV is the first prefill worker's; the next one's come behind those of its policies."""
    found = []
    port = generation.kv_port
    for label, role in kinds:
        one = generation.model_copy(update={"device_class": label, "role": role, "kv_port": port})
        if ports := kv_ports(one):
            port = ports.stop
        if port > 65_536:
            message = (
                f"the ports of {len(kinds)} workers, {generation.max_policies} each, go beyond 65535: use a "
                "lower one, or 0 for free ones"
            )
            field = "GENERATION__KV_PORT"
            raise Invalid(f"{field}: {message}", fields=[FieldProblem(field=field, message=message)])
        found.append(one)
    return found


def _refuse(message: str) -> NoReturn:
    field = "LAUNCHER__WORKERS"
    raise Invalid(f"{field}: {message}", fields=[FieldProblem(field=field, message=message)])
