"""`spectune train eagle3` from end to end: corpus, features, train, export, eval; each stage resumes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectune.errors import StoreError
from spectune.train.corpus import (
    CorpusRow,
    build_corpus,
    chat_frame,
    chunk_size,
    read_corpus,
    summarize_corpus,
    training_rows,
)
from spectune.train.evaluate import HeldOut
from spectune.train.export import directory_digest, export_head
from spectune.train.features import FeatureStore, announce_size, build_features, record_shard
from spectune.train.generate import Answer, Generator, Job
from spectune.train.head import Eagle3Head, head_config, init_from_head, init_from_target
from spectune.train.plan import Progress, TrainEvent, TrainPlan, silent
from spectune.train.prompts import TrainingPrompt, ngram_overlap, own_prompts
from spectune.train.trainer import Trainer
from spectune.train.vocab import DraftVocab, build_vocab, count_tokens

if TYPE_CHECKING:
    from spectune.engine.target import Target
    from spectune.engine.tokenizer import Tokenizer

CORPUS_SETTINGS = (
    "max_answer_tokens", "max_prompt_tokens", "greedy_share", "temperature", "self_share",
    "generate_batch_size", "seed",
)  # fmt: skip
OVERLAP_N = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Where the head is and how it did on held-out answers (None if none was held out)."""

    head_dir: Path
    held_out: HeldOut | None


def run(plan: TrainPlan, progress: Progress = silent) -> TrainResult:
    """Run or continue all stages in plan.output_dir."""
    from spectune.engine.target import Target
    from spectune.engine.tokenizer import Tokenizer

    plan.output_dir.mkdir(parents=True, exist_ok=True)
    target = Target.load(plan.target, device=plan.device, dtype=plan.dtype, kernels="plain")
    tokenizer = Tokenizer.from_dir(plan.target)
    target_digest = directory_digest(plan.target)
    own, own_digest = users_prompts(plan)
    _check_same_run(plan, target_digest, own_digest)

    digest = f"{target_digest}:{list(target.aux_layer_ids)}:{target.dtype}"
    rows = corpus_stage(plan, target, tokenizer, digest, progress, own)
    check_vocabulary(rows, target.config.vocab_size, plan.output_dir)
    kept = training_rows(rows, reference_turns(plan), overlap=OVERLAP_N)
    features = plan.output_dir / "features"
    store = build_features(target, rows, features, digest, progress, rows_per_shard=chunk_size(plan))
    trainer = train_stage(plan, target, tokenizer, kept, store, progress)

    provenance = {
        "target": plan.target.name,
        "target_digest": target_digest,
        "template_digest": tokenizer.template_digest,
        "corpus": asdict(summarize_corpus(kept)),
        # names, not folders: a head goes to machines that have none of these
        "plan": {k: v for k, v in plan.to_dict().items() if k not in ("target", "output_dir")}
        | {"init_from": None if plan.init_from is None else plan.init_from.name},
    }
    head_dir = plan.output_dir / "head"
    held_out = trainer.held_out or (trainer.evaluate() if trainer.held else None)
    if held_out is not None:
        provenance["held_out"] = asdict(held_out)
    export_head(trainer.head, head_dir, target.config, provenance)
    progress(TrainEvent(stage="export", message=f"head written to {head_dir}"))
    progress(TrainEvent(stage="eval", message=held_out.text if held_out else "nothing was held out"))
    return TrainResult(head_dir=head_dir, held_out=held_out)


def users_prompts(plan: TrainPlan) -> tuple[tuple[TrainingPrompt, ...], str | None]:
    """The prompts of plan.prompts in the order in which they are asked, and the digest of the file's."""
    from spectune.workload.read import load_workload

    if plan.prompts is None:
        return (), None
    workload = load_workload(plan.prompts)
    return own_prompts(workload.prompts, plan.seed), workload.digest


def _check_same_run(plan: TrainPlan, target_digest: str, prompts_digest: str | None) -> None:
    """Refuse to mix two corpora or targets in one output directory."""
    path = plan.output_dir / "run.json"
    identity = {"corpus": plan.digest(*CORPUS_SETTINGS), "target": target_digest}
    if prompts_digest is not None:
        identity["prompts"] = prompts_digest
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != identity:
            raise StoreError(
                f"{plan.output_dir} holds a corpus of another target, other prompts or other corpus settings",
                hint="use another --output-dir",
            )
        return
    path.write_text(json.dumps(identity) + "\n", encoding="utf-8")


