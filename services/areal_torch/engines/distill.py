"""On-policy distillation: a student samples, a teacher says what it would have said.

The teacher's k likeliest ids of each token are compared with the student's logprobs of the same
ids. With p the teacher's and q the student's probabilities, and one more outcome for "any other
id", so that both add up to 1:

    forward   KL(p || q) = sum_i p_i (log p_i - log q_i)    the student covers all that p does
    reverse   KL(q || p) = sum_i q_i (log q_i - log p_i)    the student keeps to what p prefers

Reverse KL on the student's own samples: arXiv:2306.13649 (GKD) and arXiv:2306.08543 (MiniLLM); the
outcome for the rest makes k ids a coarser distribution, whose KL is at most that of the whole one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.errors import InvalidInput
from areal_torch.algorithms.losses import LossResult
from areal_torch.algorithms.packing import Batch
from areal_torch.engines.model.heads import LogprobHead, TopLogprobHead
from areal_torch.engines.train_api import TrainEngine

# Below it 1 - sum(p) is rounding.
_LEAST_REST = 1e-6


def with_rest(logprobs: Tensor) -> Tensor:
    """Appends the logprob of all other ids: [..., k] -> [..., k + 1]; probabilities add up to 1."""
    kept = logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, (1.0 - kept).clamp(min=_LEAST_REST).log()], -1)


def top_k_kl(student: Tensor, teacher: Tensor, direction: Literal["forward", "reverse"]) -> Tensor:
    """Returns each token's KL divergence over the same k ids and the rest.

    An id that the teacher rules out (logprob -inf: a masked or padded vocabulary) is one of the
    rest, for both.

    Args:
        student: Logprobs [N, k], with gradient.
        teacher: Logprobs [N, k]; -inf: ruled out.
        direction: `forward`, KL(teacher || student), or `reverse`, KL(student || teacher).

    Returns:
        [N], 0 or more.
    """
    ruled_out = teacher == -torch.inf
    q, p = with_rest(student.masked_fill(ruled_out, -torch.inf)), with_rest(teacher)
    # Two equal logprobs of 0 add nothing to either sum.
    unused = torch.nn.functional.pad(ruled_out, (0, 1))
    q, p = q.masked_fill(unused, 0.0), p.masked_fill(unused, 0.0)
    if direction == "forward":
        return (p.exp() * (p - q)).sum(-1)
    return (q.exp() * (q - p)).sum(-1)


@dataclass(frozen=True)
class Distillation:
    """How a teacher's most likely token ids become a loss.

    Example:
        >>> distillation = Distillation(k=16)
        >>> distillation.ask(teacher, batch)
        >>> stats = distillation.train(student, batch)
    """

    k: int = 16
    """Number of token ids that are compared at each position."""
    direction: Literal["forward", "reverse"] = "forward"
    """KL(teacher || student) or KL(student || teacher). `reverse` learns little where the student
    is sure of a token that the teacher would not sample."""
    temperature: float = 1.0
    """Temperature of both distributions."""

    def ask(self, teacher: TrainEngine, batch: Batch) -> None:
        """Adds `teacher_logprobs` and `teacher_ids`, [T, k], of the loss tokens; collective."""
        batch["teacher_logprobs"], batch["teacher_ids"] = teacher.read(
            batch, TopLogprobHead(self.k, self.temperature)
        )

    def train(self, student: TrainEngine, batch: Batch) -> dict[str, float]:
        """Takes one step on the mean KL of all ranks' loss tokens; collective.

        Args:
            student: With an optimizer.
            batch: This rank's share, after `ask`.

        Returns:
            Statistics of `TrainEngine.train_batch`; `loss` is the mean KL of a token.

        Raises:
            InvalidInput: The teacher was not asked.
        """
        if "teacher_ids" not in batch:
            raise InvalidInput("batch has no 'teacher_ids': expected Distillation.ask() first")
        head = LogprobHead(self.temperature, ids="teacher_ids")
        return student.train_batch(batch, self._loss, head=head)

    def _loss(self, logprobs: Tensor, entropies: Tensor, batch: Batch) -> LossResult:
        del entropies
        kl = top_k_kl(logprobs, batch["teacher_logprobs"], self.direction)
        return torch.where(batch["loss_mask"], kl, 0.0).sum(), {}
