"""Gymnasium's FrozenLake as a conversation: a generated map per seed, described to the player in words.

The player sees what lies beside it, its own trail included, and the direction of the goal, never the whole
map. Loaded by the episode loop.
"""

from __future__ import annotations

import random
import re
import zlib
from collections import deque
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from services.environment.protocol import EnvironmentConfig, Split, Step
from shared.errors import FieldProblem, Invalid

if TYPE_CHECKING:
    from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

MOVES = {"left": (0, 0, -1), "down": (1, 1, 0), "right": (2, 0, 1), "up": (3, -1, 0)}
"""Word → Gymnasium's action, change of row, change of column."""
_WORD = re.compile(r"\b(left|down|right|up)\b")
_TILES = {"S": "ice", "F": "ice", "H": "hole", "G": "goal"}
_EVAL_SHARE = 5
"""One layout of so many is kept for split `eval`."""
_EVAL_SALT = 167
"""A 4×4 map has few likely layouts. With this start value of the checksum both splits hold holes in the same
places equally often (within 0.06 for each tile, at 0.7 and 0.8 ice); with 0 they differ by up to 0.16."""
_MAX_DRAWS = 10_000


def split_of(layout: tuple[str, ...]) -> Split:
    """The split a map belongs to: a property of the layout alone, so no layout is in both."""
    return "eval" if zlib.crc32("\n".join(layout).encode(), _EVAL_SALT) % _EVAL_SHARE == 0 else "train"


@lru_cache(maxsize=4096)
def draw_layout(seed: int, *, split: Split, size: int, ice: float) -> tuple[str, ...]:
    """A solvable map of the split, one string per row; the same for the same arguments.

    Raises Invalid where the split seems to hold no map of this size and share of ice.
    """
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map

    rng = random.Random(seed)
    for _ in range(_MAX_DRAWS):
        layout = tuple(generate_random_map(size=size, p=ice, seed=rng.getrandbits(32)))
        if split_of(layout) == split:
            return layout
    message = f"no map of split {split!r} with size {size} and ice {ice}; choose a larger size"
    raise Invalid(message, fields=[FieldProblem(field="config.size", message=message)])


class FrozenLake:
    """Walk over the ice to the goal. Reward 1 at the goal, 0 elsewhere; a hole ends the episode."""

    blocking: ClassVar[bool] = False

    class Config(EnvironmentConfig):
        """Keys of a task's `config`."""

        size: int = Field(4, ge=3, le=16)
        """Rows and columns of the map."""
        ice: float = Field(0.8, ge=0.3, le=0.95)
        """Share of tiles that are not holes."""
        is_slippery: bool = False
        """Gymnasium's slippery ice: two moves of three go sideways."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._layout: tuple[str, ...] = ()
        self._game: FrozenLakeEnv | None = None
        self._trail: set[tuple[int, int]] = set()

    def reset(self, *, seed: int, split: Split) -> str:
        """Draw the map of the seed and describe the start."""
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        config = self._config
        self._layout = draw_layout(seed, split=split, size=config.size, ice=config.ice)
        self._game = FrozenLakeEnv(desc=list(self._layout), is_slippery=config.is_slippery)
        self._game.reset(seed=seed % 2**32)
        self._trail = {self._position()}
        return (
            "Walk over the ice to the goal and never step into a hole. "
            "Answer left, down, right or up.\n" + self._describe()
        )

    def step(self, action: str) -> Step:
        """Move. A text that does not name exactly one direction is answered with a reminder."""
        named = set(_WORD.findall(action.lower()))
        if len(named) != 1:
            return Step("Answer left, down, right or up.\n" + self._describe(), 0.0, False, False)
        move = MOVES[named.pop()][0]
        _, reward, terminated, _, _ = self._playing().step(move)  # type: ignore[no-untyped-call]
        self._trail.add(self._position())
        return Step(self._describe(), float(reward), bool(terminated), False)

    def scripted_action(self, rng: random.Random, *, skill: float) -> str:
        """The first move of a shortest way to the goal with probability `skill`, else any move that does not
        end in a hole."""
        if rng.random() < skill:
            return self._shortest_way()
        row, column = self._position()
        moves = MOVES.items()
        return rng.choice(
            [w for w, (_, down, right) in moves if self._tile(row + down, column + right) != "hole"]
        )

    def close(self) -> None:
        """Nothing is held: no window is ever opened."""

    def _playing(self) -> FrozenLakeEnv:
        if self._game is None:
            raise RuntimeError("step before reset")
        return self._game

    def _position(self) -> tuple[int, int]:
        return divmod(int(self._playing().s), self._config.size)

    def _tile(self, row: int, column: int) -> str:
        inside = 0 <= row < self._config.size and 0 <= column < self._config.size
        if (row, column) in self._trail:
            return "trail"
        return _TILES[self._layout[row][column]] if inside else "edge"

    def _describe(self) -> str:
        row, column = self._position()
        around = [
            f"{word} {self._tile(row + down, column + right)}" for word, (_, down, right) in MOVES.items()
        ]
        return "\n".join([*around, self._compass(row, column)])

    def _compass(self, row: int, column: int) -> str:
        """Where the goal lies: `goal down left`."""
        goal = next((r, line.index("G")) for r, line in enumerate(self._layout) if "G" in line)
        vertical = {-1: " up", 0: "", 1: " down"}[(goal[0] > row) - (goal[0] < row)]
        horizontal = {-1: " left", 0: "", 1: " right"}[(goal[1] > column) - (goal[1] < column)]
        return f"goal{vertical}{horizontal}" if vertical or horizontal else "goal here"

    def _shortest_way(self) -> str:
        """The first move of a breadth-first search from where the player stands."""
        start = self._position()
        queue: deque[tuple[tuple[int, int], str]] = deque([(start, "")])
        seen = {start}
        while queue:
            (row, column), first = queue.popleft()
            for word, (_, down, right) in MOVES.items():
                place = (row + down, column + right)
                tile = self._tile(*place)
                if tile == "goal":
                    return first or word
                if tile in ("ice", "trail") and place not in seen:
                    seen.add(place)
                    queue.append((place, first or word))
        raise RuntimeError("a map without a way to its goal")
