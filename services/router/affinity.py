"""`auto`: the cheapest way to serve each task, by what workers have measured. Used by `dispatch.py`.

The cost of a turn is the price of a class times the seconds of a worker that the task's typical turn takes
there, its share where many are worked on at once: for one worker its prefill and its decode, for two the
prefill at the one class and decode and transfer at the other. Decoding gets cheaper with company, and an
option that is only explored has none: its decode counts as shared by as many as the present choice has.
A choice changes only for a clear and lasting gain. A small, fixed share of trajectories, from beginning to
end, goes where too little was measured of late. Everything follows from heartbeats and ids, so that routers
side by side choose alike.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from services.router.fleet import Fleet
from services.router.measured import FORGET_S, Cell, Measured, Typical
from services.router.plans import Option, Planner, Wish
from shared import metrics
from shared.events import Role, TurnRequested

_LOG = structlog.get_logger()
MIN_TURNS = 8.0
"""Of an option, before it takes part; and weighted by age, below which it is explored."""
GAIN = 0.15
"""By which another option must be cheaper."""
LOOKS = 3
"""In a row, in which it must be."""
LOOK_S = 1.0
DWELL_S = 30.0
"""From one change of a choice to the next at least."""
EXPLORED = 16
"""One trajectory in so many is used to measure."""


class Figures(NamedTuple):
    """One option of a task, for its typical turn."""

    option: Option
    turns: float
    """Measured, weighted by age."""
    ready: bool
    """Enough was measured to compare it."""
    prefill_s: float
    decode_s: float
    transfer_s: float
    cost: float


@dataclass(slots=True)
class Choice:
    """How the turns of one task with one wish are served now."""

    current: Option
    acting: Option
    """`current`, or what stands in for it while its workers are away."""
    since: float
    switches: int = 0
    why: str = ""
    unsure: tuple[Option, ...] = ()
    """Options to be explored."""
    figures: tuple[Figures, ...] = ()
    leading: Option | None = None
    looks: int = 0
    """In a row at which `leading` was clearly cheaper."""
    looked_at: float = float("-inf")
    away_since: float | None = None
    used_at: float = 0.0
    assigned: int = 0
    explored: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)


class Affinity:
    """What one router has chosen."""

    def __init__(self, planner: Planner, fleet: Fleet, measured: Measured, prices: dict[str, float]) -> None:
        self._planner = planner
        self._fleet = fleet
        self.measured = measured
        self._prices = prices
        self.choices: dict[tuple[str, Wish], Choice] = {}

    def choice(self, task: str, wish: Wish, now: float) -> Choice:
        """The choice for a task, a new one where it was not asked for yet."""
        choice = self.choices.get((task, wish))
        if choice is None:
            default = self._planner.default(wish)
            choice = Choice(current=default, acting=default, since=now, why=_declared(wish))
            self.choices[task, wish] = choice
            if wish.open:
                self._look(task, wish, choice, now)
        choice.used_at = now
        return choice

    def pick(self, turn: TurnRequested, wish: Wish, choice: Choice) -> Option:
        """How to serve a turn: as its trajectory was served before, or by exploration, or as chosen."""
        if not wish.open:
            return choice.current
        kept = self._kept(turn, wish)
        if kept is not None:
            return kept
        if choice.unsure:
            number = zlib.crc32(turn.trajectory_id.encode())
            if number % EXPLORED == 0:
                choice.explored += 1
                return choice.unsure[number // EXPLORED % len(choice.unsure)]
        return choice.acting

    def _kept(self, turn: TurnRequested, wish: Wish) -> Option | None:
        """The option of the workers that hold the trajectory's KV, while they live."""
        last = self._fleet.find(turn.last_worker)
        if last is None:
            return None
        if last.worker.role == "both":
            kept = Option("together", last.worker.device_class)
        else:
            first = self._fleet.find(turn.last_prefill_worker)
            if first is None:
                return None
            kept = Option("split", last.worker.device_class, first.worker.device_class)
        return kept if kept in self._planner.options(wish) else None

    def look(self, now: float) -> None:
        """Compare again, after new heartbeats."""
        for (task, wish), choice in list(self.choices.items()):
            if now - choice.used_at > FORGET_S:
                del self.choices[task, wish]
            elif wish.open:
                self._look(task, wish, choice, now)
        self.measured.forget(now)

    def _look(self, task: str, wish: Wish, choice: Choice, now: float) -> None:
        options = self._planner.options(wish)
        typical = self.measured.typical(task, now)
        company = self._company(task, choice.current)
        choice.figures = tuple(self._figures(task, option, typical, company, now) for option in options)
        choice.unsure = tuple(
            f.option for f in choice.figures if f.turns < MIN_TURNS and f.option != choice.current
        )
        ready = sorted((f for f in choice.figures if f.ready), key=lambda f: (f.cost, f.option))
        if choice.current not in options:
            self._stand_in(task, choice, options, ready, now)
            return
        choice.acting, choice.away_since = choice.current, None
        if now - choice.looked_at >= LOOK_S * 0.9:
            choice.looked_at = now
            self._compare(task, choice, ready, now)

    def _stand_in(
        self, task: str, choice: Choice, options: list[Option], ready: list[Figures], now: float
    ) -> None:
        """The workers of the choice are away."""
        if choice.away_since is None:
            choice.away_since = now
        choice.leading, choice.looks = None, 0
        if options and choice.acting not in options:
            choice.acting = ready[0].option if ready else options[0]
        choice.why = f"{choice.current} has no live workers"
        if options and now - choice.away_since >= DWELL_S:
            self._switch(task, choice, choice.acting, now, f"{choice.why} for {DWELL_S:.0f} s")

    def _compare(self, task: str, choice: Choice, ready: list[Figures], now: float) -> None:
        own = next((f for f in ready if f.option == choice.current), None)
        if own is None:
            choice.why = f"too little is measured yet to compare: {_counts(choice.figures)}"
            return
        best = ready[0]
        clear = best.cost < own.cost * (1 - GAIN)
        choice.looks = choice.looks + 1 if clear and best.option == choice.leading else int(clear)
        choice.leading = best.option if clear else None
        settled = choice.switches == 0 or now - choice.since >= DWELL_S
        if choice.looks >= LOOKS and settled:
            self._switch(task, choice, best.option, now, self._comparison(best, own))
        elif clear:
            choice.why = f"{self._comparison(best, own)}: taken if that lasts"
        else:
            rest = next((f for f in ready if f is not own), None)
            choice.why = self._comparison(own, rest)

    def _switch(self, task: str, choice: Choice, option: Option, now: float, why: str) -> None:
        _LOG.info("affinity changed", task=task, before=str(choice.current), now=str(option), why=why)
        metrics.AFFINITY_SWITCHES.labels(task).inc()
        choice.current = choice.acting = option
        choice.since = now
        choice.switches += 1
        choice.why = why
        choice.leading, choice.looks, choice.away_since = None, 0, None

    def _company(self, task: str, current: Option) -> float:
        """Turns of the task that are decoded at a time under the present choice, over all its workers."""
        role: Role = "both" if current.prefill_class is None else "decode"
        cell = self.measured.cell(task, role, current.device_class)
        return 0.0 if cell is None else cell.beside * len(self._fleet.of(role, current.device_class))

    def _figures(
        self, task: str, option: Option, typical: Typical | None, company: float, now: float
    ) -> Figures:
        if option.prefill_class is None:
            prefill = decode = self.measured.cell(task, "both", option.device_class)
        else:
            prefill = self.measured.cell(task, "prefill", option.prefill_class)
            decode = self.measured.cell(task, "decode", option.device_class)
        if prefill is None or decode is None or typical is None:
            return Figures(option, 0.0, False, 0.0, 0.0, 0.0, 0.0)
        prefill_s, decode_s = _typical_seconds(prefill, decode, typical)
        role: Role = "both" if option.prefill_class is None else "decode"
        expected = company / max(1, len(self._fleet.of(role, option.device_class)))
        if 0 < decode.beside < expected:
            decode_s *= decode.beside / expected
        transfer_s = 0.0 if option.prefill_class is None else decode.transfer_s
        price = self.price(option.device_class)
        prefill_price = self.price(option.prefill_class or option.device_class)
        return Figures(
            option,
            turns=min(prefill.turns(now), decode.turns(now)),
            ready=min(prefill.seen, decode.seen) >= MIN_TURNS,
            prefill_s=prefill_s,
            decode_s=decode_s,
            transfer_s=transfer_s,
            cost=prefill_price * prefill_s + price * (decode_s + transfer_s),
        )

    def price(self, device_class: str) -> float:
        """Of a second on a class."""
        return self._prices.get(device_class, 1.0)

    def _comparison(self, own: Figures, rest: Figures | None) -> str:
        """One sentence with the numbers."""
        said = f"{own.option} costs {self._sum(own)} a turn"
        return said if rest is None else f"{said}, {rest.option} {self._sum(rest)}"

    def _sum(self, figures: Figures) -> str:
        option = figures.option
        price = self.price(option.device_class)
        if option.prefill_class is None:
            parts = f"{price:g} × ({figures.prefill_s:.4g} s prefill + {figures.decode_s:.4g} s decode)"
        else:
            ahead = self.price(option.prefill_class)
            parts = (
                f"{ahead:g} × {figures.prefill_s:.4g} s prefill + {price:g} × ({figures.decode_s:.4g} s "
                f"decode + {figures.transfer_s:.4g} s transfer)"
            )
        return f"{figures.cost:.4g} ({parts})"


def _typical_seconds(prefill: Cell, decode: Cell, typical: Typical) -> tuple[float, float]:
    computed = max(1.0, typical.prompt_tokens * prefill.computed_share)
    return computed * prefill.prefill_s_per_token, typical.generated_tokens * decode.decode_s_per_token


def _counts(figures: tuple[Figures, ...]) -> str:
    return ", ".join(f"{f.turns:.0f} turns {f.option}" for f in figures) or "no live workers"


def _declared(wish: Wish) -> str:
    return "nothing is measured yet: the default" if wish.open else "declared"
