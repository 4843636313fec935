"""The proof that an adapter is live: the trainer's log-probabilities of a fixed text against every server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tools.demo.task import Problem

PROBE: Final = Problem(3, 4)
PROBE_REPLY: Final = "The answer is 7."
"""What the base model might well say and the task does not want: the trained policy has unlearned it, so the two
differ clearly. The bare number would not do: to a policy that gets the sum wrong it is as unlikely as to the base."""

AGREEMENT: Final = 0.05
"""How far apart two nodes that serve the same bytes may be, in nats; kernels may sum in another order."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The largest differences over all tokens and nodes, in nats, and whether the nodes say the same.

    `rounding` is what bfloat16 alone does to this policy: the trainer's model in float32 against the same in bfloat16.
    It grows as the policy gets sharp, so the base model's would be no measure.
    """

    max_abs_logprob_diff_trained: float
    max_abs_logprob_diff_base: float
    max_abs_logprob_diff_rounding: float
    nodes_agree: bool


def compare(
    trained: Sequence[float],
    rounded: Sequence[float],
    served: Mapping[str, Sequence[float]],
    served_base: Mapping[str, Sequence[float]],
) -> ProbeResult:
    """Compare the trainer's log-probabilities with its own in bfloat16, and with those of each node."""
    policies = list(served.values())
    return ProbeResult(
        max(_difference(trained, values) for values in policies),
        max(_difference(trained, values) for values in served_base.values()),
        _difference(trained, rounded),
        all(_difference(policies[0], values) <= AGREEMENT for values in policies[1:]),
    )


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
