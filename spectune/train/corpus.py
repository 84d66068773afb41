"""Self-distillation: the target answers generated prompts, and writes half of the prompts itself.

corpus.jsonl grows by one chunk at a time; every row is a pure function of (plan, index), so a stopped
run continues where the file ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spectune.errors import StoreError
from spectune.records import Request, RequestRecord, Sampling
from spectune.train.loops import cap_loop, loop_start
from spectune.train.plan import Progress, TrainEvent, TrainPlan
from spectune.train.prompts import TrainingPrompt, template_prompt

if TYPE_CHECKING:
    from spectune.engine.tokenizer import Tokenizer

Generate = Callable[[Sequence[Request]], Sequence[RequestRecord]]
CHUNKS_PER_BATCH = 4
MAX_USER_TOKENS = 96
_OWN_RANGE = 8_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRow:
    """One question and answer. `source` is "template" or "self"; a loop in the answer was cut."""

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

    @property
    def text(self) -> str:
        return (
            f"{self.num_rows} answers, {self.num_answer_tokens} answer tokens, "
            f"{self.num_prompt_tokens} prompt tokens; {self.greedy_share:.0%} greedy, "
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
    )


def read_corpus(path: Path) -> list[CorpusRow]:
    """Rows of a corpus file; an unfinished last line is cut off the file."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        path.write_bytes(whole)
    rows = []
    for number, line in enumerate(whole.decode().splitlines(), start=1):
        try:
            raw = json.loads(line)
            ids = {name: tuple(raw[name]) for name in ("prompt_ids", "output_ids")}
            rows.append(CorpusRow(**{**raw, **ids}))
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(f"{path} line {number} is damaged: {error}") from error
    return rows


def user_turn_prefix(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of the chat template up to the place where the user's words begin."""
    first = tokenizer.encode_chat([{"role": "user", "content": "apple"}])
    second = tokenizer.encode_chat([{"role": "user", "content": "Zebra"}])
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    return tuple(first[:shared])


def takes_share(index: int, share: float) -> bool:
    """Spread a share evenly over indices: exactly floor(n·share) of the first n are True."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


def build_corpus(
    plan: TrainPlan, path: Path, tokenizer: Tokenizer, generate: Generate, progress: Progress
) -> list[CorpusRow]:
    """Generate until the corpus holds plan.num_tokens answer tokens; appends after every chunk."""
    rows = read_corpus(path)
    done = at_start = sum(len(row.output_ids) for row in rows)
    started = time.monotonic()
    prefix = user_turn_prefix(tokenizer)
    chunk_size = CHUNKS_PER_BATCH * plan.generate_batch_size
    with path.open("a", encoding="utf-8") as file:
        while done < plan.num_tokens:
            first = rows[-1].index + 1 if rows else 0
            chunk = first // chunk_size
            indices = range(first, (chunk + 1) * chunk_size)
            temperature = 0.0 if takes_share(chunk, plan.greedy_share) else plan.temperature
            prompts = _prompts(plan, indices, prefix, tokenizer, generate)
            fresh = list(_answers(plan, prompts, temperature, tokenizer, generate))
            file.writelines(json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in fresh)
            file.flush()
            rows += fresh
            done += sum(len(row.output_ids) for row in fresh)
            rate = (done - at_start) / (time.monotonic() - started)
            progress(
                TrainEvent(
                    stage="corpus",
                    message=f"{len(rows)} answers, {summarize_corpus(rows).loop_share:.1%} looped",
                    done=min(done, plan.num_tokens),
                    total=plan.num_tokens,
                    unit="tokens",
                    tokens_per_s=rate,
                    seconds_left=max(0, plan.num_tokens - done) / rate,
                )
            )
    return rows


Prepared = tuple[int, str, TrainingPrompt, tuple[int, ...]]


def _prompts(
    plan: TrainPlan, indices: range, prefix: tuple[int, ...], tokenizer: Tokenizer, generate: Generate
) -> list[Prepared]:
    """(index, source, prompt, ids): the target's own user turns where they are usable."""
    own = [index for index in indices if takes_share(index, plan.self_share)]
    written = dict(zip(own, _self_instructed(plan, own, prefix, tokenizer, generate), strict=True))
    prepared: list[Prepared] = []
    for index in indices:
        text = written.get(index)
        source = "template" if text is None else "self"
        if text is not None:
            prompt = TrainingPrompt(category="chat", text=text)
        else:
            prompt = template_prompt(plan.seed, _template_number(index, index in written, plan.self_share))
        ids = tuple(tokenizer.encode_chat([{"role": "user", "content": prompt.text}]))
        if len(ids) > plan.max_prompt_tokens:
            ids = ids[: plan.max_prompt_tokens // 2] + ids[-plan.max_prompt_tokens // 2 :]
        prepared.append((index, source, prompt, ids))
    return prepared


def _template_number(index: int, was_own: bool, share: float) -> int:
    """Running number among template prompts, so that categories take turns whatever the share.

    A rejected turn of the target's own counts in a range of its own.
    """
    own_before = int(index * share + 1e-9)
    return _OWN_RANGE + own_before if was_own else index - own_before


def _self_instructed(
    plan: TrainPlan, indices: Sequence[int], prefix: tuple[int, ...], tokenizer: Tokenizer, generate: Generate
) -> list[str | None]:
    """User turns sampled at T=1; None for one that is empty, unfinished or repeats itself."""
    sampling = Sampling(temperature=1.0, seed=plan.seed, max_tokens=MAX_USER_TOKENS)
    requests = [
        Request(request_id=f"user-{index}", prompt_ids=prefix, category="chat", sampling=sampling)
        for index in indices
    ]
    texts: list[str | None] = []
    records = {record.request_id: record for record in generate(requests)} if requests else {}
    for request in requests:
        record = records[request.request_id]
        ended = bool(record.output_ids) and record.output_ids[-1] in tokenizer.eos_ids
        text = tokenizer.decode(record.output_ids).strip()
        usable = ended and len(record.output_ids) > 4 and loop_start(record.output_ids) is None
        texts.append(text if usable and len(text.split()) > 2 else None)
    return texts


def _answers(
    plan: TrainPlan, prompts: Sequence[Prepared], temperature: float, tokenizer: Tokenizer, generate: Generate
) -> Iterator[CorpusRow]:
    sampling = Sampling(temperature=temperature, seed=plan.seed, max_tokens=plan.max_answer_tokens)
    requests = [
        Request(
            request_id=f"answer-{index}",
            prompt_ids=ids,
            category=prompt.category,
            sampling=sampling,
            prompt_text=prompt.text,
        )
        for index, _, prompt, ids in prompts
    ]
    records = {record.request_id: record for record in generate(requests)}
    for index, source, prompt, ids in prompts:
        record = records[f"answer-{index}"]
        kept, had_loop = cap_loop(record.output_ids)
        yield CorpusRow(
            index=index,
            category=prompt.category,
            source=source,
            temperature=temperature,
            prompt=prompt.text,
            prompt_ids=ids,
            output_ids=tuple(kept),
            had_loop=had_loop,
        )
