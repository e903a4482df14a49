"""What the turns of a task look like, and who plays them.

Used by `pd.py`, and by `pd_asker.py`, which is given these over its command line.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from shared.events import Phases


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Profile(_Part):
    """One task's typical trajectory, in tokens."""

    name: str
    prompt: int
    """Before the first turn."""
    turns: int
    answer: int
    """Sampled in each turn."""
    observation: int
    """Added after each turn by the environment."""


FROZENLAKE = Profile(name="frozenlake", prompt=600, turns=20, answer=24, observation=1000)
"""Long history, many turns, each adds a picture and samples a move: its time is prefill."""
MATH = Profile(name="math", prompt=400, turns=2, answer=1536, observation=100)
"""A short question and long answers: its time is decode."""
SWE = Profile(name="swe", prompt=4000, turns=32, answer=160, observation=600)
"""Long prompts and answers over many turns: both."""


class Lane(_Part):
    """Players that ask for their turns alike."""

    players: int
    affinity: str | None = None
    prefill_affinity: str | None = None
    phases: Phases | None = None


class Queue(_Part):
    """Trajectories of one profile. The players of all lanes take from it: faster hardware plays more."""

    profile: Profile
    trajectories: int
    lanes: list[Lane]


class Job(_Part):
    """What is played at the same time, and timed as one."""

    name: str
    queues: list[Queue]


class Plan(_Part):
    """All that one asker does, one job after the other."""

    workers: int
    """That must be there before it begins."""
    tokens_per_id: int
    vocab_size: int
    context_window: int
    """In ids."""
    jobs: list[Job]


class Outcome(_Part):
    """Of one job."""

    name: str
    seconds: float
    """From the first turn asked to the last answered."""
    turns: int
    classes: dict[str, dict[str, int]]
    """Task → device class that answered → turns."""
    handed_over: int
    """Turns whose KV came from a prefill worker."""
    recomputed: dict[str, int]
    """Why it did not → turns."""
    retries: int
    busy: dict[str, float]
    """Worker class and role → share of the time in which its engines had work."""
