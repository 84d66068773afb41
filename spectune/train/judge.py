"""`spectune train eval`: the target answers each prompt once, and every head drafts along the same text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spectune.backend.heads import folder_digest
from spectune.backend.prompts import chat_messages
from spectune.draft.formats import cut_rows
from spectune.errors import UsageError
from spectune.records import AskedText, Judgement, Prompt
from spectune.train.compare import HeadText, head_text, paired, report_of, verdict
from spectune.train.corpus import chat_frame
from spectune.train.evaluate import TextMatches, text_matches
from spectune.train.export import directory_digest
from spectune.train.generate import Answer, Generator, Job
from spectune.train.head import Eagle3Head, head_from_checkpoint
from spectune.train.plan import Progress, TrainEvent, silent
from spectune.train.ttt import Sample

if TYPE_CHECKING:
    from spectune.engine.target import Target
    from spectune.engine.tokenizer import Tokenizer

MAX_BATCH = 64
SLICES = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgePlan:
    """Heads by name, the prompts they are judged on, and how the target answers.

    workload: the prompts' name and digest, to be kept with the result.
    """

    target: Path
    heads: tuple[tuple[str, Path], ...]
    prompts: tuple[Prompt, ...]
    workload: tuple[str, str] | None = None
    temperatures: tuple[float, ...] = (0.0,)
    max_tokens: int = 128
    num_tokens: int = 3
    seed: int = 0
    device: str = "cpu"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not self.heads:
            raise UsageError("no head to judge", hint="spectune train eval HEAD [HEAD ...]")
        names = [name for name, _ in self.heads]
        if len(set(names)) < len(names):
            raise UsageError(f"two heads have one name: {', '.join(names)}")
        if not self.prompts:
            raise UsageError("the workload has no prompt to judge on")
        if self.num_tokens < 1 or self.max_tokens < 2:
            raise UsageError("--num-tokens must be at least 1 and --max-tokens at least 2")
        if wrong := [value for value in self.temperatures if not 0.0 <= value < math.inf]:
            raise UsageError(f"--temperature {wrong[0]} is no temperature", hint="0 is greedy")


def judge(plan: JudgePlan, progress: Progress = silent) -> Judgement:
    """Decode once a temperature and prompt, then run all heads along the texts.

    Raises CheckpointError for a head that does not belong to the target.
    """
    from spectune.draft.checkpoint import load_head
    from spectune.engine.checkpoint import TargetConfig
    from spectune.engine.target import Target, default_aux_layers
    from spectune.engine.tokenizer import Tokenizer

    config = TargetConfig.from_dir(plan.target)
    loaded = {name: load_head(path, config) for name, path in plan.heads}
    usual = default_aux_layers(config.num_layers)
    layers = {name: tuple(head.config.aux_layer_ids or usual) for name, head in loaded.items()}
    tokenizer = Tokenizer.from_dir(plan.target)
    found: dict[str, list[HeadText]] = {}
    asked: list[AskedText] = []
    for ids in sorted(set(layers.values())):
        target = Target.load(
            plan.target, device=plan.device, dtype=plan.dtype, aux_layer_ids=ids, kernels="plain"
        )
        asked, samples = answers_of(plan, target, tokenizer, progress)
        for name in [name for name in loaded if layers[name] == ids]:
            progress(TrainEvent(stage="eval", message=f"{name} along {len(samples)} texts"))
            head = head_from_checkpoint(loaded[name], ids).to(target.device)
            # a head with an embedding of its own reads that one, as it does when it drafts
            own = loaded[name].tensors.get("embed_tokens.weight", target.embed_weight)
            embedding = own.to(target.device, target.dtype)
            slices = [cut_rows(head.target_ids, size, tokenizer.eos_ids) for size in slices_of(loaded[name])]
            found[name] = [
                head_text(text, _matches(head, target, embedding, sample, plan.num_tokens, slices))
                for text, sample in zip(asked, samples, strict=True)
            ]
    reports = tuple(report_of(name, found[name], slices_of(loaded[name])) for name, _ in plan.heads)
    pairs = [paired(a, found[a], b, found[b]) for (a, _), (b, _) in combinations(plan.heads, 2)]
    known = tuple(pair for pair in pairs if pair is not None)
    return Judgement(
        reports=reports,
        pairs=known,
        verdict=verdict(reports, known),
        texts=tuple(asked),
        num_tokens=plan.num_tokens,
        settings=settings_of(plan),
    )


def settings_of(plan: JudgePlan) -> dict[str, Any]:
    """What was judged on what, by names and digests."""
    name, digest = plan.workload or (None, None)
    return {
        "target": plan.target.name,
        "target_digest": directory_digest(plan.target),
        "heads": {head: folder_digest(path) for head, path in plan.heads},
        "workload": name,
        "workload_digest": digest,
        "num_prompts": len(plan.prompts),
        "temperatures": list(plan.temperatures),
        "max_tokens": plan.max_tokens,
        "num_tokens": plan.num_tokens,
        "seed": plan.seed,
        "device": plan.device,
        "dtype": plan.dtype,
    }


def slices_of(head: Any) -> list[int]:
    """Sizes to which this head's draft vocabulary can be cut."""
    return [size for size in SLICES if size < head.config.draft_vocab_size]


