"""What the simulator declares: read from files, checked, and turned into seconds and probabilities."""

from __future__ import annotations

import pytest

from spectune.backend.truth import SimulatedTruth, load_truth
from spectune.errors import UsageError
from spectune.records import SpecConfig

EAGLE = SpecConfig.chain("eagle3", 3)


@pytest.mark.parametrize(
    ("batch_size", "seconds"),
    [(1, 0.02), (2, 0.03), (3, 0.04), (4, 0.045), (7, 0.06)],
)
def test_plain_seconds_are_linear_between_the_declared_sizes_and_beyond(batch_size, seconds):
    """0.02 at 1, 0.04 at 3 and 0.05 at 5: 0.03 in the middle of the first, then 0.005 a sequence."""
    truth = SimulatedTruth(plain_s_by_batch={1: 0.02, 3: 0.04, 5: 0.05})

    assert truth.plain_s(batch_size) == pytest.approx(seconds)


def test_plain_seconds_of_one_declared_size_hold_everywhere():
    """A single number is a constant."""
    assert SimulatedTruth(plain_s_by_batch={4: 0.5}).plain_s(64) == 0.5


def test_acceptance_repeats_the_last_depth_and_shrinks_with_temperature():
    """0.6 then 0.5 for ever; at T=1 with a loss of 0.5 half of each."""
    truth = SimulatedTruth(hazards={"eagle3": {"default": (0.6, 0.5)}}, temperature_loss=0.5)

    assert truth.acceptance(EAGLE, "any", 0.0) == pytest.approx((0.6, 0.5, 0.5))
    assert truth.acceptance(EAGLE, "any", 1.0) == pytest.approx((0.3, 0.25, 0.25))


def test_acceptance_of_plain_decoding_has_no_depth():
    """Off accepts nothing."""
    assert SimulatedTruth().acceptance(SpecConfig.off(), "chat", 0.0) == ()


def test_default_truth_is_slower_with_more_sequences_and_better_at_code():
    """The declared stage has the shape that people know."""
    truth = SimulatedTruth()

    assert truth.plain_s(1) < truth.plain_s(4) < truth.plain_s(16)
    assert truth.acceptance(EAGLE, "code", 0.0) > truth.acceptance(EAGLE, "chat", 0.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        pytest.param("truth.json", '{"plain_s_by_batch": {"1": 0.5}, "noise_sd": 0}', id="json"),
        pytest.param("truth.yaml", "plain_s_by_batch: {1: 0.5}\nnoise_sd: 0\n", id="yaml"),
    ],
)
def test_load_truth_reads_both_formats_over_the_defaults(name, text, tmp_path):
    """Keys of the file replace the defaults, the others stay."""
    (tmp_path / name).write_text(text)

    truth = load_truth(tmp_path / name)

    assert (truth.plain_s(1), truth.noise_sd) == (0.5, 0.0)
    assert truth.hazards == SimulatedTruth().hazards


def test_load_truth_hazards_of_a_file_are_by_method_and_category(tmp_path):
    """Lists of the file become the hazards of that category."""
    (tmp_path / "t.yaml").write_text("hazards: {ngram: {default: [0.1], code: [0.9, 0.8]}}")

    truth = load_truth(tmp_path / "t.yaml")

    assert truth.hazards == {"ngram": {"default": (0.1,), "code": (0.9, 0.8)}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("noise: 1", "unknown key noise", id="unknown-key"),
        pytest.param("hazards: {eagle3: {chat: [0.5]}}", "needs the category default", id="no-default"),
        pytest.param("hazards: {eagle3: {default: [1.5]}}", "probabilities", id="not-a-probability"),
        pytest.param("other_s: -1", "other_s is -1", id="negative"),
        pytest.param("draft_step_s: {eagle3: .nan}", "draft_step_s.eagle3 is nan", id="nan"),
        pytest.param("plain_s_by_batch: {0: 1}", "from 1 on", id="batch-zero"),
        pytest.param("plain_s_by_batch: 3", "items", id="wrong-shape"),
        pytest.param("[1, 2]", "no keys", id="a-list"),
        pytest.param("{", "neither YAML nor JSON", id="broken"),
    ],
)
def test_load_truth_wrong_file_is_a_usage_error(text, words, tmp_path):
    """Every mistake names the flag, the file or the key."""
    (tmp_path / "t.yaml").write_text(text)

    with pytest.raises(UsageError, match=words):
        load_truth(tmp_path / "t.yaml")


def test_load_truth_missing_file_names_the_flag(tmp_path):
    """A path that does not exist is the user's flag."""
    with pytest.raises(UsageError, match="--simulated-truth"):
        load_truth(tmp_path / "none.yaml")
