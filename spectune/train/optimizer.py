"""AdamW, or Muon for the matrices inside the head with AdamW for the rest; both on fp32 master weights.

Muon (Jordan 2024) orthogonalises each momentum matrix, which needs fewer steps a token but a few extra
products a step. The output head and the norms stay with AdamW, as its author advises.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from spectune.train.head import Eagle3Head
    from spectune.train.plan import TrainPlan

OPTIMIZERS = ("adamw", "muon")
BETAS = (0.9, 0.95)


class HeadOptimizer:
    """One or two torch optimisers stepped as one, at one learning rate."""

    def __init__(self, head: Eagle3Head, plan: TrainPlan) -> None:
        matrices: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in head.named_parameters():
            is_inner = parameter.ndim == 2 and name != "lm_head.weight"
            (matrices if is_inner and plan.optimizer == "muon" else others).append(parameter)
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(others, lr=plan.lr, betas=BETAS, weight_decay=0.0, fused=True)
        ]
        if matrices:
            # the update is scaled to AdamW's size, so that one learning rate serves both
            self._parts.append(
                torch.optim.Muon(matrices, lr=plan.lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            )

    def step(self, lr: float) -> None:
        """Update the weights at this learning rate and drop the gradients."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self._parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.load_state_dict(state)


def learning_rate(plan: TrainPlan, step: int, total: int) -> float:
    """Linear warmup over plan.warmup of the steps, then a cosine down to lr · min_lr_ratio."""
    warm = max(1, round(plan.warmup * total))
    if step < warm:
        return plan.lr * (step + 1) / warm
    phase = (step - warm) / max(1, total - warm)
    return plan.lr * (plan.min_lr_ratio + (1 - plan.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * phase)))
