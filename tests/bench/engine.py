"""How fast the reference engine decodes on this machine, alone and beside what a user could pick instead.

    python tests/bench/engine.py alone
    python tests/bench/engine.py dtypes
    python tests/bench/engine.py vllm --engine-python /path/to/vllm/bin/python
    python tests/bench/engine.py transformers --engine-python /path/to/python/with/transformers

`alone`: share of the read bandwidth, cost of a round in plain steps, where a round's time goes, and how
cost grows with batch and context against what the small shapes predict. `dtypes`: passes of the target in
fp32 over those in bf16, in turn, with 95% t intervals over turns. The others decode the same prompts
greedily in turn, A B B A, all arms loaded; ratios are taken prompt by prompt (their time over ours), with
95% t intervals over prompts. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch

from spectune.backend.reference import ReferenceBackend
from spectune.backend.vllm import VllmBackend
from spectune.engine.kv_cache import SlotView
from spectune.engine.target import Target
from spectune.records import BlockResult, Cell, Point, Request, RoundRecord, Sampling, Session, SpecConfig
from spectune.stats import clustered_log_ratio_interval, ratio_interval
from spectune.workload import load_workload

HEAD = "smollm2-135m-eagle3"
OFF = SpecConfig.off()
K3 = SpecConfig.chain("eagle3", 3)


def tree(depth: int, topk: int, nodes: int) -> SpecConfig:
    return SpecConfig(method="eagle3", num_steps=depth, topk=topk, num_draft_tokens=nodes)


ROUNDS = [
    OFF,
    *(SpecConfig.chain("eagle3", k) for k in (1, 3, 5, 7)),
    *(tree(*shape) for shape in ((3, 2, 8), (5, 4, 16), (5, 8, 32))),
]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["alone", "growth", "dtypes", "vllm", "transformers"])
    parser.add_argument("--engine-python", help="interpreter that has vllm or transformers")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument(
        "--setting", help="vLLM's best setting if it is known, e.g. compiled:0-1 (eager or compiled, cores)"
    )
    parser.add_argument("--quantization", choices=["int8"])
    arguments = parser.parse_args()
    backend = ReferenceBackend(draft_model=HEAD, quantization=arguments.quantization)
    print(machine(backend))
    if arguments.part == "alone":
        alone(backend, arguments)
    elif arguments.part == "growth":
        growth(backend)
    elif arguments.part == "dtypes":
        dtypes(backend)
    elif arguments.engine_python is None:
        parser.error(f"{arguments.part} needs --engine-python")
    elif arguments.part == "vllm":
        against_vllm(backend, arguments)
    else:
        against_transformers(backend, arguments)


def machine(backend: ReferenceBackend) -> str:
    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )  # fmt: skip
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("spectune", "torch", "numba"))
    fingerprint = backend.fingerprint()
    return (
        f"{model}, {os.cpu_count()} cores, {fingerprint.threads} threads, {fingerprint.dtype}"
        f"{' int8 weights' if backend.target.quantization else ''}, {versions}, {platform.python_version()}"
    )


def requests_of(backend: ReferenceBackend, count: int, max_tokens: int) -> list[Request]:
    prompts = load_workload(None, num_prompts=count).prompts
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(
            request_id=prompt.prompt_id,
            prompt_ids=backend.encode(prompt, "", 0),
            category=prompt.category,
            sampling=sampling,
        )
        for prompt in prompts
    ]


def point(config: SpecConfig, batch_size: int, max_tokens: int) -> Point:
    return Point(
        config=config,
        cell=Cell(batch_size=batch_size, context_tokens=0, temperature=0.0),
        workload_hash="bench",
        sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
    )


# --- alone ---------------------------------------------------------------------------------------------


def alone(backend: ReferenceBackend, arguments: argparse.Namespace) -> None:
    print("\ncost of a round in plain steps (medians; arms in turn within every prompt)")
    for batch_size in (1, 4, 16):
        round_costs(backend, batch_size, arguments)
    growth(backend)


def round_costs(backend: ReferenceBackend, batch_size: int, arguments: argparse.Namespace) -> None:
    requests = requests_of(backend, max(arguments.num_prompts, batch_size), arguments.max_tokens // 2)
    groups = [requests[i : i + batch_size] for i in range(0, len(requests), batch_size)]
    engines = {config: backend.engine(config, batch_size) for config in ROUNDS}
    rounds: dict[SpecConfig, list[RoundRecord]] = {config: [] for config in ROUNDS}
    accepted: dict[SpecConfig, list[int]] = {config: [] for config in ROUNDS}
    for config, engine in engines.items():
        engine.generate(groups[0], config)
    for turn in range(arguments.passes):
        for group in groups:
            for config in ROUNDS if turn % 2 == 0 else reversed(ROUNDS):
                block = engines[config].generate(group, config)
                full = [r for r in block.rounds if r.kind == "decode" and r.batch_size == len(group)]
                rounds[config] += full
                accepted[config] += [s.num_accepted for r in block.requests for s in r.steps]
    plain_s = statistics.median(map(seconds, rounds[OFF]))
    fingerprint = backend.fingerprint()
    assert fingerprint.weight_bytes is not None
    assert fingerprint.read_bandwidth_bytes_per_s is not None
    if batch_size == 1:
        floor_s = fingerprint.weight_bytes / fingerprint.read_bandwidth_bytes_per_s
        print(
            f"weights {fingerprint.weight_bytes / 1e6:.0f} MB, read bandwidth "
            f"{fingerprint.read_bandwidth_bytes_per_s / 1e9:.1f} GB/s, floor {floor_s * 1e3:.2f} ms, plain step "
            f"{plain_s * 1e3:.2f} ms: {100 * floor_s / plain_s:.0f}% of the bandwidth"
        )
    print(
        f"{'batch':>5} {'config':<22}{'draft':>8}{'verify':>8}{'other':>8}{'round ms':>10}{'steps':>7}{'other %':>9}{'AL':>6}{'speedup':>9}"
    )
    for config, found in rounds.items():
        parts = [
            statistics.median(getattr(r, name) for r in found) for name in ("draft_s", "verify_s", "other_s")
        ]
        total_s = statistics.median(map(seconds, found))
        length = 1 + statistics.fmean(accepted[config])
        cells = "".join(f"{part * 1e3:8.2f}" for part in parts)
        print(
            f"{batch_size:>5} {config.label:<22}{cells}{total_s * 1e3:10.2f}{total_s / plain_s:7.2f}"
            f"{100 * parts[2] / total_s:9.1f}{length:6.2f}{length * plain_s / total_s:9.2f}"
        )


def seconds(record: RoundRecord) -> float:
    return record.draft_s + record.verify_s + record.other_s


def growth(backend: ReferenceBackend) -> None:
    """One pass of the target (output head included) by batch and context against a prediction.

    Predicted from smaller shapes: rows cost what they cost from 16 to 32, columns of one row what they
    cost from 128 to 1,024, columns of 16 rows what they cost from 128 to 512. A cliff would show.
    """
    target = backend.target
    shapes = [(1, 128), (4, 128), (16, 128), (32, 128), (64, 128), (1, 1024), (1, 2048), (1, 4096)]
    shapes += [(16, 512), (16, 1024)]
    passes: dict[tuple[int, int], Callable[[], object]] = {}
    for batch_size, context in shapes:
        cache = target.new_cache(batch_size, context + 64)
        slots = SlotView(range(batch_size), target.device)
        ids = torch.randint(5, 40_000, (batch_size, 1))
        for begin in range(0, context, 128):  # real keys and values, not zeros
            text = torch.randint(5, 40_000, (batch_size, 128))
            where = torch.arange(begin, begin + 128).expand(batch_size, -1)
            target.forward(text, where, cache, slots, [begin] * batch_size, None)
        positions = torch.full((batch_size, 1), context)

        def run(
            ids=ids, positions=positions, cache=cache, slots=slots, lengths=[context] * batch_size
        ) -> None:  # type: ignore[no-untyped-def]
            target.best(target.forward(ids, positions, cache, slots, lengths, None)[0])

        passes[batch_size, context] = run
    times: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    with torch.inference_mode(), target.own_threads():
        for _ in range(15):
            for shape, run in passes.items():
                run()
                begin_s = time.perf_counter()
                run()
                times[shape].append(time.perf_counter() - begin_s)
    found = {shape: statistics.median(values) for shape, values in times.items()}
    row_s = (found[32, 128] - found[16, 128]) / 16
    column_s = (found[1, 1024] - found[1, 128]) / 896
    wide_column_s = (found[16, 512] - found[16, 128]) / 384
    predicted = {
        (64, 128): found[16, 128] + 48 * row_s,
        (1, 2048): found[1, 128] + 1920 * column_s,
        (1, 4096): found[1, 128] + 3968 * column_s,
        (16, 1024): found[16, 128] + 896 * wide_column_s,
    }
    print("\ngrowth with batch and context: one pass with output head, ms, and what smaller shapes predict")
    for (batch_size, context), value in found.items():
        line = f"batch {batch_size:>3} context {context:>5}: {value * 1e3:7.2f}"
        if (batch_size, context) in predicted:
            guess = predicted[batch_size, context]
            line += f" against {guess * 1e3:7.2f} ({value / guess:.2f})"
        print(line)


# --- dtypes --------------------------------------------------------------------------------------------


def dtypes(backend: ReferenceBackend) -> None:
    """One pass of the target in fp32 over one in bf16: ratios of neighbouring passes, t interval over turns."""
    assert backend.target.path is not None
    shapes = [(1, 1), (1, 4), (4, 1), (8, 1), (4, 4), (8, 4), (16, 4)]
    names = ("bfloat16", "float32")
    passes = {}
    for name in names:
        target = Target.load(backend.target.path, dtype=name)
        passes[name] = {shape: one_pass(target, *shape) for shape in shapes}
    times: dict[tuple[str, tuple[int, int]], list[float]] = {(n, s): [] for n in names for s in shapes}
    with torch.inference_mode(), backend.target.own_threads():
        for turn in range(31):
            for shape in shapes:
                for name in names if turn % 2 == 0 else reversed(names):
                    passes[name][shape]()
                    begin_s = time.perf_counter()
                    passes[name][shape]()
                    times[name, shape].append(time.perf_counter() - begin_s)
    print(f"\n{'batch':>5} {'tokens':>6} {'bf16 ms':>9}{'fp32 ms':>9}  fp32 over bf16 (95%)")
    for shape in shapes:
        short, full = (times[name, shape] for name in names)
        ratio = ratio_interval([math.log(b / a) for a, b in zip(short, full, strict=True)])
        print(
            f"{shape[0]:>5} {shape[1]:>6} {statistics.median(short) * 1e3:9.2f}"
            f"{statistics.median(full) * 1e3:9.2f}  {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
        )


def one_pass(target: Target, batch_size: int, num_tokens: int) -> Callable[[], object]:
    """A pass of `num_tokens` a row, output head included, behind 128 tokens of context."""
    cache = target.new_cache(batch_size, 192)
    slots = SlotView(range(batch_size), target.device)
    text = torch.randint(5, 40_000, (batch_size, 128))
    target.forward(text, torch.arange(128).expand(batch_size, -1), cache, slots, [0] * batch_size, None)
    ids = torch.randint(5, 40_000, (batch_size, num_tokens))
    positions = torch.arange(128, 128 + num_tokens).expand(batch_size, -1)
    lengths = [128] * batch_size
    return lambda: target.best(target.forward(ids, positions, cache, slots, lengths, None)[0])


# --- beside others -------------------------------------------------------------------------------------

Timed = Callable[[Sequence[Request]], float]


def children() -> list[int]:
    """Processes that this one started, and theirs."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [os.getpid()]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


