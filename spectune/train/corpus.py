"""Self-distillation: the target answers generated prompts, and writes many of the prompts itself.

corpus.jsonl grows by one chunk at a time; every chunk is a pure function of (plan, its number), so a
stopped run continues where the file ends.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spectune.errors import CheckpointError, StoreError
from spectune.store.files import naming_errors, replacing
from spectune.train.generate import Answer, ChatFrame, Job
from spectune.train.plan import Progress, TrainEvent, TrainPlan
from spectune.train.prompts import TrainingPrompt, overlapping, template_prompt

if TYPE_CHECKING:
    from spectune.engine.tokenizer import Tokenizer

Generate = Callable[[Sequence[Job], Callable[[int, int], None]], list[Answer]]
Save = Callable[[int, list["CorpusRow"], list[Answer]], None]
WAVES_PER_CHUNK = 4
ANSWER_TOKENS, PROMPT_TOKENS = 161, 67
"""Mean lengths in a corpus of 512 rows with the default settings."""
USER_TEMPERATURES = (0.7, 0.85, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRow:
    """One question and answer. `source` is "user" (--prompts), "template" or "self" (the target's); a loop
    in the answer was cut."""

    index: int
    category: str
    source: str
    temperature: float
    prompt: str
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    had_loop: bool

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusSummary:
    """Counts of a corpus; shares are fractions of its rows."""

    num_rows: int
    num_answer_tokens: int
    num_prompt_tokens: int
    loop_share: float
    greedy_share: float
    self_share: float
    user_share: float = 0.0

    @property
    def text(self) -> str:
        own = f"{self.user_share:.0%} to your prompts, " if self.user_share else ""
        return (
            f"{self.num_rows} answers, {self.num_answer_tokens} answer tokens, "
            f"{self.num_prompt_tokens} prompt tokens; {self.greedy_share:.0%} greedy, {own}"
            f"{self.self_share:.0%} self-instructed, {self.loop_share:.1%} cut at a loop"
        )


def summarize_corpus(rows: Sequence[CorpusRow]) -> CorpusSummary:
    count = max(1, len(rows))
    return CorpusSummary(
        num_rows=len(rows),
        num_answer_tokens=sum(len(row.output_ids) for row in rows),
        num_prompt_tokens=sum(len(row.prompt_ids) for row in rows),
        loop_share=sum(row.had_loop for row in rows) / count,
        greedy_share=sum(row.is_greedy for row in rows) / count,
        self_share=sum(row.source == "self" for row in rows) / count,
        user_share=sum(row.source == "user" for row in rows) / count,
    )


def read_corpus(path: Path) -> list[CorpusRow]:
    """Rows of a corpus file; an unfinished last line is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        replace_whole(path, whole)
    rows = []
    # lines end with \n alone: a prompt may hold what else Unicode calls a line break
    for number, line in enumerate(whole.decode().split("\n")[:-1], start=1):
        try:
            raw = json.loads(line)
            ids = {name: tuple(raw[name]) for name in ("prompt_ids", "output_ids")}
            rows.append(CorpusRow(**{**raw, **ids}))
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path} line {number} is damaged: {error}") from error
    return rows


def chat_frame(tokenizer: Tokenizer) -> ChatFrame:
    """Ids of the chat template before the user's words and after them.

    Raises CheckpointError for a tokenizer without a chat template: answers to bare text would teach
    the head a text that no chat will ever ask for.
    """
    if tokenizer.template_digest is None:
        raise CheckpointError(
            "the target's tokenizer has no chat template, so it cannot be asked",
            hint="add chat_template to tokenizer_config.json, or train on an instruct model",
        )
    first = tokenizer.encode_chat([{"role": "user", "content": "apple"}])
    second = tokenizer.encode_chat([{"role": "user", "content": "Zebra"}])
    before = _shared(first, second)
    after = _shared(first[before:][::-1], second[before:][::-1])
    if not before or not after:
        raise CheckpointError("the chat template puts nothing around the user's words")
    return ChatFrame(opening=tuple(first[:before]), closing=tuple(first[len(first) - after :]))


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common beginning."""
    length = 0
    while length < min(len(first), len(second)) and first[length] == second[length]:
        length += 1
    return length


def chunk_size(plan: TrainPlan) -> int:
    return WAVES_PER_CHUNK * plan.generate_batch_size


def prompt_at(plan: TrainPlan, index: int, own: Sequence[TrainingPrompt]) -> TrainingPrompt:
    """What row `index` asks: the user's own prompts first, each once, then generated ones."""
    return own[index] if index < len(own) else template_prompt(plan.seed, index)


