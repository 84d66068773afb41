"""The conversations of a plan: answered once by plain decoding, kept in the run, asked turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from spectune.measure.conversations import Answers, as_turns, collect_answers
from spectune.measure.door import Door
from spectune.measure.progress import SweepProgress
from spectune.measure.requests import RequestBuilder
from spectune.records import Backend, Cell, Launch, Prompt, SpecConfig
from spectune.store import RunStore
from spectune.tune.plan import SweepPlan

FILE = "conversations.json"
BATCH = 8


def with_conversations(
    plan: SweepPlan, backend: Backend, store: RunStore, progress: SweepProgress
) -> SweepPlan:
    """The plan with a prompt for every turn; unchanged where no prompt has several turns.

    Unchanged as well where the engine gives no text back, or is started anew for every arm: then the
    first turns alone are asked, and the manifest says so. The digest stays that of the workload as read.
    """
    several = [prompt for prompt in plan.workload.prompts if len(prompt.turns) > 1]
    tokenizer = getattr(backend, "tokenizer", None)
    if not several or tokenizer is None or plan.has_boots:
        return plan
    known: Answers = store.read_json(FILE) if (store.path / FILE).is_file() else {}
    cell = Cell(batch_size=min(BATCH, len(several)), context_tokens=0, temperature=0.0)
    sampling = replace(plan.sampling, temperature=0.0, ignore_eos=False)
    point = replace(plan.point(SpecConfig.off(), cell, 0), sampling=sampling)
    with Door(backend, Launch(points=(point,))) as door:

        def ask(prompts: Sequence[Prompt]) -> list[str]:
            progress.note(f"plain decoding answers {len(prompts)} turns of conversations")
            builder = RequestBuilder(backend)
            texts: list[str] = []
            for start in range(0, len(prompts), cell.batch_size):
                some = list(prompts[start : start + cell.batch_size])
                requests = [builder.request(prompt, 0, cell, sampling) for prompt in some]
                records = door.run(point, requests).requests
                texts += [
                    "" if record.error else str(tokenizer.decode(record.output_ids)) for record in records
                ]
            return texts

        answers = collect_answers(several, ask, known)
    if answers != known:
        store.write_json(FILE, answers)
    _tell(store, len(several))
    return replace(plan, workload=replace(plan.workload, prompts=as_turns(plan.workload.prompts, answers)))


def _tell(store: RunStore, count: int) -> None:
    """In place of the caution that only first turns are asked."""
    text = (
        f"{count} prompts have several turns: each turn is asked after the answers that plain decoding "
        "gave (greedy), the same for every arm"
    )
    kept = [known for known in store.manifest.get("cautions", []) if "only the first is asked" not in known]
    if text not in kept:
        store.update_manifest({"cautions": [*kept, text]})
