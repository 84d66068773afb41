"""What the files of a model or a head say, read without loading weights and without judging them.

Config files, tensor headers and the two small vocabulary tensors; any architecture, torch is needed for
pytorch_model.bin only. The loader refuses a wrong head with one error; here everything that is wrong
with it can be seen at once. Facts travel to `spectune.measure.doctor`, which judges them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spectune.engine.target_config import read_json
from spectune.errors import CheckpointError

Ids = NDArray[np.int64]

CONTAINERS = ("text_config", "llm_config", "language_config")
"""Where multimodal models keep the configuration of their language model."""

_NUMPY = {"I64": "<i8", "I32": "<i4", "BOOL": "?", "U8": "u1", "I16": "<i2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions as written: base (None where the file has none), scaling, and where they stand."""

    theta: float | None
    scaling: Mapping[str, Any] | None
    place: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model directory. `shapes` is None where the weights have no readable header."""

    path: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]] | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)
    token_by_id: Mapping[int, str] | None = None
    template: str | None = None

    def count(self, key: str) -> int | None:
        """A positive whole number of config.json, None where it is missing or is none."""
        value = self.config.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def architectures(self) -> tuple[str, ...]:
        names = self.config.get("architectures") or ()
        return tuple(map(str, names)) if isinstance(names, list | tuple) else (str(names),)

    @property
    def head_dim(self) -> int | None:
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        return self.count("head_dim") or (hidden // heads if hidden and heads else None)

    @property
    def quantisation(self) -> str | None:
        """Name of the scheme in config.json, or that of 8-bit weights without one."""
        scheme = self.config.get("quantization_config") or self.config.get("compression_config")
        if isinstance(scheme, Mapping):
            return str(scheme.get("quant_method") or scheme.get("format") or "unnamed scheme")
        low = sorted(
            {
                kind
                for name, kind in self.dtypes.items()
                if kind.startswith(("F8", "F4")) and "scale" not in name
            }
        )
        return low[0] if low else None

    @property
    def rope(self) -> Rope:
        """Both layouts: `rope_theta` beside `rope_scaling`, or `rope_parameters` that holds both."""
        nested = self.config.get("rope_parameters")
        place = "rope_parameters"
        if not isinstance(nested, Mapping) or not nested:
            nested, place = self.config.get("rope_scaling"), "rope_theta and rope_scaling"
        values = dict(nested) if isinstance(nested, Mapping) else {}
        theta = values.pop("rope_theta", self.config.get("rope_theta"))
        kind = values.get("rope_type", values.get("type", "default"))
        is_number = isinstance(theta, int | float) and not isinstance(theta, bool)
        return Rope(
            theta=float(theta) if is_number else None,
            scaling=None if kind in ("default", None) else values,
            place=place,
        )

    @property
    def vocab_size(self) -> int | None:
        return self.count("vocab_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts(ModelFacts):
    """A draft head, with the two vocabulary tensors as they are stored (None where absent)."""

    d2t: Ids | None = None
    t2d: NDArray[np.bool_] | None = None

    @property
    def is_eagle3(self) -> bool:
        names = (*self.architectures, str(self.config.get("speculators_model_type") or ""))
        return any("eagle3" in name.lower() for name in names) or self._fc_inputs == 3

    @property
    def _fc_inputs(self) -> float | None:
        """Width of the fc's input in hidden sizes of the target."""
        width = self.fc_width
        hidden = self.count("target_hidden_size") or self.count("hidden_size")
        return None if width is None or hidden is None else width / hidden

    @property
    def fc_width(self) -> int | None:
        shape = (self.shapes or {}).get("fc.weight")
        return shape[1] if shape is not None and len(shape) == 2 else None

    @property
    def draft_vocab_size(self) -> int | None:
        return self.count("draft_vocab_size") or self.vocab_size

    @property
    def top_level_ids(self) -> tuple[int, ...] | None:
        """Capture points as vLLM reads them: layers run before the capture."""
        return _ids(self.config.get("eagle_aux_hidden_state_layer_ids"))

    @property
    def nested_ids(self) -> tuple[int, ...] | None:
        """Capture points as SGLang reads them: the layer after which is captured."""
        return _ids(self._eagle_config.get("eagle_aux_hidden_state_layer_ids"))

    @property
    def _eagle_config(self) -> Mapping[str, Any]:
        nested = self.config.get("eagle_config")
        return nested if isinstance(nested, Mapping) else {}

    def flag(self, name: str) -> bool:
        """A flag of the head's layer, at the top or in eagle_config."""
        return bool(self.config.get(name) or self._eagle_config.get(name))


def inspect_model(path: Path) -> ModelFacts:
    """Facts of a target. CheckpointError for a folder without a readable config.json."""
    config = read_json(path / "config.json")
    for container in CONTAINERS:
        if isinstance(config.get(container), Mapping):
            config = {**config, **config[container], "architectures": config.get("architectures")}
    shapes, dtypes = _headers(path)
    return ModelFacts(
        path=path,
        config=config,
        shapes=shapes,
        dtypes=dtypes,
        token_by_id=read_vocabulary(path),
        template=read_template(path),
    )


