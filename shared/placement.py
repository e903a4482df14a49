"""The recipe's `[affinity]`: which hardware each task's turns prefer. Used by `shared.recipe`, which checks
it with everything else, and by whoever asks for rollouts of a recipe's tasks.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, ClassVar, NamedTuple

from pydantic import BeforeValidator, TypeAdapter, model_validator

from shared.errors import FieldProblem
from shared.events import AUTO, Phases
from shared.sections import Section
from shared.settings import Label

_LABEL: TypeAdapter[str] = TypeAdapter(Label)


class PhaseClasses(Section):
    """One device class for the prefill of a task's turns and another for their decode."""

    prefill: Label
    """Device class that computes the prompt, or `auto`."""
    decode: Label
    """Device class that samples, or `auto`."""


def _class_or_phases(value: object) -> object:
    if isinstance(value, Mapping):
        return PhaseClasses.model_validate(value)
    if isinstance(value, PhaseClasses):
        return value
    if not isinstance(value, str):
        raise ValueError('needs a device class, "auto", or { prefill = "…", decode = "…" }')
    return _LABEL.validate_python(value)


Preference = Annotated[Label | PhaseClasses, BeforeValidator(_class_or_phases)]


class Placement(NamedTuple):
    """What one task's turns ask of the router; None leaves it to the router's settings."""

    affinity: str | None = None
    prefill_affinity: str | None = None
    phases: Phases | None = None


class Affinity(Section, extra="allow"):
    """Which hardware takes the turns of each task. Every key besides the two below is the name of a task; its
    value is a device class (`"compute"`, `"bandwidth"` or a label of your own), `"auto"` (the router takes
    the class that it measures to be cheapest), or `{ prefill = "compute", decode = "bandwidth" }`, which
    splits that task's turns over workers of two classes. `affinity = "auto"` in place of the table is short
    for `default = "auto"` with `phases = "auto"`. A class without a live worker falls back to another,
    counted, until it is back; `GET /v1/affinity` of the router tells what was chosen and why."""

    __pydantic_extra__: dict[str, Preference]

    reserved: ClassVar[tuple[str, ...]] = ("default", "phases")

    default: Label | None = None
    """Device class, or `auto`, of tasks that are not named here; the router's `ROUTER__DEFAULT_CLASS` where
    absent."""
    phases: Phases | None = None
    """Of turns of tasks without two classes of their own. `together`: prefill and decode on one worker;
    `split`: over two, which need workers of the roles `prefill` and `decode`; `auto`: whichever the router
    measures to be cheaper. The router's `ROUTER__PHASES` where absent."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: object) -> object:
        if value == AUTO:
            return {"default": AUTO, "phases": AUTO}
        if isinstance(value, str):
            raise ValueError(
                'the only short form is affinity = "auto"; '
                f'for one class write [affinity] default = "{value}"'
            )
        return value

    @property
    def tasks(self) -> dict[str, str | PhaseClasses]:
        """Task → what it prefers."""
        return dict(self.__pydantic_extra__)

    def of(self, task: str, own: str | None) -> Placement:
        """What a task's turns ask for; `own` is the class in the task's own table."""
        wanted = own or self.tasks.get(task, self.default)
        if isinstance(wanted, PhaseClasses):
            return Placement(wanted.decode, wanted.prefill, "split")
        return Placement(wanted, None, self.phases)


def problems(affinity: Affinity, own: Mapping[str, str | None]) -> list[FieldProblem]:
    """What is wrong between `[affinity]` and the tasks: `own` is each task's class in its own table."""
    found = []
    for name in affinity.reserved:
        if name in own:
            text = f"a task cannot be called {name!r}: [affinity] has a key of that name; rename the task"
            found.append(FieldProblem(field=f"tasks.{name}", message=text))
    for name, preference in affinity.tasks.items():
        if name not in own:
            near = difflib.get_close_matches(name, [*own, *affinity.reserved], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(own)}"
            text = f"no task has this name; {hint}"
            found.append(FieldProblem(field=f"affinity.{name}", message=text))
        elif own[name] is not None and own[name] != preference:
            text = f"tasks.{name}.affinity is {own[name]!r}, which differs: keep one of the two"
            found.append(FieldProblem(field=f"affinity.{name}", message=text))
    return found
