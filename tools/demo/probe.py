"""The proof that an adapter is live: the trainer's log-probabilities of a fixed text against every server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tools.demo.task import Problem

PROBE: Final = Problem(3, 4)
"""Asked and answered as the task wants: the base model would say more, so the trained policy differs clearly."""

AGREEMENT: Final = 0.05
"""How far apart two nodes that serve the same bytes may be, in nats; kernels may sum in another order."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The largest differences over all tokens and nodes, in nats, and whether the nodes say the same.

    `rounding` is what bfloat16 alone does: the base model without an adapter, here in float32 and at the servers.
    """

    max_abs_logprob_diff_trained: float
    max_abs_logprob_diff_base: float
    max_abs_logprob_diff_rounding: float
    nodes_agree: bool


def compare(
    trained: Sequence[float],
    trained_base: Sequence[float],
    served: Mapping[str, Sequence[float]],
    served_base: Mapping[str, Sequence[float]],
) -> ProbeResult:
    """Compare the trainer's log-probabilities, with its adapter and without, with those of each node."""
    policies = list(served.values())
    return ProbeResult(
        max(_difference(trained, values) for values in policies),
        max(_difference(trained, values) for values in served_base.values()),
        max(_difference(trained_base, values) for values in served_base.values()),
        all(_difference(policies[0], values) <= AGREEMENT for values in policies[1:]),
    )


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
