"""`spectune train eagle3` from end to end: corpus, features, train, export, eval; each stage resumes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from spectune.backend.answer import shorten
from spectune.errors import CheckpointError, StoreError, UsageError
from spectune.train.corpus import (
    CorpusRow,
    build_corpus,
    chat_frame,
    chunk_size,
    read_corpus,
    replace_whole,
    size_to_come,
    summarize_corpus,
    training_rows,
)
from spectune.train.evaluate import HeldOut
from spectune.train.export import directory_digest, export_head
from spectune.train.features import (
    FeatureStore,
    announce_size,
    build_features,
    bytes_per_token,
    record_shard,
)
from spectune.train.generate import MIN_USER_TOKENS, Answer, Generator, Job
from spectune.train.head import Eagle3Head, head_config, init_from_head, init_from_target
from spectune.train.plan import Progress, TrainEvent, TrainPlan, silent
from spectune.train.prompts import TrainingPrompt, ngram_overlap, overlapping, own_prompts
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
    # what can be wrong with the settings is found before hours of decoding
    check_target(target, tokenizer, plan)
    other = _head_to_go_on_from(plan, target)
    reference = reference_turns(plan)
    target_digest = directory_digest(plan.target)
    own = users_prompts(plan, tokenizer, reference, progress)
    _check_same_run(plan, target_digest, own.digest)

    digest = f"{target_digest}:{list(target.aux_layer_ids)}:{target.dtype}"
    rows = corpus_stage(plan, target, tokenizer, digest, progress, own, reference)
    check_vocabulary(rows, target.config.vocab_size, plan.output_dir)
    kept = training_rows(rows, reference, overlap=OVERLAP_N)
    features = plan.output_dir / "features"
    store = build_features(target, rows, features, digest, progress, rows_per_shard=chunk_size(plan))
    trainer = train_stage(plan, target, tokenizer, kept, store, progress, other)

    provenance = {
        "target": plan.target.name,
        "target_digest": target_digest,
        "template_digest": tokenizer.template_digest,
        "corpus": asdict(summarize_corpus(kept)),
        # names, not folders: a head goes to machines that have none of these
        "plan": {k: v for k, v in plan.to_dict().items() if k not in ("target", "output_dir")}
        | {
            "init_from": None if plan.init_from is None else plan.init_from.name,
            "prompts": None if plan.prompts is None else Path(plan.prompts).name,
            "apart_from": [Path(name).name for name in plan.apart_from],
        },
        "prompts_digest": own.digest,
    }
    head_dir = plan.output_dir / "head"
    held_out = trainer.held_out or (trainer.evaluate() if trainer.held else None)
    if held_out is not None:
        provenance["held_out"] = asdict(held_out)
    export_head(trainer.head, head_dir, target.config, provenance)
    progress(TrainEvent(stage="export", message=f"head written to {head_dir}"))
    progress(TrainEvent(stage="eval", message=held_out.text if held_out else "nothing was held out"))
    return TrainResult(head_dir=head_dir, held_out=held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPrompts:
    """The user's prompts in the order in which they are asked, their lengths in tokens, the file's digest."""

    prompts: tuple[TrainingPrompt, ...] = ()
    num_tokens: tuple[int, ...] = ()
    digest: str | None = None


def users_prompts(
    plan: TrainPlan, tokenizer: Tokenizer, reference: Sequence[str], progress: Progress
) -> OwnPrompts:
    """Read plan.prompts and say what will be asked of it.

    Prompts that measure are left out; UsageError where nothing else is in the file, CheckpointError naming
    the prompt that the chat template refuses.
    """
    from spectune.workload.read import load_workload

    if plan.prompts is None:
        return OwnPrompts()
    workload = load_workload(plan.prompts)
    asked = own_prompts(workload.prompts, plan.seed)
    copies = overlapping([prompt.text for prompt in asked], reference, n=OVERLAP_N)
    kept = tuple(prompt for prompt, is_copy in zip(asked, copies, strict=True) if not is_copy)
    if not kept:
        raise UsageError(
            f"all {len(asked)} prompts of --prompts {plan.prompts} are among those that measure",
            hint="a head that has learnt them could not be judged by them; give other prompts",
        )
    lengths = []
    for prompt in kept:
        try:
            lengths.append(len(tokenizer.encode_chat(prompt.chat)))
        except CheckpointError as error:
            raise CheckpointError(
                f"--prompts {plan.prompts}: {error} (prompt {shorten(prompt.text)!r})",
                hint="take its system message out, or give the target a template that takes one",
            ) from error
    cut = sum(length > plan.max_prompt_tokens for length in lengths)
    says = [f"{workload.accounting}; {len(kept)} are asked first, each once, as far as the corpus goes"]
    if len(kept) < len(asked):
        says.append(f"{len(asked) - len(kept)} that measure are left out")
    if cut:
        says.append(f"{cut} lose their middle (--max-prompt-tokens {plan.max_prompt_tokens})")
    progress(TrainEvent(stage="corpus", message="; ".join(says)))
    return OwnPrompts(prompts=kept, num_tokens=tuple(lengths), digest=workload.digest)


def check_target(target: Target, tokenizer: Tokenizer, plan: TrainPlan) -> None:
    """Raise for a target that no head can be trained for, before anything is decoded."""
    layers = target.config.num_layers
    if len(set(target.aux_layer_ids)) < 3 or min(target.aux_layer_ids) < 0:
        raise CheckpointError(
            f"the target has {layers} layers; an EAGLE-3 head reads three different ones of 2, L//2, L-3",
            hint="train on a target of at least 7 layers",
        )
    frame = chat_frame(tokenizer)
    length = len(frame.opening) + len(frame.closing)
    if plan.max_prompt_tokens < length + MIN_USER_TOKENS:
        raise UsageError(
            f"--max-prompt-tokens {plan.max_prompt_tokens} leaves no room beside the {length} tokens of the chat "
            "template"
        )
    size = target.config.vocab_size
    if (top := max(*frame.opening, *frame.closing, *tokenizer.eos_ids)) >= size:
        raise CheckpointError(
            f"{plan.target}: the tokenizer writes token {top}, the target has {size} tokens",
            hint="tokenizer and weights come from different models",
        )
    if plan.optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        raise UsageError(f"--optimizer muon needs torch 2.9 or later, this is {torch.__version__}")


def _check_same_run(plan: TrainPlan, target_digest: str, prompts_digest: str | None) -> None:
    """Refuse to mix two corpora or targets in one output directory."""
    path = plan.output_dir / "run.json"
    identity = {"corpus": plan.digest(*CORPUS_SETTINGS), "target": target_digest}
    if prompts_digest is not None:
        identity["prompts"] = prompts_digest
    if path.exists():
        if _read_identity(path) != identity:
            raise StoreError(
                f"{plan.output_dir} holds a corpus of another target, other prompts or other corpus settings",
                hint="use another --output-dir",
            )
        return
    replace_whole(path, (json.dumps(identity) + "\n").encode())


def _read_identity(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StoreError(
            f"{path} is damaged: {error}",
            hint="delete it if the corpus beside it was made with these settings",
        ) from error


def corpus_stage(
    plan: TrainPlan,
    target: Target,
    tokenizer: Tokenizer,
    digest: str,
    progress: Progress,
    own: OwnPrompts,
    reference: Sequence[str],
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

    done = read_corpus(path)
    announce_size(
        size_to_come(plan, done, own.num_tokens) * bytes_per_token(target.config.hidden_size),
        features,
        progress,
    )
    rows = build_corpus(plan, path, tokenizer, generate, progress, save, own.prompts)
    progress(TrainEvent(stage="corpus", message=summarize_corpus(rows).text))
    progress(TrainEvent(stage="corpus", message=overlap_text(rows, reference)))
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


def data_digest(rows: Sequence[CorpusRow], vocab: DraftVocab) -> str:
    """Hash of what is learnt: the rows, by number and length, and the draft vocabulary."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(f"{row.index}:{len(row.prompt_ids)}:{len(row.output_ids)};".encode())
    digest.update(vocab.d2t.numpy().tobytes())
    return digest.hexdigest()[:16]


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
    """Tensors and draft vocabulary of plan.init_from, checked against the target; None without one.

    Raises CheckpointError for a head that reads other layers, rotates otherwise, norms otherwise or has an
    embedding of its own: the new head would be something else from its first step on.
    """
    from spectune.draft.checkpoint import load_head

    if plan.init_from is None:
        return None, None
    loaded = load_head(plan.init_from, target.config)
    there, config = loaded.config, target.config
    pairs = {
        "rope_theta": (there.rope_theta, config.rope_theta),
        "rope_scaling": (there.rope_scaling, None),
        "rms_norm_eps": (there.rms_norm_eps, config.rms_norm_eps),
        "norm_before_residual": (there.norm_before_residual, False),
        "num_attention_heads": (there.num_heads, config.num_heads),
        "num_key_value_heads": (there.num_kv_heads, config.num_kv_heads),
        "intermediate_size": (there.intermediate_size, config.intermediate_size),
        "eagle_aux_hidden_state_layer_ids": (
            there.aux_layer_ids or target.aux_layer_ids,
            tuple(target.aux_layer_ids),
        ),
    }
    for name, (its, ours) in pairs.items():
        if its != ours:
            raise CheckpointError(
                f"--init-from {plan.init_from}: {name} is {its} there and would be {ours} here",
                hint="training goes on only from a head of this shape; without --init-from it starts anew",
            )
    own = loaded.tensors.get("embed_tokens.weight")
    if own is not None and not torch.equal(own.to(target.embed_weight), target.embed_weight):
        raise CheckpointError(
            f"--init-from {plan.init_from} has an embedding of its own, the new head reads the target's",
            hint="without --init-from training starts anew",
        )
    ids = loaded.draft_to_target
    return loaded.tensors, torch.arange(target.config.vocab_size) if ids is None else ids


def train_stage(
    plan: TrainPlan,
    target: Target,
    tokenizer: Tokenizer,
    rows: Sequence[CorpusRow],
    store: FeatureStore,
    progress: Progress,
    going_on_from: tuple[dict[str, Tensor] | None, Tensor | None] = (None, None),
) -> Trainer:
    """Make or resume the head and train it to the end."""
    other, known = going_on_from
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
        data_digest(rows, vocab),
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