def chunk_jobs(
    plan: TrainPlan, chunk: int, tokenizer: Tokenizer, own: Sequence[TrainingPrompt] = ()
) -> list[Job]:
    """The jobs of one chunk; whether a row is greedy or writes its own prompt is drawn by its index."""
    jobs = []
    for index in range(chunk * chunk_size(plan), (chunk + 1) * chunk_size(plan)):
        rng = random.Random(f"{plan.seed}:job:{index}")
        ids = tokenizer.encode_chat(prompt_at(plan, index, own).chat)
        if len(ids) > plan.max_prompt_tokens:
            ids = ids[: plan.max_prompt_tokens // 2] + ids[-plan.max_prompt_tokens // 2 :]
        jobs.append(
            Job(
                index=index,
                prompt_ids=tuple(ids),
                writes_prompt=rng.random() < plan.self_share and index >= len(own),
                temperature=0.0 if rng.random() < plan.greedy_share else plan.temperature,
                user_temperature=rng.choice(USER_TEMPERATURES),
            )
        )
    return jobs


def size_to_come(plan: TrainPlan, rows: Sequence[CorpusRow], own_tokens: Sequence[int] = ()) -> int:
    """About how many tokens, prompts and answers, are still to be decoded: whole chunks, own prompts first.

    Lengths are those of the rows that are there, else of a corpus of 512 generated and self-written prompts.
    """
    done, size = sum(len(row.output_ids) for row in rows), chunk_size(plan)
    answer = done / len(rows) if rows else min(ANSWER_TOKENS, plan.max_answer_tokens)
    others = [len(row.prompt_ids) for row in rows if row.source != "user"]
    prompt = sum(others) / len(others) if others else PROMPT_TOKENS
    chunks = math.ceil(max(0, plan.num_tokens - done) / (answer * size))
    asked = [
        min(count, plan.max_prompt_tokens) for count in own_tokens[len(rows) : len(rows) + chunks * size]
    ]
    return round(chunks * size * answer + sum(asked) + (chunks * size - len(asked)) * prompt)


def build_corpus(
    plan: TrainPlan,
    path: Path,
    tokenizer: Tokenizer,
    generate: Generate,
    progress: Progress,
    save: Save | None = None,
    own: Sequence[TrainingPrompt] = (),
) -> list[CorpusRow]:
    """Generate until the corpus holds plan.num_tokens answer tokens; a chunk is appended when done.

    A file that holds more gives the rows that a corpus of this size would have had. `save` gets each
    chunk's number, rows and answers before its rows are written; `own` is asked first.
    """
    frame = chat_frame(tokenizer)
    rows = read_corpus(path)
    if rows and (rows[-1].index + 1) % chunk_size(plan):
        rows = _whole_chunks(rows, path, chunk_size(plan))
    rows = enough_rows(rows, plan.num_tokens, chunk_size(plan))
    done = sum(len(row.output_ids) for row in rows)
    started, fresh = time.monotonic(), 0

    def tell(tokens: int, rate: float, message: str) -> None:
        left = max(0, plan.num_tokens - tokens) / rate if rate else None
        progress(
            TrainEvent(
                stage="corpus", message=message, done=min(tokens, plan.num_tokens), total=plan.num_tokens,
                unit="tokens", tokens_per_s=rate or None, seconds_left=left,
            )
        )  # fmt: skip

    while done < plan.num_tokens:
        chunk = (rows[-1].index + 1) // chunk_size(plan) if rows else 0
        jobs = chunk_jobs(plan, chunk, tokenizer, own)

        rate = fresh / (time.monotonic() - started)
        answers = generate(jobs, partial(_live, tell, done, rate, f"part {chunk}", len(jobs)))
        made = [
            _row(job, answer, tokenizer, frame, prompt_at(plan, job.index, own))
            for job, answer in zip(jobs, answers, strict=True)
        ]
        if save is not None:
            save(chunk, made, answers)
        text = "".join(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in made)
        append_whole(path, text)
        rows += made
        count = sum(len(row.output_ids) for row in made)
        done, fresh = done + count, fresh + count
        loops = summarize_corpus(rows).loop_share
        tell(done, fresh / (time.monotonic() - started), f"{len(rows)} answers, {loops:.1%} looped")
    return rows


def _live(
    tell: Callable[[int, float, str], None],
    done: int,
    rate: float,
    part: str,
    num_jobs: int,
    num_answers: int,
    num_decoded: int,
) -> None:
    tell(done, rate, f"{part}: {num_answers} of {num_jobs} answers, {num_decoded} tokens decoded")


def append_whole(path: Path, text: str) -> None:
    """Append to a file; a full disk is told as such and what was there before stays."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror}",
            hint="make room and give --resume: what is finished is kept",
        ) from error


def _whole_chunks(rows: list[CorpusRow], path: Path, size: int) -> list[CorpusRow]:
    """Rows of finished chunks; the file is cut to them (a chunk's answers depend on one another's batch)."""
    kept = rows[: (rows[-1].index + 1) // size * size]
    lines = path.read_bytes().split(b"\n")
    replace_whole(path, b"".join(line + b"\n" for line in lines[: len(kept)]))
    return kept


def replace_whole(path: Path, data: bytes) -> None:
    """Write a file anew, whole or not at all."""
    with naming_errors(path), replacing(path) as partial:
        partial.write_bytes(data)


def enough_rows(rows: Sequence[CorpusRow], num_tokens: int, size: int) -> list[CorpusRow]:
    """Rows of the first chunks that together hold `num_tokens` answer tokens; all if they hold fewer."""
    done = 0
    for low in range(0, len(rows), size):
        done += sum(len(row.output_ids) for row in rows[low : low + size])
        if done >= num_tokens:
            return list(rows[: low + size])
    return list(rows)


def _row(
    job: Job, answer: Answer, tokenizer: Tokenizer, frame: ChatFrame, prompt: TrainingPrompt
) -> CorpusRow:
    text, category, source = prompt.text, prompt.category, "user" if prompt.messages else "template"
    if answer.wrote_prompt:
        words = answer.prompt_ids[len(frame.opening) : len(answer.prompt_ids) - len(frame.closing)]
        text, category, source = tokenizer.decode(words).strip(), "own", "self"
    return CorpusRow(
        index=job.index,
        category=category,
        source=source,
        temperature=job.temperature,
        prompt=text,
        prompt_ids=answer.prompt_ids,
        output_ids=answer.output_ids,
        had_loop=answer.had_loop,
    )


def training_rows(rows: Sequence[CorpusRow], reference: Sequence[str], *, overlap: int) -> list[CorpusRow]:
    """Rows to learn from: two answer tokens or more, no question twice at one temperature, and none
    that shares `overlap` words in a row with a reference prompt."""
    seen: set[tuple[tuple[int, ...], float]] = set()
    kept = []
    copies = overlapping([row.prompt for row in rows], reference, n=overlap)
    for row, is_copy in zip(rows, copies, strict=True):
        key = (row.prompt_ids, row.temperature)
        if len(row.output_ids) >= 2 and key not in seen and not is_copy:
            seen.add(key)
            kept.append(row)
    return kept