def corpus_stage(
    plan: TrainPlan,
    target: Target,
    tokenizer: Tokenizer,
    digest: str,
    progress: Progress,
    own: Sequence[TrainingPrompt] = (),
) -> list[CorpusRow]:
    """The self-distilled corpus, its features, and how far it is from the prompts that measure."""
    path, features = plan.output_dir / "corpus.jsonl", plan.output_dir / "features"
    generator: Generator | None = None

    def generate(jobs: Sequence[Job], live: Callable[[int, int], None]) -> list[Answer]:
        nonlocal generator
        if generator is None:
            generator = Generator(
                target,
                chat_frame(tokenizer),
                tokenizer.eos_ids,
                batch_size=plan.generate_batch_size,
                max_prompt_tokens=plan.max_prompt_tokens,
                max_answer_tokens=plan.max_answer_tokens,
                seed=plan.seed,
            )
        return generator.run(jobs, live)

    def save(chunk: int, made: Sequence[CorpusRow], answers: Sequence[Answer]) -> None:
        record_shard(features, chunk, made, answers, digest)

    if own:
        message = f"{len(own)} prompts of {plan.prompts} are asked first, each once"
        progress(TrainEvent(stage="corpus", message=message))
    missing = plan.num_tokens - summarize_corpus(read_corpus(path)).num_answer_tokens
    announce_size(missing, target.config.hidden_size, features, progress)
    rows = build_corpus(plan, path, tokenizer, generate, progress, save, own)
    progress(TrainEvent(stage="corpus", message=summarize_corpus(rows).text))
    progress(TrainEvent(stage="corpus", message=overlap_text(rows, reference_turns(plan))))
    return rows


def reference_turns(plan: TrainPlan) -> list[str]:
    """What users ask in the workloads that measure: the built-in one and those of plan.apart_from."""
    from spectune.workload.read import load_workload

    turns: list[str] = []
    for name in (None, *plan.apart_from):
        workload = load_workload(name)
        turns += [turn for prompt in (*workload.prompts, *workload.calibration) for turn in prompt.turns]
    return turns


def overlap_text(rows: Sequence[CorpusRow], reference: Sequence[str]) -> str:
    """One line on word n-grams that training prompts share with the prompts that measure."""
    share = ngram_overlap([row.prompt for row in rows], reference, n=OVERLAP_N)
    return (
        f"{share:.2%} of {len(rows)} training prompts share a {OVERLAP_N}-word sequence with "
        f"{len(reference)} turns that measure; these are not learnt"
    )


def check_vocabulary(rows: Sequence[CorpusRow], vocab_size: int, directory: Path) -> None:
    """Raise StoreError for a corpus whose ids the target does not have."""
    top = max((max(*row.prompt_ids, *row.output_ids) for row in rows if row.output_ids), default=0)
    if top >= vocab_size:
        raise StoreError(
            f"{directory / 'corpus.jsonl'} holds token {top}, the target has {vocab_size} tokens",
            hint="this corpus was made by another target; use another --output-dir",
        )


def draft_vocab(
    plan: TrainPlan,
    rows: Sequence[CorpusRow],
    vocab_size: int,
    eos: Sequence[int],
    preferred: Tensor | None = None,
) -> DraftVocab:
    """Draft vocabulary from the answers' token counts, turn ends forced in."""
    counts = count_tokens((row.output_ids for row in rows), vocab_size)
    size = min(plan.draft_vocab_size, vocab_size)
    return build_vocab(counts, size, forced=eos, preferred=preferred)


def _head_to_go_on_from(plan: TrainPlan, target: Target) -> tuple[dict[str, Tensor] | None, Tensor | None]:
    """Tensors and draft vocabulary of plan.init_from, checked against the target; None without one."""
    from spectune.draft.checkpoint import load_head

    if plan.init_from is None:
        return None, None
    loaded = load_head(plan.init_from, target.config)
    ids = loaded.draft_to_target
    return loaded.tensors, torch.arange(target.config.vocab_size) if ids is None else ids


def train_stage(
    plan: TrainPlan,
    target: Target,
    tokenizer: Tokenizer,
    rows: Sequence[CorpusRow],
    store: FeatureStore,
    progress: Progress,
) -> Trainer:
    """Make or resume the head and train it to the end."""
    other, known = _head_to_go_on_from(plan, target)
    vocab = draft_vocab(plan, rows, target.config.vocab_size, tokenizer.eos_ids, known)
    low, middle, high = target.aux_layer_ids
    config = head_config(target.config, aux_layer_ids=(low, middle, high), draft_vocab_size=vocab.draft_size)
    head = Eagle3Head(config, vocab)
    init_from_target(head, target.state_dict_hf(), seed=plan.seed)
    if other is not None and known is not None:
        shared = init_from_head(head, other, known)
        text = f"going on from {plan.init_from}: {shared} of {vocab.draft_size} output rows"
        progress(TrainEvent(stage="train", message=text))
    head.to(target.device)
    trainer = Trainer(
        plan,
        head,
        target.embed_weight.clone(),
        target.lm_head_weight[vocab.target_ids.to(target.device)],
        store,
        plan.output_dir,
        progress,
        frozenset(row.index for row in rows),
    )
    resumed = trainer.resume()
    parameters = sum(p.numel() for p in head.parameters())
    progress(
        TrainEvent(
            stage="train",
            message=(
                f"{'resumed at' if resumed else 'starting at'} step {trainer.step} of "
                f"{trainer.total_steps}; {parameters / 1e6:.2f}M trained parameters, draft vocabulary "
                f"{vocab.draft_size} covers {vocab.coverage:.2%} of the answer tokens, "
                f"{torch.get_num_threads()} threads, products in {target.dtype}"
            ),
            done=trainer.step,
            total=trainer.total_steps,
        )
    )
    trainer.run()
    return trainer
