"""The gate file: round trip, schema, what it refuses."""

from __future__ import annotations

import json
from importlib import resources

import jsonschema
import pytest
import yaml

from spectune.errors import UsageError
from spectune.gate.file import SCHEMA_FILE, gate_of, gate_text, read_gate, schema_document


def test_a_gate_survives_its_own_file(gate_of, tmp_path):
    """What is written is what is read."""
    made = gate_of()
    path = tmp_path / "made.yaml"
    path.write_text(gate_text(made), encoding="utf-8")

    assert gate_text(made) == gate_text(read_gate(path))
    assert made.point() == read_gate(path).point()


def test_every_entry_of_a_gate_file_is_explained(gate_of):
    """Each entry stands under a comment."""
    lines = gate_text(gate_of()).splitlines()
    entries = [i for i, line in enumerate(lines[: lines.index("fingerprint:")]) if line.startswith("  ")]

    assert all(
        lines[i - 1].lstrip().startswith("#") for i in entries if not lines[i].lstrip().startswith("#")
    )


def test_the_published_schema_is_the_one_of_the_code_and_fits_a_gate(gate_of):
    """The schema file is current, and a written gate is valid by it."""
    published = json.loads(resources.files("spectune.gate").joinpath(SCHEMA_FILE).read_text("utf-8"))

    assert published == schema_document()
    jsonschema.validate(yaml.safe_load(gate_text(gate_of())), published)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["speed"].update(max_slow=1), "unknown entry max_slow"),
        (lambda d: d.update(extra={}), "unknown section extra"),
        (lambda d: d["acceptance"].update(tolerance="1%"), "acceptance.tolerance: '1%' is not a number"),
        (lambda d: d["statistics"].update(num_starts=1), "below 2"),
        (lambda d: d["acceptance"].pop("acceptance_length"), "acceptance_length is missing"),
        (lambda d: d.update(schema_version=2), "schema_version 2"),
        (lambda d: d["acceptance"].update(per_position=[0.4, 0.1]), "2 values"),
        (lambda d: d["acceptance"].update(acceptance_length=1.8), "sums to 1.600"),
        (
            lambda d: d["acceptance"].update(acceptance_length=1.02, per_position=[0.02, 0.0, 0.0]),
            "dead baseline",
        ),
    ],
)
def test_a_gate_that_cannot_be_meant_is_refused_by_name(gate_of, change, message):
    """Errors name the entry; positions must sum to the length, and a dead draft is no baseline."""
    from spectune.gate import file

    document = yaml.safe_load(gate_text(gate_of()))
    change(document)

    with pytest.raises(UsageError) as caught:
        file.gate_of(document, "made.yaml")
    assert message in caught.value.message


def test_values_rounded_by_hand_still_add_up():
    """2.60 with 0.73, 0.52 and 0.35 is a gate; three digits are not asked of people."""
    assert (
        gate_of(
            {
                "schema_version": 1,
                "origin": {"created": "2026-11-30"},
                "subject": {
                    "config": {
                        "method": "eagle3",
                        "num_steps": 3,
                        "topk": 1,
                        "num_draft_tokens": 4,
                    },
                    "batch_size": 1,
                    "context_tokens": 0,
                    "sampling": {},
                    "workload": "mt-bench",
                    "workload_digest": "d",
                },
                "acceptance": {
                    "acceptance_length": 2.60,
                    "per_position": [0.73, 0.52, 0.35],
                    "tolerance": 0.02,
                    "num_steps": 900,
                    "output_tokens": 2300,
                },
            },
            "made.yaml",
        ).config.num_steps
        == 3
    )
