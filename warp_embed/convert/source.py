"""Where weights come from: one interface over a checkpoint and a container, in blocks of f32 rows."""
from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.config import ModelConfig

if TYPE_CHECKING:
    from warp_embed.convert.reclaim import Ledger

MATRICES = ("gate", "up", "down")
TRUNK = -1                      # the part of a model beside the layers' experts, which go by the layer's number


class Shard(NamedTuple):
    """One weight file of a checkpoint."""

    path: Path
    nbytes: int
    parts: frozenset[int]       # what needs it: TRUNK, numbers of layers
    gone: bool                  # deleted by an earlier run


class Expert(ABC):
    """One routed expert: gate and up [inter, width], down [width, inter]."""

    @abstractmethod
    def rows(self, matrix: int, row0: int, row1: int) -> np.ndarray:
        """Rows [row0, row1) of matrix 0, 1 or 2 as f32, all finite."""

    @abstractmethod
    def packed(self, matrix: int) -> tuple[np.ndarray, np.ndarray]:
        """The MXFP4 of a matrix as stored, [rows, bytes of codes] and [rows, scales], all of finite value; only where
        the source's `has_mxfp4` is true."""


class Source(ABC):
    """Weights by name. Reading is safe from several threads."""

    directory: Path
    config: dict[str, Any]              # as the manifest will hold it
    prefix: str                         # in front of every tensor name
    model: ModelConfig
    trunk: dict[str, tuple[int, ...]]   # shapes of everything but the routed experts
    warnings: list[str]                 # what the user should know about it
    fingerprint: str                    # changes when a file of the source is replaced
    has_mxfp4: bool                     # every expert is stored in MXFP4
    in_shards = False                   # of files that can be deleted one by one

    @abstractmethod
    def _rows(self, name: str, row0: int, row1: int) -> np.ndarray: ...

    @abstractmethod
    def expert(self, layer: int, expert: int) -> Expert: ...

    @abstractmethod
    def close(self) -> None: ...

    def rows(self, name: str, row0: int, row1: int) -> np.ndarray:
        """Rows [row0, row1) of a trunk tensor seen as [rows, last axis], as f32, all finite."""
        return finite(self._rows(name, row0, row1), name, row0)

    @abstractmethod
    def shards(self) -> list[Shard]:
        """The files that hold the weights."""

    def expert_shapes(self) -> list[tuple[int, int]]:
        width, inter = self.model.expert_width, self.model.moe_inter
        return [(inter, width), (inter, width), (width, inter)]

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def finite(block: np.ndarray, name: str, row0: int) -> np.ndarray:
    """The block itself; FormatError if a number in it is none."""
    # A sum is finite when all its terms are and it does not overflow: the cheap question first.
    with np.errstate(all="ignore"):
        if block.size == 0 or np.isfinite(block.sum()):
            return block
    bad = np.argwhere(~np.isfinite(block))
    if len(bad) == 0:
        return block
    row, column = bad[0]
    raise FormatError(f"tensor {name}: row {row0 + row}, column {column} is {block[row, column]}", field=name)


def rows_and_cols(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


Identity = tuple[str, int, int]     # name, bytes, time of the last change in ns


def identity_of(path: Path) -> Identity:
    stat = path.stat()
    return path.name, stat.st_size, stat.st_mtime_ns


def fingerprint_of(parts: Iterable[bytes], files: Iterable[Identity]) -> str:
    """Cheap identity of a source: the small documents' contents, the large files' names, sizes and times."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    for identity in files:
        digest.update(repr(identity).encode())
    return digest.hexdigest()


def open_source(path: Path, ledger: Ledger | None = None) -> Source:
    """A container if there is a manifest.json, else a checkpoint, of which `ledger` knows the deleted shards."""
    from warp_embed.convert.checkpoint import Checkpoint
    from warp_embed.convert.container import Container
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is not a directory; give the one that holds config.json or manifest.json")
    if (path / "manifest.json").exists():
        return Container(path)
    if (path / "config.json").exists():
        return Checkpoint(path, ledger)
    raise FileNotFoundError(f"{path} holds neither config.json (a checkpoint) nor manifest.json (a container)")


def is_kimi_k3(config: dict[str, Any]) -> bool:
    """Of a manifest's config: the text model calls itself Kimi-Linear in both releases, the wrapper does not."""
    outer = config.get("_outer")
    return isinstance(outer, dict) and outer.get("model_type") == "kimi_k3"


# A reader may take these flags by presence: `false` is written as absence.
PRESENCE_FLAGS = ("moe_renormalize", "latent_moe_use_norm", "mla_use_output_gate")
ALIASES = {"num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
           "num_shared_experts": "n_shared_experts"}


def text_model(raw: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """(config of the text model, prefix of its tensors): a multimodal release nests the one and prefixes the other."""
    if not isinstance(raw.get("text_config"), dict):
        return raw, ""
    outer = {key: value for key, value in raw.items() if key != "text_config"}
    return {**raw["text_config"], "_outer": outer}, "language_model."


def container_config(raw: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """The config a manifest carries: the release's, canonical keys added, flags that are false left out."""
    config = dict(raw)
    for canonical, alias in ALIASES.items():
        if canonical not in config and alias in config:
            config[canonical] = config[alias]
    if config.get("norm_topk_prob") and "moe_renormalize" not in config:
        config["moe_renormalize"] = True
    for flag in PRESENCE_FLAGS:
        if flag in config and not config[flag]:
            del config[flag]
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and "use_full_rank_gate" in linear and not linear["use_full_rank_gate"]:
        config["linear_attn_config"] = {k: v for k, v in linear.items() if k != "use_full_rank_gate"}
    eos = config.get("eos_token_id")
    if isinstance(eos, list) and eos:
        config["eos_token_id"] = eos[0]
        warnings.append(f"eos_token_id {eos} is a list; a container holds one, {eos[0]} was written")
    return config


def quantization_of(raw: dict[str, Any]) -> dict[str, Any]:
    """The quantization_config of a release, wherever it keeps it; empty without one."""
    for config in (raw, raw.get("text_config")):
        found = config.get("quantization_config") if isinstance(config, dict) else None
        if isinstance(found, dict):
            return found
    return {}


def is_mxfp4_release(raw: dict[str, Any]) -> bool:
    """Does the config say that the experts are packed as Kimi-K3's?"""
    quantization = quantization_of(raw)
    return (quantization.get("quant_method") == "compressed-tensors"
            and quantization.get("format") == "mxfp4-pack-quantized")


def refuse_unsupported(raw: dict[str, Any]) -> None:
    """UnsupportedModel for what is a well-formed release of another kind."""
    quantization = quantization_of(raw)
    method, kind = quantization.get("quant_method"), quantization.get("format")
    if method in (None, "fp8") or is_mxfp4_release(raw):
        return
    name = repr(method) if kind is None else f"{method!r}, format {kind!r}"
    raise UnsupportedModel(f"weights packed by {name} cannot be read; bf16, f16, f32, block-scaled fp8 and "
                           "mxfp4-pack-quantized experts can", field="quantization_config")