def _matches(
    head: Eagle3Head, target: Target, embedding: Tensor, sample: Sample, depth: int, slices: Sequence[Tensor]
) -> TextMatches:
    is_bf16 = target.dtype == torch.bfloat16
    with torch.autocast(target.device.type, dtype=torch.bfloat16, enabled=is_bf16):
        return text_matches(head, embedding, sample, depth, slices)


def answers_of(
    plan: JudgePlan, target: Target, tokenizer: Tokenizer, progress: Progress
) -> tuple[list[AskedText], list[Sample]]:
    """The target's answers at every temperature with what a head reads along them."""
    frame = chat_frame(tokenizer)
    jobs: list[Job] = []
    asked: list[tuple[Prompt, float]] = []
    for temperature in plan.temperatures:
        for prompt in plan.prompts:
            ids = tokenizer.encode_chat(chat_messages(prompt))
            jobs.append(Job(index=len(jobs), prompt_ids=tuple(ids), temperature=temperature))
            asked.append((prompt, temperature))
    generator = Generator(
        target,
        frame,
        tokenizer.eos_ids,
        batch_size=min(MAX_BATCH, len(jobs)),
        max_prompt_tokens=max(len(job.prompt_ids) for job in jobs),
        max_answer_tokens=plan.max_tokens,
        seed=plan.seed,
    )

    def live(done: int, decoded: int) -> None:
        message = f"{done} of {len(jobs)} answers, {decoded} tokens decoded"
        progress(TrainEvent(stage="answers", message=message, done=done, total=len(jobs)))

    texts, samples = [], []
    for (prompt, temperature), answer in zip(asked, generator.run(jobs, live), strict=True):
        if len(answer.output_ids) < 2:
            continue
        texts.append(
            AskedText(
                prompt_id=prompt.prompt_id,
                category=prompt.category,
                temperature=temperature,
                num_prompt_tokens=len(answer.prompt_ids),
                num_output_tokens=len(answer.output_ids),
                had_loop=answer.had_loop,
            )
        )
        samples.append(sample_of(answer, temperature))
    return texts, samples


def sample_of(answer: Answer, temperature: float) -> Sample:
    """An answer as a training sample; the last token was never fed and gets zeros."""
    hidden = answer.activations.shape[1] // 4
    last = answer.activations.new_zeros(1, 4 * hidden)
    whole = torch.cat([answer.activations, last])
    return Sample(
        ids=torch.tensor(answer.prompt_ids + answer.output_ids),
        answer_start=len(answer.prompt_ids),
        features=whole[:, : 3 * hidden],
        final=whole[:, 3 * hidden :],
        top=torch.cat([answer.top, answer.top.new_zeros(1)]).long(),
        is_greedy=temperature == 0.0,
    )
