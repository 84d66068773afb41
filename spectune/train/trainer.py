"""The optimisation loop: packed batches, bf16 products on fp32 weights, checkpoints, live acceptance.

The order of batches and the learning rate are functions of (plan, step), so a run that stops at any
step continues exactly as if it had not.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spectune.errors import RunError, StoreError, UsageError
from spectune.store.files import replacing
from spectune.train.corpus import append_whole, replace_whole
from spectune.train.evaluate import HeldOut, evaluate
from spectune.train.features import FeatureStore
from spectune.train.head import Eagle3Head
from spectune.train.optimizer import HeadOptimizer, learning_rate
from spectune.train.plan import Progress, TrainEvent, TrainPlan
from spectune.train.ttt import Sample, collate, ttt_loss

TRAIN_SETTINGS = (
    "num_tokens", "draft_vocab_size", "ttt_steps", "decay", "epochs", "lr", "min_lr_ratio", "warmup",
    "clip", "batch_tokens", "holdout_every", "seed", "optimizer", "init_from", "corpus_share",
)  # fmt: skip
SAMPLE_TENSORS = ("ids", "answer_start", "features", "final", "top")
_SORT_POOL = 64
_REPORT_EVERY = 10


def _digest(plan: TrainPlan) -> str:
    """What a state must agree on to be gone on with; states from before corpus_skip skipped nothing."""
    return plan.digest(*TRAIN_SETTINGS, *(("corpus_skip",) if plan.corpus_skip else ()))


def split(
    store: FeatureStore, holdout_every: int, kept: frozenset[int] | None = None
) -> tuple[list[int], list[int]]:
    """(train, held out) sample numbers: one row in holdout_every, drawn by its corpus index alone.

    kept: corpus indices to use; None is all.
    """
    train: list[int] = []
    held: list[int] = []
    for i in range(len(store)):
        if kept is not None and store.corpus_index(i) not in kept:
            continue
        drawn = random.Random(store.corpus_index(i)).randrange(holdout_every)
        (held if drawn == 0 else train).append(i)
    return train, held


def batches(lengths: Sequence[int], budget: int, epoch: int, seed: int) -> list[list[int]]:
    """Indices of one epoch in batches of similar length, padded size within `budget` tokens.

    Shuffled, sorted by length inside pools only, and the batches shuffled again.
    """
    rng = random.Random(f"{seed}:{epoch}")
    order = list(range(len(lengths)))
    rng.shuffle(order)
    average = max(1, sum(lengths) // max(1, len(lengths)))
    pool_size = _SORT_POOL * max(1, budget // average)
    made: list[list[int]] = []
    for low in range(0, len(order), pool_size):
        pool = sorted(order[low : low + pool_size], key=lengths.__getitem__)
        current: list[int] = []
        for index in pool:
            if current and (len(current) + 1) * lengths[index] > budget:
                made.append(current)
                current = []
            current.append(index)
        made.append(current)
    rng.shuffle(made)
    return made


class Trainer:
    """Trains one head on one feature store. `embedding`: [V, H]; `draft_rows`: [D, H], both frozen.

    data_digest: of the rows and the draft vocabulary; a state of other ones is not continued.
    """

    def __init__(
        self,
        plan: TrainPlan,
        head: Eagle3Head,
        embedding: Tensor,
        draft_rows: Tensor,
        store: FeatureStore,
        directory: Path,
        progress: Progress,
        kept: frozenset[int] | None = None,
        data_digest: str | None = None,
    ) -> None:
        self.plan, self.head, self.store, self.progress = plan, head, store, progress
        self.embedding, self.draft_rows = embedding, draft_rows
        self.path, self.curve = directory / "train-state.pt", directory / "curve.jsonl"
        self._data_digest = data_digest
        train_ids, held = split(store, plan.holdout_every, kept)
        first, end = (math.ceil(part * len(train_ids)) for part in (plan.corpus_skip, plan.corpus_share))
        self.train_ids = train_ids[first:end]
        if train_ids and not self.train_ids:
            raise UsageError(
                f"--corpus-skip {plan.corpus_skip} and --corpus-share {plan.corpus_share} leave none of "
                f"{len(train_ids)} rows to train on",
                hint="skip less, or decode a larger corpus",
            )
        self.held = [i for i in held if store.is_greedy(i)][: plan.eval_samples]
        lengths = [store.answer_length(i) for i in self.train_ids]
        self._epochs = [batches(lengths, plan.batch_tokens, e, plan.seed) for e in range(plan.epochs)]
        self.total_steps = sum(map(len, self._epochs))
        self._total_tokens = plan.epochs * sum(lengths)
        self.optimizer = HeadOptimizer(head, plan)
        self.step = self.num_tokens = 0
        self.held_out: HeldOut | None = None
        self._is_updating = False

    def run(self, *, until: int | None = None) -> HeldOut | None:
        """Train to the end (or to step `until`); an interrupt saves the state and is passed on."""
        if not self.train_ids:
            raise RunError("the corpus has no answer to train on", hint="raise --num-tokens-target")
        last = self.total_steps if until is None else min(until, self.total_steps)
        started, tokens_at_start = time.monotonic(), self.num_tokens
        schedule = self._schedule()
        try:
            for number, samples in enumerate(schedule):
                if number >= last:
                    break
                if number < self.step:
                    continue
                losses = self._update(samples)
                rate = (self.num_tokens - tokens_at_start) / (time.monotonic() - started)
                self._report(losses, rate)
        except KeyboardInterrupt:
            if not self._is_updating:  # half an update is no state; the last checkpoint stays
                self.save()
            raise
        self.save()
        return self.held_out

    def _schedule(self) -> Iterator[list[int]]:
        for epoch in self._epochs:
            for batch in epoch:
                yield [self.train_ids[i] for i in batch]

    def _update(self, sample_ids: Sequence[int]) -> list[float]:
        plan = self.plan
        samples = [self.store.sample(i) for i in sample_ids]
        batch = collate(samples, plan.ttt_steps, self.embedding.device)
        is_bf16 = self.draft_rows.dtype == torch.bfloat16
        with torch.autocast(self.embedding.device.type, dtype=torch.bfloat16, enabled=is_bf16):
            loss, losses = ttt_loss(
                self.head,
                self.embedding,
                batch,
                self.draft_rows,
                num_steps=plan.ttt_steps,
                decay=plan.decay,
            )
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), plan.clip)
        if not bool(torch.isfinite(norm)):
            self._stop_at(sample_ids, samples, losses, float(norm))
        self._is_updating = True
        self.optimizer.step(learning_rate(plan, self.step, self.total_steps))
        self.step += 1
        self.num_tokens += sum(self.store.answer_length(i) for i in sample_ids)
        self._is_updating = False
        return losses

    def _stop_at(
        self, sample_ids: Sequence[int], samples: Sequence[Sample], losses: Sequence[float], norm: float
    ) -> None:
        """Save the weights before the bad update and the batch that caused it, then fail."""
        self.save()
        path = self.path.with_name("bad-batch.pt")
        batch = {
            "step": self.step,
            "corpus_indices": [self.store.corpus_index(i) for i in sample_ids],
            "losses": list(losses),
            "samples": [{name: getattr(one, name) for name in SAMPLE_TENSORS} for one in samples],
        }
        _save_whole(batch, path)
        raise RunError(
            f"step {self.step}: the gradient is {norm}, losses {', '.join(f'{loss:.4g}' for loss in losses)}; "
            f"the batch is in {path}, the weights before it in {self.path}",
            hint=f"look at these rows; to start over with a lower --lr, delete {self.path.name}: corpus and "
            "features stay",
        )

    def _report(self, losses: Sequence[float], rate: float) -> None:
        is_last = self.step == self.total_steps
        if self.step % self.plan.checkpoint_every == 0:
            self.save()
        message = ""
        if self.held and (self.step % self.plan.eval_every == 0 or is_last):
            self.held_out = self.evaluate()
            message = f"held out: {self.held_out.text}"
        if self.step % _REPORT_EVERY and not message:
            return
        self._note(losses, rate, has_new=bool(message))
        shown = " ".join(f"{loss:.3f}" for loss in losses)
        self.progress(
            TrainEvent(
                stage="train",
                message=message or f"loss by step {shown}",
                done=self.step,
                total=self.total_steps,
                unit="steps",
                tokens_per_s=rate,
                seconds_left=max(0, self._total_tokens - self.num_tokens) / rate,
            )
        )

    def _note(self, losses: Sequence[float], rate: float, *, has_new: bool) -> None:
        """One line of the training curve."""
        row = {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "losses": [round(loss, 5) for loss in losses],
            "tokens_per_s": round(rate, 1),
            "held_out": asdict(self.held_out) if has_new and self.held_out is not None else None,
        }
        append_whole(self.curve, json.dumps(row) + "\n")

    def _cut_curve(self) -> None:
        """Drop lines beyond the step from which training goes on."""
        if not self.curve.exists():
            return
        lines = self.curve.read_text(encoding="utf-8").split("\n")[:-1]
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        replace_whole(self.curve, "".join(f"{line}\n" for line in kept).encode())

    def evaluate(self) -> HeldOut:
        """Acceptance on the held-out greedy answers."""
        return evaluate(
            self.head,
            self.embedding,
            [self.store.sample(i) for i in self.held],
            depth=self.plan.eval_depth,
            dtype=self.draft_rows.dtype,
        )

    def save(self) -> None:
        """Weights, optimiser and position, written whole or not at all."""
        state = {
            "digest": _digest(self.plan),
            "data": self._data_digest,
            "step": self.step,
            "num_tokens": self.num_tokens,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        _save_whole(state, self.path)

    def resume(self) -> bool:
        """Continue from the stored state, if there is one; other settings are refused."""
        if not self.path.exists():
            return False
        try:
            state = torch.load(self.path, weights_only=True)
        except Exception as error:  # damaged archives raise what their format's reader raises
            raise StoreError(
                f"{self.path} cannot be read: {error}", hint="delete it to train from the start"
            ) from error
        if state["digest"] != _digest(self.plan):
            raise StoreError(
                f"{self.path} was written with other training settings",
                hint="use the same settings, or another --output-dir",
            )
        if (known := state.get("data")) is not None and known != self._data_digest:
            raise StoreError(
                f"{self.path} was trained on other rows or another draft vocabulary than the corpus gives now",
                hint="give --num-tokens-target, --prompts and --apart-from as before, or another --output-dir",
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.num_tokens = state["step"], state["num_tokens"]
        self._cut_curve()
        return True


def _save_whole(state: dict[str, Any], path: Path) -> None:
    """torch.save, whole or not at all."""
    try:
        with replacing(path) as partial:
            torch.save(state, partial)
    except (OSError, RuntimeError) as error:  # torch's writer raises RuntimeError on a full disk
        raise StoreError(
            f"{path} cannot be written: {error}",
            hint="make room and give --resume: the state saved before is kept",
        ) from error
