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
    "What is a + b? Reply with only the number. "
    "(one-digit a and b; reward 0.5 for a bare number, and 0.5 more if it is right)"
)
HELD_OUT: Final = 24
MAX_ANSWER_TOKENS: Final = 10

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
    """What a reply earns, from 0 to 1: the rule of `DESCRIPTION`, to the letter.

    A sentence with the right number in it earns nothing. Paying a little for it makes a plateau: soon every sample
    is such a sentence, none differs from its group, and nothing is learned for long.
    """
    text = reply.strip()
    if not _BARE_NUMBER.fullmatch(text):
        return 0.0
    return 1.0 if text == problem.answer else 0.5


def split_problems(seed: int) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    """All 100 problems in an order drawn from the seed, as (to train on, held out)."""
    problems = [Problem(a, b) for a in range(10) for b in range(10)]
    random.Random(seed).shuffle(problems)
    return tuple(problems[HELD_OUT:]), tuple(problems[:HELD_OUT])
