"""What a training run is asked to do, and how it tells where it stands."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spectune.errors import UsageError

STAGES = ("corpus", "features", "train", "export", "eval")


def flag(setting: str) -> str:
    """The command line's name of a setting."""
    return "--num-tokens-target" if setting == "num_tokens" else f"--{setting.replace('_', '-')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """Settings of `spectune train eagle3`; the defaults suit a 135M target on two CPU cores.

    num_tokens counts answer tokens of the corpus; greedy_share of the answers are greedy, the rest
    sampled at `temperature`; self_share of the prompts are written by the target itself.
    batch_tokens counts padded answer positions per optimiser step; init_from is a head to go on from.
    prompts is a workload of the user's own, each prompt asked once before generated ones are.
    apart_from are workloads (beside the built-in one) whose prompts must not be learnt.
    corpus_share of the rows are trained on, the first ones, without the first corpus_skip of all rows; what
    is held out and the draft vocabulary stay those of the whole corpus, so that sizes can be compared.
    """

    target: Path
    output_dir: Path
    num_tokens: int = 200_000
    max_answer_tokens: int = 256
    max_prompt_tokens: int = 448
    greedy_share: float = 0.65
    temperature: float = 0.8
    self_share: float = 0.5
    generate_batch_size: int = 128
    draft_vocab_size: int = 8192
    ttt_steps: int = 4
    decay: float = 0.8
    epochs: int = 3
    lr: float = 8e-4
    min_lr_ratio: float = 0.05
    warmup: float = 0.03
    clip: float = 1.0
    batch_tokens: int = 1024
    holdout_every: int = 24
    eval_depth: int = 3
    eval_samples: int = 32
    eval_every: int = 150
    checkpoint_every: int = 100
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"
    optimizer: str = "adamw"
    init_from: Path | None = None
    prompts: str | None = None
    apart_from: tuple[str, ...] = ()
    corpus_share: float = 1.0
    corpus_skip: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_tokens", "max_answer_tokens", "ttt_steps", "epochs", "batch_tokens", "eval_depth"):
            if getattr(self, name) < 1:
                raise UsageError(f"{flag(name)} {getattr(self, name)} is below 1")
        for name in ("greedy_share", "self_share", "warmup", "min_lr_ratio"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UsageError(f"{flag(name)} {getattr(self, name)} is not within 0..1")
        if not 0.0 < self.corpus_share <= 1.0:
            raise UsageError(f"--corpus-share {self.corpus_share} is not within 0..1")
        if not 0.0 <= self.corpus_skip < self.corpus_share:
            raise UsageError(
                f"--corpus-skip {self.corpus_skip} is not within 0..{self.corpus_share:g} (--corpus-share)",
                hint="rows between the two are trained on",
            )
        if self.holdout_every < 2:
            raise UsageError(f"holdout-every {self.holdout_every} leaves nothing to train on")
        if self.optimizer not in ("adamw", "muon"):
            raise UsageError(f"--optimizer {self.optimizer} is unknown", hint="use adamw or muon")
        if not 0 < self.lr < math.inf:
            raise UsageError(f"--lr {self.lr} is not a positive number")
        if not 0 < self.temperature < math.inf:
            raise UsageError(
                f"--temperature {self.temperature} is that of the sampled answers, above 0",
                hint="--greedy-share 1 makes all answers greedy",
            )

    def to_dict(self) -> dict[str, Any]:
        return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(self).items()}

    def digest(self, *names: str) -> str:
        """Hash of the named settings: what a stored stage must agree on to be continued."""
        values = self.to_dict()
        text = json.dumps({name: values[name] for name in names}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainEvent:
    """One line of progress: `done` of `total` in `unit`; None where not known yet."""

    stage: str
    message: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    tokens_per_s: float | None = None
    seconds_left: float | None = None


Progress = Callable[[TrainEvent], None]


def silent(event: TrainEvent) -> None:
    """Progress for callers that do not want any."""