@contextlib.contextmanager
def others_stopped() -> Iterator[None]:
    """Idle servers spin for the next request: they are held still while it is not their turn."""
    held = children()
    for pid in held:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in held:
            os.kill(pid, signal.SIGCONT)


def tpot_s(block: BlockResult) -> float:
    """Mean seconds between output tokens of the block's requests."""
    values = [request.tpot_s for request in block.requests]
    assert None not in values, "a request failed"
    return statistics.fmean(value for value in values if value is not None)


def whole_s(block: BlockResult) -> float:
    """Seconds from the first request's arrival to the last one's end."""
    begin = min(request.arrival_s for request in block.requests)
    return max(request.finish_s for request in block.requests) - begin


def timed(session: Session, where: Point) -> Timed:
    reduce = tpot_s if where.cell.batch_size == 1 else whole_s
    return lambda requests: reduce(session.run(where, requests))


def compare(
    name: str, groups: Sequence[Sequence[Request]], run_ours: Timed, theirs: Timed, passes: int, unit: str
) -> None:
    """Print the ratio of two arms over groups of requests, run A B B A."""

    def ours(group: Sequence[Request]) -> float:
        with others_stopped():
            return run_ours(group)

    pairs: list[tuple[str, float]] = []
    mine: list[float] = []
    other: list[float] = []
    ours(groups[0]), theirs(groups[0])
    for turn in range(passes):
        for index, group in enumerate(groups):
            first, second = (ours, theirs) if (turn + index) % 2 == 0 else (theirs, ours)
            a, b, c, d = first(group), second(group), second(group), first(group)
            outer, inner = (a + d) / 2, (b + c) / 2
            own, else_ = (outer, inner) if first is ours else (inner, outer)
            mine.append(own)
            other.append(else_)
            pairs.append((group[0].request_id, math.log(else_ / own)))
    ratio = clustered_log_ratio_interval(pairs)
    scale, digits = (1e3, "ms a token") if unit == "token" else (1.0, "s a block")
    print(
        f"{name:<58} {statistics.median(other) * scale:8.2f} {statistics.median(mine) * scale:8.2f} {digits:<11} "
        f"ratio {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}), n={ratio.n}",
        flush=True,
    )


