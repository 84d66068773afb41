"""Both scripts to their end on a CPU: toy models, labelled, with nothing but what a GPU machine has."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spectune.draft.checkpoint import load_head
from spectune.engine.scheduler import Engine
from spectune.engine.target_config import TargetConfig
from spectune.store.gpu_run import PARTS, GpuDocument, read_gpu
from tests.gpu import drive, parts, train
from tests.gpu.models import Models, random_target
from tests.gpu.pieces import join
from tests.gpu.plan import OFF, REHEARSAL, chain
from tests.gpu.prompts import requests_of
from tests.gpu.shapes import Shape, Timed

ROOT = Path(__file__).parents[3]
ABSENT = (
    "typer", "click", "rich", "scipy", "pandas", "matplotlib", "optuna", "yaml", "httpx", "jinja2", "numba",
    "llvmlite", "gguf", "pyarrow", "tqdm", "requests",
)  # fmt: skip
"""What run.sh must do without; torch asks for some of them itself and takes no for an answer."""
BARE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
for name in {ABSENT!r}: sys.modules[name] = None
from tests.gpu.drive import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A whole rehearsal where the packages above are not installed."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    done = subprocess.run(
        [sys.executable, "-c", BARE, str(out), "--rehearse", "--seconds", "400"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "SPECTUNE_CACHE": str(out / "none")},
        cwd=out.parent,
    )
    return done, out / "gpu.json"


def test_rehearsal_runs_every_part_to_its_end(
    rehearsed: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    """All rows are there and sound, labelled as a rehearsal with random weights."""
    done, file = rehearsed

    assert 0 == done.returncode, done.stderr[-3000:]
    assert done.stderr.startswith("REHEARSAL: toy models on a CPU")
    document = read_gpu(file)
    assert document.is_rehearsal
    assert "cpu" == document.device.kind
    assert dict.fromkeys(PARTS, True) == {n: state.is_whole for n, state in document.parts.items()}
    assert all(row.is_sound for row in document.checks.values())
    rows = list(document.rounds.values())
    assert {"ok"} == {row.status for row in rows}
    assert {"random"} == {row.weights for row in rows}
    assert sum(row.part == "surface" for row in rows) >= 70
    assert all(row.peak_memory_bytes for row in rows if not row.is_pass_alone)


def test_forced_rounds_keep_the_acceptance_length_that_was_asked_for(
    rehearsed: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    """Over an even number of rounds halves even out, whatever ran between them."""
    document = read_gpu(rehearsed[1])

    for row in document.rounds.values():
        if row.part == "crossover" and row.forced_length is not None:
            assert row.forced_length == pytest.approx(row.acceptance_length)


def test_a_whole_document_is_not_measured_again(
    rehearsed: tuple[subprocess.CompletedProcess[str], Path], tmp_path: Path
) -> None:
    """--resume takes every row over; nothing is left to do, and the shape's row is the earlier one."""
    _, earlier = rehearsed

    code = drive.main([str(tmp_path), "--rehearse", "--resume", str(earlier), "--only", "mbu,crossover"])

    assert 0 == code
    assert read_gpu(earlier).rounds == read_gpu(tmp_path / "gpu.json").rounds


