"""Workers that exist only as heartbeats, with the speeds of two kinds of GPU, for tests of what a router
measures and chooses."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from turn_wire import turn_of

from services.router.affinity import Affinity, Choice
from services.router.fleet import Fleet
from services.router.measured import Measured
from services.router.plans import Option, Planner
from shared.events import Role, TurnRequested
from shared.settings import RouterSettings
from shared.state import WorkerRecord
from shared.state.records import TaskProfile

AUTO = {"affinity": "auto", "phases": "auto"}
KINDS: list[tuple[Role, str]] = [
    ("both", "compute"), ("both", "bandwidth"), ("prefill", "compute"), ("decode", "bandwidth"),
]  # fmt: skip


def record(worker_id: str, role: Role, device_class: str, **changes: object) -> WorkerRecord:
    """A worker's heartbeat."""
    fields: dict[str, object] = {
        "worker_id": worker_id, "role": role, "device_class": device_class, "gpu_model": "", "url": "",
        "partitions": [0], "running": 0, "waiting": 0, "kv_usage": 0.0, "policies": {}, "updated_at": 0.0,
    }  # fmt: skip
    return WorkerRecord.model_validate(fields | changes)


@dataclass
class Shape:
    """What one turn of a task needs."""

    prompt_tokens: int
    generated_tokens: int


@dataclass
class World:
    """A router's planner and choices, and workers that report every second what they did."""

    kinds: Sequence[tuple[Role, str]] = tuple(KINDS)
    noise: float = 0.0
    """By how much each second's measurements on a class are off, at most, as a share."""
    prefill_s: dict[str, float] = field(default_factory=lambda: {"compute": 1e-5, "bandwidth": 6e-5})
    """Seconds of one prompt token; the ratio is that of H800 and H20."""
    decode_s: dict[str, float] = field(default_factory=lambda: {"compute": 6e-3, "bandwidth": 5e-3})
    transfer_s: float = 0.001
    now: float = 1000.0
    settings: RouterSettings = field(default_factory=RouterSettings)

    def __post_init__(self) -> None:
        self._random = random.Random(3)
        self._profiles: dict[tuple[Role, str], dict[str, TaskProfile]] = {kind: {} for kind in self.kinds}
        self.routers: list[Affinity] = []
        self.fleets: list[tuple[Fleet, Planner]] = []
        self._turns = 0
        self._off: dict[str, float] = {}
        self.picked: list[tuple[TurnRequested, Option]] = []
        self.add_router()

    def add_router(self) -> Affinity:
        """One more replica, which knows nothing yet."""
        fleet = Fleet()
        planner = Planner(self.settings, fleet)
        affinity = Affinity(planner, fleet, Measured(), self.settings.class_costs)
        self.routers.append(affinity)
        self.fleets.append((fleet, planner))
        self.beat()
        return affinity

    def beat(self) -> None:
        """Every worker reports, every router reads."""
        self._off = {
            name: 1 + self._random.uniform(-self.noise, self.noise) for name in sorted(self.prefill_s)
        }
        workers = [
            record(f"{role}-{name}", role, name, tasks=dict(self._profiles[role, name]), updated_at=self.now)
            for role, name in self.kinds
        ]
        for affinity, (fleet, planner) in zip(self.routers, self.fleets, strict=True):
            fleet.update(workers, self.now)
            planner.fleet_changed()
            affinity.measured.observe(workers)
            affinity.look(self.now)

    def play(self, seconds: int, tasks: dict[str, Shape], *, rate: int = 40, **wish: object) -> None:
        """So many first turns of fresh trajectories of each task a second."""
        wish = wish or dict(AUTO)
        for _ in range(seconds):
            for task, shape in tasks.items():
                for _ in range(rate):
                    self._turns += 1
                    turn = turn_of(f"run/{task}-{self._turns}.0#0", task=task, **wish)
                    affinity = self.routers[self._turns % len(self.routers)]
                    planner = self.fleets[self._turns % len(self.routers)][1]
                    made = planner.wish(turn)
                    option = affinity.pick(turn, made, affinity.choice(task, made, self.now))
                    self.picked.append((turn, option))
                    self._serve(task, shape, option)
            self.now += 1.0
            self.beat()

    def choice(self, task: str, router: int = 0, **wish: object) -> Choice:
        """What a router has chosen for a task."""
        turn = turn_of("any", task=task, **(wish or AUTO))
        return self.routers[router].choice(task, self.fleets[router][1].wish(turn), self.now)

    def _serve(self, task: str, shape: Shape, option: Option) -> None:
        first: Role = "both" if option.prefill_class is None else "prefill"
        second: Role = "both" if option.prefill_class is None else "decode"
        ahead = option.prefill_class or option.device_class
        prefill = shape.prompt_tokens * self.prefill_s[ahead] * self._off[ahead]
        decode = shape.generated_tokens * self.decode_s[option.device_class] * self._off[option.device_class]
        self._add(first, ahead, task,
                  prefills=1, prompt_tokens=shape.prompt_tokens, prefill_s=prefill)  # fmt: skip
        self._add(second, option.device_class, task,
                  decodes=1, generated_tokens=shape.generated_tokens, decode_s=decode,
                  transfer_s=self.transfer_s if second == "decode" else 0.0)  # fmt: skip

    def _add(self, role: Role, device_class: str, task: str, **grown: float) -> None:
        profiles = self._profiles.get((role, device_class))
        if profiles is None:
            return
        before = profiles.get(task, TaskProfile())
        profiles[task] = before.model_copy(
            update={name: getattr(before, name) + value for name, value in grown.items()}
        )