def inspect_head(path: Path) -> HeadFacts:
    """Facts of a draft head or draft model, tensors under their classic names."""
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory", hint="give the folder of a draft head")
    config = read_json(path / "config.json")
    if isinstance(inner := config.get("transformer_layer_config"), Mapping):
        config = {**inner, **config}  # speculators keep the layer's shape in a block of its own
    shapes, dtypes = _headers(path)
    return HeadFacts(
        path=path,
        config=config,
        shapes=None if shapes is None else {_classic_name(name): shape for name, shape in shapes.items()},
        dtypes=dtypes,
        token_by_id=read_vocabulary(path),
        template=None,
        d2t=_as_ids(_read_tensor(path, "d2t")),
        t2d=_as_flags(_read_tensor(path, "t2d")),
    )


def read_vocabulary(path: Path) -> dict[int, str] | None:
    """Tokens by id out of tokenizer.json, added ones included; None without one."""
    if not (path / "tokenizer.json").is_file():
        return None
    data = read_json(path / "tokenizer.json")
    model = data.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    tokens: dict[int, str] = {}
    if isinstance(vocab, Mapping):
        tokens = {int(number): str(token) for token, number in vocab.items()}
    elif isinstance(vocab, list):  # unigram: [token, score] in the order of the ids
        tokens = {number: str(entry[0]) for number, entry in enumerate(vocab) if entry}
    for entry in data.get("added_tokens") or ():
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int):
            tokens[entry["id"]] = str(entry.get("content"))
    return tokens


def read_template(path: Path) -> str | None:
    """The chat template of a model directory, None without one."""
    if (path / "chat_template.jinja").is_file():
        return (path / "chat_template.jinja").read_text(encoding="utf-8", errors="replace")
    file = path / "tokenizer_config.json"
    template = read_json(file).get("chat_template") if file.is_file() else None
    if isinstance(template, list):
        template = next((entry.get("template") for entry in template if isinstance(entry, Mapping)), None)
    return template if isinstance(template, str) else None


def _headers(path: Path) -> tuple[dict[str, tuple[int, ...]] | None, dict[str, str]]:
    """Shapes and dtypes by tensor of all safetensors files; None without any."""
    files = sorted(path.glob("*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    for file in files:
        _, header = _header(file)
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items()}
        dtypes |= {name: str(entry["dtype"]) for name, entry in header.items()}
    if files:
        return shapes, dtypes
    if (path / "pytorch_model.bin").is_file():
        tensors = _torch_tensors(path / "pytorch_model.bin")
        return (
            {name: tuple(tensor.shape) for name, tensor in tensors.items()},
            {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        )
    return None, {}


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """(where the data starts, entries by tensor) of a safetensors file."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if length + 8 > file.stat().st_size:
                raise CheckpointError(f"{file} is cut short or no safetensors file")
            header = json.loads(stream.read(length))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} is no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if length + 8 + end > file.stat().st_size:
        raise CheckpointError(
            f"{file} has {file.stat().st_size} bytes, its header implies {length + 8 + end}",
            hint="is the download complete?",
        )
    return length + 8, header


def _read_tensor(path: Path, name: str) -> NDArray[Any] | None:
    """One small tensor, by its name with or without `model.`; None where no file has it."""
    for file in sorted(path.glob("*.safetensors")):
        start, header = _header(file)
        entry = header.get(name) or header.get(f"model.{name}")
        if entry is None or entry["dtype"] not in _NUMPY:
            continue
        low, high = entry["data_offsets"]
        with file.open("rb") as stream:
            stream.seek(start + low)
            data = np.frombuffer(stream.read(high - low), dtype=_NUMPY[entry["dtype"]])
        return data.reshape(entry["shape"])
    if not list(path.glob("*.safetensors")) and (path / "pytorch_model.bin").is_file():
        tensor = _torch_tensors(path / "pytorch_model.bin").get(name)
        return None if tensor is None else np.asarray(tensor.cpu().numpy())
    return None


def _torch_tensors(file: Path) -> dict[str, Any]:
    import torch

    try:
        tensors: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and tensor defects have no common base
        raise CheckpointError(f"{file}: the weights cannot be read: {error}") from error
    return tensors


def _classic_name(name: str) -> str:
    name = name.removeprefix("model.")
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def _ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple) or not all(isinstance(item, int) for item in value):
        return None
    return tuple(value)


def _as_ids(values: NDArray[Any] | None) -> Ids | None:
    return None if values is None else values.astype(np.int64)


def _as_flags(values: NDArray[Any] | None) -> NDArray[np.bool_] | None:
    return None if values is None else values.astype(np.bool_)
