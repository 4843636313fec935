"""The learner: a PEFT model and the policy gradient. Knows nothing of servers or the bus.

Group-relative policy optimisation: a sample's advantage is its reward against the other samples of its prompt
(DeepSeekMath, arXiv 2402.03300). Samples come from a version or two ago, so each token is weighted by how much
likelier it is now than when the server drew it, by the log-probability that the server reported. The weight is
capped, and the gradient goes through every token (CISPO, arXiv 2506.13585): PPO's clip would stop learning from
just those rare replies that the last step made likelier, and here the right reply is rare at first.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from peft import LoraConfig, PeftMixedModel, PeftModel, get_peft_model
from torch import nn
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from bus.errors import InvalidInput
from tools.demo.sampling import Group

LORA_RANK: Final = 16
GROUPS_PER_UPDATE: Final = 4
LEARNING_RATE: Final = 2e-4
LAST_RATE: Final = 0.1
"""What is left of the learning rate at the last step: at the full rate, a policy that has become sharp falls over."""
RATIO_CAP: Final = 2.0
MAX_GRADIENT_NORM: Final = 1.0


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did: mean loss, mean share of tokens whose weight met the cap, the time in seconds."""

    loss: float
    capped: float
    seconds: float


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Each reward against its group: minus the mean, over the standard deviation; all zero if none differs."""
    mean, deviation = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / deviation if deviation > 0 else 0.0 for reward in rewards]


def policy_loss(
    logprobs: torch.Tensor, sampled: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor, cap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The policy-gradient loss with capped importance ratios, and the share of tokens that met the cap.

    `logprobs`, `sampled` and `mask` are (samples, tokens), `advantages` is (samples,), all float32; `mask` is
    1 where a token was sampled and 0 where there is only padding. Averaged over each sample's tokens, then over
    samples.
    """
    ratio = torch.exp(logprobs.detach() - sampled)
    gain = ratio.clamp(max=cap) * advantages.unsqueeze(1) * logprobs
    loss = -((gain * mask).sum(1) / mask.sum(1)).mean()
    return loss, ((ratio > cap) * mask).sum() / mask.sum()


class Learner:
    """A base model in bfloat16 with a trainable LoRA adapter on all its linear layers, on the CPU.

    The adapter starts with B = 0, so the first version is the base model's behaviour. The learning rate falls over
    the `steps` to come. Raises `InvalidInput` for a model that cannot be loaded. Its methods block for seconds:
    call them in a thread, one at a time.
    """

    def __init__(self, model: str, *, seed: int, threads: int, steps: int) -> None:
        disable_progress_bar()
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        try:
            base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InvalidInput(f"{model} cannot be loaded as a model ({reason}); check --model") from error
        self.model: PeftModel | PeftMixedModel = get_peft_model(
            base,
            LoraConfig(r=LORA_RANK, lora_alpha=2 * LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        self._trainable = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._trainable, lr=LEARNING_RATE, weight_decay=0.0)
        self._schedule = LinearLR(self._optimizer, 1.0, LAST_RATE, total_iters=steps)

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Learn from groups of equal size, `GROUPS_PER_UPDATE` at a time.

        Groups whose samples all earned the same teach nothing, and are left out.
        """
        started = time.monotonic()
        telling = [group for group in groups if len({sample.reward for sample in group.samples}) > 1]
        results = [
            self._descend(telling[first : first + GROUPS_PER_UPDATE])
            for first in range(0, len(telling), GROUPS_PER_UPDATE)
        ]
        if results:
            self._schedule.step()
        loss, capped = (statistics.fmean(values) for values in zip(*results, strict=True)) if results else (0.0, 0.0)
        return StepResult(loss, capped, time.monotonic() - started)

    def _descend(self, groups: Sequence[Group]) -> tuple[float, float]:
        logprobs, mask = self._reply_logprobs(groups)
        samples = [sample for group in groups for sample in group.samples]
        sampled = _padded([sample.logprobs for sample in samples], torch.float32)
        advantages = [
            value for group in groups for value in group_advantages([sample.reward for sample in group.samples])
        ]
        loss, capped = policy_loss(logprobs, sampled, torch.tensor(advantages), mask, RATIO_CAP)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        torch.nn.utils.clip_grad_norm_(self._trainable, MAX_GRADIENT_NORM)
        self._optimizer.step()
        return loss.item(), capped.item()

    def logprobs(self, token_ids: Sequence[int]) -> tuple[list[float], list[float]]:
        """The log-probability of each token but the first under the policy as it is now: in float32, and in bfloat16.

        The same weights both times, so their difference is what a server's rounding may do.
        """
        exact = _token_logprobs(copy.deepcopy(self.model).float(), token_ids)
        return exact, _token_logprobs(copy.deepcopy(self.model).to(torch.bfloat16), token_ids)

    def _reply_logprobs(self, groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and mask, each (samples, longest reply).

        The samples of a group share their prompt, which is most of the text: it runs once, and all replies
        attend to its keys and values, gradient included. This makes a step about three times as fast.
        """
        prompts = [group.samples[0].prompt_ids for group in groups]
        replies = [sample.token_ids for group in groups for sample in group.samples]
        size = len(groups[0].samples)
        prompt_mask = _padded([[1] * len(prompt) for prompt in prompts], torch.long, left=True)
        reply_mask = _padded([[1] * len(reply) for reply in replies], torch.long)
        tokens = _padded(replies, torch.long)
        first: Any = self.model(
            input_ids=_padded(prompts, torch.long, left=True),
            attention_mask=prompt_mask,
            position_ids=(prompt_mask.cumsum(1) - 1).clamp(min=0),
            logits_to_keep=1,
            use_cache=True,
        )
        logits = [first.logits.repeat_interleave(size, 0)]
        if tokens.shape[1] > 1:
            cache = first.past_key_values
            cache.batch_repeat_interleave(size)
            lengths = prompt_mask.sum(1).repeat_interleave(size)
            rest: Any = self.model(
                input_ids=tokens[:, :-1],
                attention_mask=torch.cat([prompt_mask.repeat_interleave(size, 0), reply_mask[:, :-1]], 1),
                position_ids=lengths.unsqueeze(1) + torch.arange(tokens.shape[1] - 1),
                past_key_values=cache,
                use_cache=True,
            )
            logits.append(rest.logits)
        scores = torch.log_softmax(torch.cat(logits, 1).float(), dim=-1)
        return scores.gather(2, tokens.unsqueeze(2)).squeeze(2), reply_mask.float()


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype, *, left: bool = False) -> torch.Tensor:
    """Rows of unequal length as one (rows, longest) tensor, filled with zeros on one side."""
    width = max(map(len, rows))
    filled = [[*[0] * (width - len(row)), *row] if left else [*row, *[0] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=dtype)


def _token_logprobs(model: nn.Module, token_ids: Sequence[int]) -> list[float]:
    tokens = torch.tensor([list(token_ids)])
    with torch.no_grad():
        scores = torch.log_softmax(model(input_ids=tokens).logits[0, :-1].float(), dim=-1)
    values: list[float] = scores.gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1).tolist()
    return values
