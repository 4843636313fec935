"""The task the demo learns: one-digit sums, answered with the bare number. Pure; knows no model and no server.

The reward is a rule that anyone can check by hand. Nothing in it looks at the model, and the held-out problems
are never sampled from while training.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

DESCRIPTION: Final = (
    "What is a + b? Reply with only the number. (one-digit a and b; "
    "reward 0.5 for a bare number, and 0.5 more if it is right; 0.25 if the right one is only mentioned)"
)
HELD_OUT: Final = 24
MAX_ANSWER_TOKENS: Final = 12

_BARE_NUMBER: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Problem:
    """One sum, of two numbers from 0 to 9."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"What is {self.a} + {self.b}? Reply with only the number."

    @property
    def answer(self) -> str:
        return str(self.a + self.b)


def reward(problem: Problem, reply: str) -> float:
    """What a reply earns, from 0 to 1: the rule of `DESCRIPTION`, to the letter."""
    text = reply.strip()
    if _BARE_NUMBER.fullmatch(text):
        return 1.0 if text == problem.answer else 0.5
    return 0.25 if problem.answer in _BARE_NUMBER.findall(text) else 0.0


def split_problems(seed: int) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """All 100 problems in an order drawn from the seed, as (to train on, held out)."""
    problems = [Problem(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(problems)
    return tuple(problems[HELD_OUT:]), tuple(problems[:HELD_OUT])
