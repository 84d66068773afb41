"""The conversations of a plan: answered once by plain decoding, kept in the run, asked turn by turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spectune.errors import SpectuneError
from spectune.measure.conversations import Answers, as_turns, collect_answers
from spectune.measure.door import Door
from spectune.measure.progress import SweepProgress
from spectune.measure.requests import RequestBuilder
from spectune.records import Backend, Cell, Converses, Launch, Point, Prompt, SpecConfig
from spectune.store import RunStore
from spectune.tune.plan import SweepPlan

FILE = "conversations.json"
BATCH = 8

Ask = Callable[[Sequence[Prompt]], list[str]]


def with_conversations(
    plan: SweepPlan, backend: Backend, store: RunStore, progress: SweepProgress
) -> SweepPlan:
    """The plan with a prompt for every turn; unchanged where no prompt has several turns.

    A server is asked at its chat route, in a start of plain decoding of its own; an engine in this process
    decodes the turns itself. Unchanged as well where the engine gives no text back: then the first turns
    alone are asked, and the manifest says so. The digest stays that of the workload as read.
    """
    several = [prompt for prompt in plan.workload.prompts if len(prompt.turns) > 1]
    if not several or not (plan.has_boots or hasattr(backend, "tokenizer")):
        return plan
    known: Answers = store.read_json(FILE) if (store.path / FILE).is_file() else {}
    cell = Cell(batch_size=min(BATCH, len(several)), context_tokens=0, temperature=0.0)
    sampling = replace(plan.sampling, temperature=0.0, ignore_eos=False)
    point = replace(plan.point(SpecConfig.off(), cell, 0), sampling=sampling)
    notes: list[str] = []
    with Door(backend, Launch(points=(point,))) as door:
        ask = (
            _ask_server(backend, door, point, notes) if plan.has_boots else _ask_engine(backend, door, point)
        )

        def told(prompts: Sequence[Prompt]) -> list[str]:
            progress.note(f"plain decoding answers {len(prompts)} turns of conversations")
            return ask(prompts)

        answers = collect_answers(several, told, known)
    if answers != known:
        store.write_json(FILE, answers)
    _tell(store, len(several), notes)
    return replace(plan, workload=replace(plan.workload, prompts=as_turns(plan.workload.prompts, answers)))


def _ask_engine(backend: Backend, door: Door, point: Point) -> Ask:
    tokenizer = getattr(backend, "tokenizer")  # noqa: B009  # not of the protocol
    builder = RequestBuilder(backend)

    def ask(prompts: Sequence[Prompt]) -> list[str]:
        texts: list[str] = []
        size = point.cell.batch_size
        for start in range(0, len(prompts), size):
            some = list(prompts[start : start + size])
            requests = [builder.request(prompt, 0, point.cell, point.sampling) for prompt in some]
            records = door.run(point, requests).requests
            texts += ["" if record.error else str(tokenizer.decode(record.output_ids)) for record in records]
        return texts

    return ask


def _ask_server(backend: Backend, door: Door, point: Point, notes: list[str]) -> Ask:
    def ask(prompts: Sequence[Prompt]) -> list[str]:
        session = door.open()
        if not isinstance(session, Converses):
            return [""] * len(prompts)
        answers = session.converse(prompts, point.sampling)
        differing = sum(
            answer.prompt_ids is not None and answer.prompt_ids != _encoded(backend, prompt)
            for prompt, answer in zip(prompts, answers, strict=True)
        )
        if differing and not notes:
            notes.append(
                f"the server's own chat template writes {differing} of {len(prompts)} turns differently from "
                "the template that the measured prompts are written with: check --chat-template"
            )
        return [answer.text for answer in answers]

    return ask


def _encoded(backend: Backend, prompt: Prompt) -> tuple[int, ...] | None:
    try:
        return backend.encode(prompt, "", 0)
    except SpectuneError:
        return None  # too long to be measured: refused there with its numbers


def _tell(store: RunStore, count: int, notes: Sequence[str]) -> None:
    """In place of the caution that only first turns are asked."""
    text = (
        f"{count} prompts have several turns: each turn is asked after the answers that plain decoding "
        "gave (greedy), the same for every arm"
    )
    kept = [known for known in store.manifest.get("cautions", []) if "only the first is asked" not in known]
    added = [line for line in (text, *notes) if line not in kept]
    if added:
        store.update_manifest({"cautions": [*kept, *added]})
