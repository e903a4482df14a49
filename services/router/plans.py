"""Which phases and which device classes a turn gets: what it asks for, as far as workers live. Used by
`dispatch.py`, which then picks the workers, and by `affinity.py`, which picks where a turn leaves it open.

A preference without a live worker falls back, visibly, and is taken again with the next turn once its worker
is back: to the default class, then to any class with a worker of the role; a split turn to one worker where
there are none for its two phases, and the other way round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from services.router.fleet import Fleet
from services.router.strategies import Candidate
from shared.events import AUTO, Phases, Role, TurnRequested
from shared.settings import RouterSettings

Cut = Literal["together", "split"]
Avoid = Sequence[Collection[str]]
"""Workers to avoid if possible: everything in the first entry, or else in the second, and so on."""
NOBODY: Avoid = ((),)


class Option(NamedTuple):
    """One way to serve a turn."""

    phases: Cut
    device_class: str
    """Of the decode, where split."""
    prefill_class: str | None = None
    """Where split."""

    def __str__(self) -> str:
        if self.prefill_class is None:
            return f"together on {self.device_class}"
        return f"split {self.prefill_class} → {self.device_class}"


class Wish(NamedTuple):
    """What turns ask for, the router's settings filled in; classes and phases may be `auto`."""

    phases: Phases
    together: str
    decode: str
    prefill: str

    @property
    def open(self) -> bool:
        """Whether anything is left to the router."""
        if self.phases == "together":
            return self.together == AUTO
        return AUTO in (self.phases, self.decode, self.prefill)


class Plan(NamedTuple):
    """Workers that may take a turn."""

    phases: Cut
    workers: list[Candidate]
    """Of role `both`, or `decode` where split. At least one."""
    prefill: list[Candidate]
    """At least one where split, else none."""
    fallbacks: tuple[str, ...] = ()
    """What was preferred and had no live worker: `phases`, `class`, `prefill_class`."""


class Planner:
    """Turns wishes into workers."""

    def __init__(self, settings: RouterSettings, fleet: Fleet) -> None:
        self._settings = settings
        self._fleet = fleet
        self._wishes: dict[tuple[str | None, str | None, Phases | None], Wish] = {}
        self._plans: dict[tuple[Wish, Option], Plan | None] = {}
        self._options: dict[Wish, list[Option]] = {}

    def wish(self, turn: TurnRequested) -> Wish:
        """What a turn asks for."""
        key = (turn.affinity, turn.prefill_affinity, turn.phases)
        wish = self._wishes.get(key)
        if wish is None:
            settings = self._settings
            prefill = AUTO if turn.affinity == AUTO else settings.prefill_class
            wish = self._wishes[key] = Wish(
                turn.phases or settings.phases,
                turn.affinity or settings.default_class,
                turn.affinity or settings.decode_class,
                turn.prefill_affinity or prefill,
            )
        return wish

    def default(self, wish: Wish, phases: Cut | None = None) -> Option:
        """What a wish comes to where nothing is measured."""
        settings = self._settings
        if (phases or wish.phases) == "split":
            return Option(
                "split",
                settings.decode_class if wish.decode == AUTO else wish.decode,
                settings.prefill_class if wish.prefill == AUTO else wish.prefill,
            )
        return Option("together", settings.default_class if wish.together == AUTO else wish.together)

    def options(self, wish: Wish) -> list[Option]:
        """Every way to serve a wish for which workers live now."""
        if wish not in self._options:
            self._options[wish] = self._live_options(wish)
        return self._options[wish]

    def _live_options(self, wish: Wish) -> list[Option]:
        found: list[Option] = []
        if wish.phases != "split":
            found += [Option("together", name) for name in self._matching("both", wish.together)]
        if wish.phases != "together":
            found += [
                Option("split", decode, prefill)
                for prefill in self._matching("prefill", wish.prefill)
                for decode in self._matching("decode", wish.decode)
            ]
        return found

    def _matching(self, role: Role, wanted: str) -> list[str]:
        return [name for name in self._fleet.classes(role) if wanted in (name, AUTO)]

    def fleet_changed(self) -> None:
        """Plans made before do not hold any more."""
        self._plans.clear()
        self._options.clear()

    def plan(self, wish: Wish, option: Option, avoid: Avoid = NOBODY) -> Plan | None:
        """Workers for an option, or for the nearest to it; None where no worker can take the turn at all.

        Whoever is to be avoided is avoided first at the price of class and phases; where that leaves nobody
        for one of the phases, for that phase alone.
        """
        if avoid is not NOBODY:
            return self._made(wish, option, avoid)
        key = (wish, option)
        if key not in self._plans:
            self._plans[key] = self._made(wish, option, avoid)
        return self._plans[key]

    def _made(self, wish: Wish, option: Option, avoid: Avoid) -> Plan | None:
        other = self.default(wish, "split" if option.phases == "together" else "together")
        for levels in (avoid[:1], avoid) if len(avoid) > 1 else (avoid,):
            for candidate in (option, other):
                plan = self._workers(candidate, levels)
                if plan is not None:
                    return plan if candidate is option else plan._replace(fallbacks=("phases",))
        return None

    def _workers(self, option: Option, levels: Avoid) -> Plan | None:
        fallbacks = []
        main = self._first("both" if option.phases == "together" else "decode", option.device_class, levels)
        if main is None:
            return None
        workers, name = main
        if name != option.device_class:
            fallbacks.append("class")
        if option.prefill_class is None:
            return Plan(option.phases, workers, [], tuple(fallbacks))
        first = self._first("prefill", option.prefill_class, levels)
        if first is None:
            return None
        prefill, name = first
        if name != option.prefill_class:
            fallbacks.append("prefill_class")
        return Plan(option.phases, workers, prefill, tuple(fallbacks))

    def _first(self, role: Role, wanted: str, levels: Avoid) -> tuple[list[Candidate], str] | None:
        """The workers of the nearest class that has any, avoiding as many as possible."""
        settings = self._settings
        usual = settings.prefill_class if role == "prefill" else settings.decode_class
        defaults = (settings.default_class,) if role == "both" else (usual, settings.default_class)
        names = dict.fromkeys((wanted, *defaults, *self._fleet.classes(role)))
        for avoid in levels:
            for name in names:
                found = self._fleet.of(role, name)
                if avoid:
                    found = [one for one in found if one.worker.worker_id not in avoid]
                if found:
                    return found, name
        return None
