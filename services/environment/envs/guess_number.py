"""Find a secret number by asking: every guess is answered with the range that is left.

Loaded by the episode loop.
"""

from __future__ import annotations

import random
import re
from typing import ClassVar, Self

from pydantic import Field, model_validator

from services.environment.protocol import EnvironmentConfig, Split, Step

_NUMBER = re.compile(r"\d+")


class GuessNumber:
    """Guess a number from 1 to `highest` in at most `guesses` guesses. Reward 1 for the secret, else 0."""

    blocking: ClassVar[bool] = False

    class Config(EnvironmentConfig):
        """Keys of a task's `config`."""

        highest: int = Field(16, ge=2, le=1_000_000)
        """The secret is drawn evenly from 1 to this."""
        guesses: int = Field(5, ge=1, le=1000)
        show_range: bool = True
        """Tell the range that is left after every guess, not only the direction."""

        @model_validator(mode="after")
        def _not_trivial(self) -> Self:
            if self.guesses >= self.highest:
                raise ValueError("guesses must be below highest, or every secret can be tried")
            return self

    def __init__(self, config: Config) -> None:
        self._config = config
        self._secret = 0
        self._low, self._high = 1, config.highest
        self._left = config.guesses

    def reset(self, *, seed: int, split: Split) -> str:
        """Draw the secret of the seed and explain the game. Both splits hold the same secrets."""
        self._secret = random.Random(f"{split}/{seed}").randint(1, self._config.highest)
        self._low, self._high = 1, self._config.highest
        self._left = self._config.guesses
        instructions = f"Find the number. You have {self._left} guesses."
        return f"{instructions}\nfrom 1 to {self._config.highest}"

    def step(self, action: str) -> Step:
        """Answer a guess. A text that does not hold exactly one number is a guess lost."""
        self._left -= 1
        numbers = _NUMBER.findall(action)
        # int() of thousands of digits is slow or refused; no such number is in range.
        guess = int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) <= 9 else None
        if guess == self._secret:
            return Step("correct", 1.0, True, False)
        return Step(self._answer(guess), 0.0, self._left <= 0, False)

    def scripted_action(self, rng: random.Random, *, skill: float) -> str:
        """The middle of what is left with probability `skill`, else any number of the game."""
        if rng.random() < skill:
            return str((self._low + self._high) // 2)
        return str(rng.randint(1, self._config.highest))

    def close(self) -> None:
        """Nothing is held."""

    def _answer(self, guess: int | None) -> str:
        if guess is None:
            return f"Answer one number.\n{self._range()}"
        if guess < self._secret:
            self._low = max(self._low, guess + 1)
            return f"higher\n{self._range()}" if self._config.show_range else "higher"
        self._high = min(self._high, guess - 1)
        return f"lower\n{self._range()}" if self._config.show_range else "lower"

    def _range(self) -> str:
        return f"from {self._low} to {self._high}"