def test_a_call_without_time_says_what_is_missing(tmp_path: Path) -> None:
    """Exit code 7, and every part tells how to go on."""
    code = drive.main([str(tmp_path), "--rehearse", "--seconds", "0"])

    document = read_gpu(tmp_path / "gpu.json")
    assert 7 == code
    assert set(PARTS) == set(document.parts)
    assert {"its time was up; --resume measures the rest"} == {s.reason for s in document.parts.values()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("script", ["run.sh", "train.sh"])
def test_without_a_device_the_scripts_refuse(script: str, tmp_path: Path) -> None:
    """Nothing but a rehearsal runs without a GPU, and nothing is written that could pass for one."""
    done = subprocess.run(
        [str(ROOT / "tests/gpu" / script), str(tmp_path / "out"), str(tmp_path / "work")][
            : 2 + (script == "train.sh")
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHON": sys.executable},
    )

    assert 2 == done.returncode
    assert "sees no CUDA device" in done.stderr
    assert not (tmp_path / "out").exists()


def work(document: GpuDocument) -> parts.Work:
    return parts.Work(
        plan=REHEARSAL,
        models=Models(torch.device("cpu"), real_target=None, say=lambda text: None),
        document=document,
        dtype=torch.float32,
        kernels="plain",
        check=lambda: None,
        keep=document.add,  # type: ignore[arg-type]
    )


def test_a_shape_that_does_not_fit_is_skipped_with_its_reason(
    document: GpuDocument, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All arms of the cell get a row, so that a resumed call does not try again."""
    monkeypatch.setattr(parts, "no_room", lambda *shape: "needs 275.0 GB, 100.0 GB are free")
    document.rounds.clear()

    parts._cell(work(document), "crossover", "toy", 3, 16, [(OFF, None), (chain(1), 1.5)], 2)

    assert {("skipped", "needs 275.0 GB, 100.0 GB are free")} == {
        (row.status, row.reason) for row in document.rounds.values()
    }
    assert 2 == len(document.rounds)


@pytest.mark.parametrize(
    ("error", "status"),
    [(torch.OutOfMemoryError("CUDA out of memory\ntraces"), "oom"), (RuntimeError("no kernel"), "failed")],
)
def test_a_shape_that_breaks_does_not_end_the_call(
    document: GpuDocument, monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    """Its rows say why; what failed is measured again by a resumed call, what does not fit is not."""

    def broken(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(Shape, "run", broken)
    document.rounds.clear()

    parts._cell(work(document), "surface", "toy", 1, 16, [(OFF, None)], 2)

    row = next(iter(document.rounds.values()))
    assert status == row.status
    assert row.reason
    assert (status == "oom") == document.has(row.key)


def test_a_part_that_breaks_leaves_the_others_to_run(
    document: GpuDocument, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is kept with the part."""

    def broken(work: parts.Work) -> None:
        raise RuntimeError("the driver went away")

    drive.run_part(("mbu", broken, parts.num_mbu, 0.1), work(document), tmp_path / "gpu.json", ends_s=1e18)

    assert "RuntimeError: the driver went away" == document.parts["mbu"].reason
    assert "mbu broke off" in capsys.readouterr().err


def test_rounds_of_a_shape_stay_at_its_context() -> None:
    """Every round starts from the same number of cached tokens, whatever it accepted."""
    model = work_models().of("toy", torch.float32, "plain")
    shape = Shape(model, 3, 40, [OFF, chain(3)])
    timed = Timed()

    shape.run(chain(3), 2.5, 6, timed)

    assert [120] * 6 == [record.kv_tokens for record in timed.rounds]
    assert (18, 27) == (timed.num_steps, timed.num_accepted)
    assert [6, 9, 6, 9, 6, 9] == [record.num_emitted for record in timed.rounds]


def work_models() -> Models:
    return Models(torch.device("cpu"), real_target=None, say=lambda text: None)


def test_models_are_kept_until_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that does not fit beside the others is loaded alone; one that fits is loaded once."""
    models = work_models()
    first = models.of("toy", torch.float32, "plain")
    tries = []

    def load(name: str, dtype: torch.dtype, kernels: str) -> object:
        tries.append(name)
        if len(tries) == 1:
            raise torch.OutOfMemoryError
        return name

    assert first is models.of("toy", torch.float32, "plain")
    monkeypatch.setattr(models, "_load", load)
    assert "toy-wide" == models.of("toy-wide", torch.float32, "plain")
    assert ["toy-wide", "toy-wide"] == tries
    assert 1 == len(models._loaded)


@pytest.mark.real_model
def test_the_small_model_is_real_where_its_files_are(default_target_dir: Path) -> None:
    """The default target is loaded with the shipped head, and its drafts are judged, not forced."""
    folder = drive.real_target(default_target_dir)
    models = Models(torch.device("cpu"), real_target=folder, say=lambda text: None)

    model = models.of("smollm2-135m", torch.float32, "plain")
    asked = requests_of(model, 1, 12, models.real_folder)
    engine = Engine(model.target, drafter=model.drafter, batch_size=1, eos_ids=())
    found = [engine.generate(asked, config).requests[0] for config in (OFF, chain(3))]

    assert ("real", True) == (model.weights, models.has_real)
    assert found[0].output_ids == found[1].output_ids
    assert sum(step.num_accepted for step in found[1].steps) > 0


def test_a_target_that_is_not_at_hand_is_not_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache gives random weights, never a download."""
    monkeypatch.setenv("SPECTUNE_CACHE", str(tmp_path))

    assert drive.real_target(None) is None
    assert drive.real_target(tmp_path) is None


def test_shapes_of_the_big_models_are_what_their_names_say() -> None:
    """Parameters by counting, without making one: 1.24 and 8.03 billion, 135 million."""
    from spectune.engine.checkpoint import expected_shapes
    from tests.gpu.models import LLAMA, SHAPES

    def millions(name: str) -> int:
        config = TargetConfig.from_hf({**LLAMA, **SHAPES[name]}, name)
        return round(sum(torch.Size(shape).numel() for shape in expected_shapes(config).values()) / 1e6)

    assert [135, 1236, 8030] == [millions(name) for name in ("smollm2-135m", "llama-1b", "llama-8b")]
    assert random_target("toy", torch.device("cpu"), torch.float32, "plain").is_dummy


def test_training_runs_in_phases_and_comes_back_in_pieces(tmp_path: Path) -> None:
    """Two phases of new prompts, the second from the first one's head; the pieces join to a sound head."""
    out, folder = tmp_path / "out", tmp_path / "work"

    code = train.main([str(out), str(folder), "--rehearse"])

    state = json.loads((out / "train.json").read_text())
    assert 0 == code
    assert (True, 2) == (state["is_rehearsal"], state["num_phases_done"])
    assert [1000, 1001] == [phase["seed"] for phase in state["phases"]]
    assert [None, "head"] == [phase["init_from"] for phase in state["phases"]]
    assert state["num_tokens"] == sum(phase["num_tokens"] for phase in state["phases"]) >= 300
    assert not list(folder.glob("phase-*/features"))
    join(out, tmp_path / "head")
    (tmp_path / "head/config.json").write_bytes((out / "config.json").read_bytes())
    config = TargetConfig.from_dir(folder / "toy")
    assert 49 == load_head(tmp_path / "head", config).config.draft_vocab_size


def test_training_that_is_cut_goes_on_on_the_same_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock's interrupt leaves the phase to the next call, which finishes both."""
    out, folder = tmp_path / "out", tmp_path / "work"

    def cut(plan: object, progress: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(train.pipeline, "run", cut)
        assert 7 == train.main([str(out), str(folder), "--rehearse"])
    assert "phase 0 was cut by the clock" in capsys.readouterr().err
    assert 0 == json.loads((out / "train.json").read_text())["num_phases_done"]

    assert 0 == train.main([str(out), str(folder), "--rehearse"])


def test_training_goes_on_from_the_state_of_another_machine(tmp_path: Path) -> None:
    """With an earlier head and state only the phases that are left are trained."""
    first, second = tmp_path / "first", tmp_path / "second"
    train.main([str(first), str(tmp_path / "w1"), "--rehearse", "--phases", "1"])
    join(first, tmp_path / "head")
    (tmp_path / "head/config.json").write_bytes((first / "config.json").read_bytes())

    code = train.main(
        [
            str(second), str(tmp_path / "w2"), "--rehearse",
            "--head", str(tmp_path / "head"), "--state", str(first / "train.json"),
        ]
    )  # fmt: skip

    state = json.loads((second / "train.json").read_text())
    assert 0 == code
    assert [None, "head"] == [phase["init_from"] for phase in state["phases"]]


def test_the_clock_interrupts_what_runs() -> None:
    """The interrupt comes when the time is up, and not after the work is done."""
    with pytest.raises(KeyboardInterrupt), train.until(0.0):
        signal.pause()
    with train.until(1e9):
        pass
