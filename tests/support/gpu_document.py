"""A document as a device would leave it, written by hand: what follows from it is known."""

from __future__ import annotations

from typing import Any

from spectune.records import SpecConfig
from spectune.store.gpu_run import CheckRow, Device, GpuDocument, PartState, RoundRow

OFF = SpecConfig.off()
K3 = SpecConfig.chain("eagle3", 3)


def round_row(**changes: Any) -> RoundRow:
    """A plain round of 5 ms that reads 16 GB of weights and 1 GB of keys and values."""
    values: dict[str, Any] = {
        "part": "mbu",
        "model": "llama-8b",
        "weights": "random",
        "dtype": "bfloat16",
        "kernels": "graphs",
        "config": OFF,
        "batch_size": 1,
        "context_tokens": 512,
        "status": "ok",
        "num_rounds": 12,
        "draft_s": 0.0,
        "verify_s": 4.8e-3,
        "other_s": 0.2e-3,
        "round_s": 5e-3,
        "low_s": 4.9e-3,
        "high_s": 5.1e-3,
        "drift": 1.01,
        "tokens_per_s": 200.0,
        "weight_bytes": 16 * 10**9,
        "kv_bytes": 10**9,
        "peak_memory_bytes": 20 * 10**9,
    }
    return RoundRow(**(values | changes))


def speculative_row(**changes: Any) -> RoundRow:
    """A round of K=3 at acceptance length 2.5: 1 ms drafting, 5.5 ms verifying, 0.5 ms of the rest."""
    values: dict[str, Any] = {
        "config": K3,
        "forced_length": 2.5,
        "acceptance_length": 2.5,
        "draft_s": 1e-3,
        "verify_s": 5.5e-3,
        "other_s": 0.5e-3,
        "round_s": 7e-3,
        "tokens_per_s": 350.0,
        "draft_weight_bytes": 10**9,
    }
    return round_row(**(values | changes))


def check_row(**changes: Any) -> CheckRow:
    values: dict[str, Any] = {
        "part": "equality",
        "model": "smollm2-135m",
        "weights": "real",
        "dtype": "float32",
        "what": "texts of eagle3 K=3 against plain ones, greedy",
        "status": "ok",
        "num_compared": 6,
    }
    return CheckRow(**(values | changes))


def made_document() -> GpuDocument:
    """Sheet bandwidth 4 TB/s; batches 1 and 64 gain, 256 loses."""
    made = GpuDocument(
        is_rehearsal=False,
        device=Device(
            name="NVIDIA TEST",
            kind="cuda",
            driver="580.1",
            cuda="13.0",
            torch="2.11.0",
            compute_capability="9.0",
            memory_bytes=140 * 10**9,
            sheet_bandwidth_bytes_per_s=4e12,
            read_bandwidth_bytes_per_s=3.4e12,
        ),
        provenance={"argv": ["tests/gpu/run.sh", "out"], "source_digest": "abc"},
    )
    made.add(check_row())
    made.add(round_row())
    made.add(round_row(is_pass_alone=True, round_s=4.5e-3, verify_s=4.5e-3, other_s=None, tokens_per_s=None))
    made.add(round_row(part="rounds"))
    made.add(speculative_row(part="rounds"))
    for batch, plain, fast in ((1, 200.0, 350.0), (64, 10_000.0, 12_000.0), (256, 20_000.0, 15_000.0)):
        made.add(round_row(part="crossover", batch_size=batch, tokens_per_s=plain))
        made.add(speculative_row(part="crossover", batch_size=batch, tokens_per_s=fast))
    made.add(
        round_row(part="surface", batch_size=256, status="skipped", reason="needs 275.0 GB", round_s=None)
    )
    made.parts["surface"] = PartState(num_done=1, num_planned=140, reason="its time was up")
    made.parts["crossover"] = PartState(num_done=6, num_planned=6)
    return made