def grouped(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    return [requests[i : i + size] for i in range(0, len(requests) - size + 1, size)]


def against_vllm(backend: ReferenceBackend, arguments: argparse.Namespace) -> None:
    """The best of eager and compiled, one thread and two, is found first; then it is run in turn with us."""
    few = requests_of(backend, 16, arguments.max_tokens)
    best: dict[int, tuple[float, bool, str]] = {}
    if arguments.setting is not None:
        mode, cores = arguments.setting.split(":")
        best = dict.fromkeys((1, 16), (0.0, mode == "eager", cores))
    for is_eager in (True, False) if not best else ():
        for cores in dict.fromkeys(["0-1", "0"]):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
            server = VllmBackend(engine_python=arguments.engine_python, draft_model=HEAD, is_eager=is_eager)
            with server.open(server.plan([point(OFF, 1, arguments.max_tokens)])[0]) as session:
                for batch_size in (1, 16):
                    run = timed(session, point(OFF, batch_size, arguments.max_tokens))
                    groups = grouped(few, batch_size)[:3]
                    run(groups[0])
                    value = statistics.median(run(group) for group in groups)
                    print(
                        f"vllm {'eager' if is_eager else 'compiled'}, cores {cores}, batch {batch_size}: {value:.4f} s",
                        flush=True,
                    )
                    best[batch_size] = min(
                        best.get(batch_size, (math.inf, True, "")), (value, is_eager, cores)
                    )
    print("\nratio: vLLM's time over spectune's; vLLM at its best setting of those above", flush=True)
    settings = {batch_size: best[1 if batch_size < 16 else 16][1:] for batch_size in (1, 4, 16)}
    for config in (OFF, K3):
        for is_eager, cores in dict.fromkeys(settings.values()):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = cores
            server = VllmBackend(engine_python=arguments.engine_python, draft_model=HEAD, is_eager=is_eager)
            first = point(config, 1, arguments.max_tokens)
            with (
                server.open(server.plan([first])[0]) as theirs,
                backend.open(backend.plan([first])[0]) as ours,
            ):
                for batch_size in (size for size, own in settings.items() if own == (is_eager, cores)):
                    where = point(config, batch_size, arguments.max_tokens)
                    requests = requests_of(
                        backend, max(arguments.num_prompts, 2 * batch_size), arguments.max_tokens
                    )
                    setting = f"{'eager' if is_eager else 'compiled'}, cores {cores}"
                    compare(
                        f"vLLM ({setting}), {config.label}, batch {batch_size}",
                        grouped(requests, batch_size),
                        timed(ours, where),
                        timed(theirs, where),
                        arguments.passes,
                        "token" if batch_size == 1 else "block",
                    )


WORKER = """
import json, sys, time, torch, transformers
torch.set_grad_enabled(False)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
print(json.dumps(transformers.__version__), flush=True)
for line in sys.stdin:
    job = json.loads(line)
    longest = max(map(len, job["ids"]))
    pad = [[0] * (longest - len(row)) for row in job["ids"]]
    ids = torch.tensor([p + row for p, row in zip(pad, job["ids"])])
    mask = torch.tensor([[0] * len(p) + [1] * len(row) for p, row in zip(pad, job["ids"])])
    options = dict(do_sample=False, max_new_tokens=job["n"], min_new_tokens=job["n"], pad_token_id=0)
    if job["lookup"]:
        options["prompt_lookup_num_tokens"] = job["lookup"]
    one = dict(options, max_new_tokens=1, min_new_tokens=1)
    one.pop("prompt_lookup_num_tokens", None)
    begin = time.perf_counter()
    model.generate(ids, attention_mask=mask, **one)
    middle = time.perf_counter()
    model.generate(ids, attention_mask=mask, **options)
    end = time.perf_counter()
    print(json.dumps({"first_s": middle - begin, "all_s": end - middle}), flush=True)
"""


def against_transformers(backend: ReferenceBackend, arguments: argparse.Namespace) -> None:
    command = [arguments.engine_python, "-c", WORKER, str(backend.model_path)]
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(worker.terminate)
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(f"transformers {json.loads(worker.stdout.readline())}; ratio: its time over spectune's")

        def ask(requests: Sequence[Request], lookup: int) -> float:
            job = {
                "ids": [list(r.prompt_ids) for r in requests],
                "n": arguments.max_tokens,
                "lookup": lookup,
            }
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            took = json.loads(worker.stdout.readline())
            if len(requests) == 1:
                return (took["all_s"] - took["first_s"]) / (arguments.max_tokens - 1)
            return float(took["all_s"])

        for batch_size in (1, 4, 16):
            requests = requests_of(backend, max(arguments.num_prompts, 2 * batch_size), arguments.max_tokens)
            groups = grouped(requests, batch_size)
            unit = "token" if batch_size == 1 else "block"
            arms = [(OFF, 0, "generate")]
            if batch_size == 1:
                ngram = SpecConfig.chain(
                    "ngram", 3, options=(("prompt_lookup_max", 3), ("prompt_lookup_min", 1))
                )
                arms.append((ngram, 3, "generate, prompt lookup 3"))
            for config, lookup, name in arms:
                where = point(config, batch_size, arguments.max_tokens)
                session = stack.enter_context(backend.open(backend.plan([where])[0]))
                theirs = lambda requests, lookup=lookup: ask(requests, lookup)  # noqa: E731
                label = f"transformers {name}, batch {batch_size}, against {config.label}"
                compare(label, groups, timed(session, where), theirs, arguments.passes, unit)


if __name__ == "__main__":
    sys.exit(main())
