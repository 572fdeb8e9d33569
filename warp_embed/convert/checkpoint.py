"""A released checkpoint as a source: config.json and safetensors, in shards with an index or in one file."""
from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from warp_embed.convert import mxfp4
from warp_embed.convert.reclaim import Ledger
from warp_embed.convert.safetensors import FLOATS, SafetensorsFile
from warp_embed.convert.source import (
    MATRICES,
    TRUNK,
    Expert,
    Identity,
    Shard,
    Source,
    container_config,
    fingerprint_of,
    identity_of,
    quantization_of,
    refuse_unsupported,
    text_model,
)
from warp_embed.errors import FormatError, UnsupportedModel
from warp_embed.runtime.config import ModelConfig, TensorSpec
from warp_embed.runtime.fields import load_object
from warp_embed.runtime.manifest import MXFP4_GROUP

EXPERT_NAMES = ("w1", "w3", "w2")       # gate, up, down
INDEX = "model.safetensors.index.json"
# Tensors of some releases that carry no weights: tables a reader computes itself.
HARMLESS = re.compile(r"(^|\.)(rotary_emb\.inv_freq|rotary_emb\.(cos|sin)_cached|masked_bias|attn\.bias)$")
RENAMED = re.compile(r"\.mlp\.experts\.|\.forget_gate\.|self_attn\.conv1d\.|\.mlp\.gate\.weight$")
EXPERT_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.block_sparse_moe\.experts\.")
JSON_CAP = 100_000_000
SHOWN = 3                               # names in a message


class Checkpoint(Source):
    in_shards = True

    def __init__(self, directory: Path, ledger: Ledger | None = None) -> None:
        self.directory = directory
        self._ledger = ledger or Ledger()
        self.warnings: list[str] = []
        raw, self._config_bytes = load_object(str(directory / "config.json"), JSON_CAP)
        refuse_unsupported(raw)
        text, self.prefix = text_model(raw)
        self.config = container_config(text, self.warnings)
        self.model = ModelConfig.parse(raw, str(directory / "config.json"))
        self._block = self._fp8_block(raw)
        self._files: dict[str, SafetensorsFile] = {}
        self._home: dict[str, SafetensorsFile] = {}
        try:
            self._open_shards()
            self.trunk = {}
            self._check_names()
            self._check_scales()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    # -- files ------------------------------------------------------------

    def _open_shards(self) -> None:
        index_path = self.directory / INDEX
        documents = [self._config_bytes]
        weight_map: dict[str, str] | None = None
        if index_path.exists():
            index, blob = load_object(str(index_path), JSON_CAP)
            documents.append(blob)
            weight_map = self._weight_map(index)
            names = sorted(set(weight_map.values()))
        else:
            names = sorted({p.name for p in self.directory.glob("*.safetensors")} | self._ledger.deleted)
            if "model.safetensors" in names:
                names = ["model.safetensors"]
            if len(names) != 1:
                raise FormatError(f"{self.directory}: {len(names)} .safetensors files and no {INDEX}",
                                  file=str(index_path))
        for name in names:
            self._files[name] = file = self._open_shard(name)
            for tensor in file.tensors:
                if tensor in self._home:
                    raise FormatError(f"tensor {tensor} is in {name} and in {self._home[tensor].path.name}",
                                      field=tensor, file=str(file.path))
                if weight_map is not None and weight_map.get(tensor) != name:
                    raise FormatError(f"tensor {tensor} is in {name}, which {INDEX} does not say", field=tensor,
                                      file=str(file.path))
                self._home[tensor] = file
        for tensor, name in (weight_map or {}).items():
            if tensor not in self._home:
                raise FormatError(f"tensor {tensor} is not in {name}, where {INDEX} has it", field=tensor,
                                  file=str(self.directory / name))
        self.fingerprint = fingerprint_of(documents, map(self._identity, self._files.values()))

    def _open_shard(self, name: str) -> SafetensorsFile:
        path = self.directory / name
        if name not in self._ledger.deleted or path.exists():
            return SafetensorsFile(path)
        entry, copy = self._ledger.entries[name], self._ledger.header_path(name)
        file = SafetensorsFile(path, copy, entry.nbytes)
        if not entry.describes(file.size, file.header()):
            file.close()
            raise FormatError(f"{copy} is not the header of the deleted {name}; download that file once more",
                              file=str(copy))
        return file

    def _identity(self, file: SafetensorsFile) -> Identity:
        """A shard that was deleted, or is back after that, is the one it was."""
        entry = self._ledger.entries.get(file.path.name)
        if entry is not None and (file.gone or entry.describes(file.size, file.header())):
            return file.path.name, entry.nbytes, entry.mtime_ns
        return identity_of(file.path)

    def shards(self) -> list[Shard]:
        def parts(file: SafetensorsFile) -> frozenset[int]:
            return frozenset(part for part in map(self._part, file.tensors) if part is not None)

        return [Shard(file.path, file.size, parts(file), file.gone) for file in self._files.values()]

    def header(self, name: str) -> bytes:
        """What is in front of a shard's tensors."""
        return self._files[name].header()

    def _part(self, name: str) -> int | None:
        """What needs a tensor: the experts of a layer, the trunk, or nothing."""
        found = EXPERT_LAYER.match(name.removeprefix(self.prefix))
        if found:
            return int(found[1])
        return TRUNK if name.startswith(self.prefix) else None

    def release(self, path: Path) -> None:
        """Close a shard for good: while it is open, deleting it frees nothing."""
        self._files[path.name].close()

    def _weight_map(self, index: dict[str, Any]) -> dict[str, str]:
        weight_map = index.get("weight_map")
        where = str(self.directory / INDEX)
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"{INDEX} has no weight_map", file=where, field="weight_map")
        for tensor, name in weight_map.items():
            if not isinstance(name, str) or not name.endswith(".safetensors") or re.search(r"[/\\:\0]", name):
                raise FormatError(f"{INDEX}: {tensor} is in {name!r}, which is no file name of a shard", file=where,
                                  field=tensor)
        missing = sorted({name for name in weight_map.values()
                          if not (self.directory / name).is_file() and name not in self._ledger.deleted})
        if missing:
            raise FileNotFoundError(f"{self.directory} lacks {len(missing)} shards of {INDEX}, "
                                    f"first {missing[0]}; finish the download")
        return weight_map

    # -- names and shapes ---------------------------------------------------

    def _expert_tensors(self) -> Iterator[tuple[str, tuple[int, int]]]:
        shapes = self.expert_shapes()
        for layer in self.model.moe_layers:
            for expert in range(self.model.n_experts):
                for m, shape in enumerate(shapes):
                    yield self._expert_name(layer, expert, m), shape

    def _expert_name(self, layer: int, expert: int, matrix: int) -> str:
        return f"{self.prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}.{EXPERT_NAMES[matrix]}.weight"

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._home[name].tensors[name].shape

    def _check_names(self) -> None:
        """Every tensor the model needs is there in its shape, and nothing else is."""
        known: set[str] = set()
        packed: set[str] = set()
        missing: list[str] = []
        for spec in self.model.tensors(self.prefix):
            if spec.name in self._home:
                known.add(spec.name)
                self._check_trunk_shape(spec)
                self.trunk[spec.name] = self._shape(spec.name)
            elif spec.required:
                missing.append(spec.name)
        # An absurd number of experts is found out at its first missing ones, before it costs anything.
        for name, shape in self._expert_tensors():
            if name in self._home:
                known.add(name)
                if self._shape(name) != shape:
                    raise self._misshaped(name, f"not {list(shape)}")
            elif name + "_packed" in self._home and name + "_scale" in self._home:
                self._check_packed(name, *shape)
                packed |= {name + "_packed", name + "_scale"}
            else:
                missing.append(name if name + "_packed" not in self._home else name + "_scale")
                if len(missing) > SHOWN:
                    break
        self.has_mxfp4 = bool(packed) and not any(name in known for name, _ in self._expert_tensors())
        scales = {name + "_scale_inv" for name in known if self._dtype(name) == "F8_E4M3"}
        extra = [n for n in self._home if n not in known and n not in packed and n not in scales
                 and not HARMLESS.search(n)]
        outside = [name for name in extra if not name.startswith(self.prefix)]
        self._refuse_names(missing, [name for name in extra if name.startswith(self.prefix)])
        if outside:
            parts = ", ".join(sorted({name.partition(".")[0] for name in outside})[:SHOWN])
            self.warnings.append(f"{len(outside)} tensors that the text model does not use ({parts}) are left out")
        for name in known:
            if self._dtype(name) not in (*FLOATS, "F8_E4M3"):
                raise UnsupportedModel(f"tensor {name} is {self._dtype(name)}; weights may be {', '.join(FLOATS)} "
                                       "or block-scaled F8_E4M3", field=name)

    def _check_packed(self, name: str, rows: int, cols: int) -> None:
        """The two tensors of a matrix in MXFP4: their shapes and types."""
        for part, width, dtypes in (("_packed", 2, ("U8",)), ("_scale", MXFP4_GROUP, mxfp4.SCALE_DTYPES)):
            want = (rows, cols // width)
            if cols % MXFP4_GROUP or self._shape(name + part) != want:
                raise self._misshaped(name + part, f"not {list(want)} of {rows} rows in groups of {MXFP4_GROUP}")
            if self._dtype(name + part) not in dtypes:
                raise UnsupportedModel(f"tensor {name}{part} is {self._dtype(name + part)}, not {' or '.join(dtypes)}",
                                       field=name + part)

    def _dtype(self, name: str) -> str:
        return self._home[name].tensors[name].dtype

    def _refuse_names(self, missing: list[str], extra: list[str]) -> None:
        if not missing and not extra:
            return
        hint = ""
        if any(RENAMED.search(name) for name in extra):
            hint = ("; the names look like transformers' own: the release's are expected "
                    "(block_sparse_moe.experts.0.w1.weight and so on)")
        what = [f"{label} {', '.join(names[:SHOWN])}" + (" and more" if len(names) > SHOWN else "")
                for label, names in (("lacks", missing), ("has unknown", sorted(extra))) if names]
        raise FormatError(f"the checkpoint {' and '.join(what)}{hint}", field=(missing + extra)[0],
                          file=str(self.directory))

    def _misshaped(self, name: str, why: str) -> FormatError:
        return FormatError(f"tensor {name} has shape {list(self._shape(name))}, {why}", field=name,
                           file=str(self._home[name].path))

    def _check_trunk_shape(self, spec: TensorSpec) -> None:
        shape = self._shape(spec.name)
        if not 1 <= len(shape) <= 4 or not spec.fits(shape, math.prod(shape)):
            want = list(spec.shape) if spec.shape else f"of {spec.min_elements} elements"
            raise self._misshaped(spec.name, f"not {want}")
        if spec.name.endswith("_conv1d.weight") and shape[-1] != self.model.conv:
            raise self._misshaped(spec.name, f"not [{spec.min_elements // self.model.conv}, 1, {self.model.conv}]")

    # -- fp8 ------------------------------------------------------------------

    @staticmethod
    def _fp8_block(raw: dict[str, Any]) -> tuple[int, int] | None:
        block = quantization_of(raw).get("weight_block_size")
        if block is None:
            return None
        sizes = block if isinstance(block, list) else []
        if len(sizes) != 2 or not all(type(size) is int and 1 <= size < 1 << 26 for size in sizes):
            raise FormatError(f"weight_block_size {block!r} is not two sizes",
                              field="quantization_config.weight_block_size")
        return sizes[0], sizes[1]

    def _check_scales(self) -> None:
        for name in self._home:
            if self._dtype(name) != "F8_E4M3":
                continue
            if self._block is None:
                raise FormatError(f"tensor {name} is fp8 and config.json has no weight_block_size", field=name)
            scale_name, shape = name + "_scale_inv", self._shape(name)
            if scale_name not in self._home:
                raise FormatError(f"tensor {name} is fp8 and {scale_name} is missing", field=scale_name)
            want = tuple(-(-d // b) for d, b in zip(shape, self._block, strict=False))
            if len(shape) != 2 or self._shape(scale_name) != want or self._dtype(scale_name) != "F32":
                raise self._misshaped(scale_name, f"not {list(want)} of F32")

    # -- reading ----------------------------------------------------------------

    def _rows(self, name: str, row0: int, row1: int) -> np.ndarray:
        block = self._home[name].read_rows(name, row0, row1)
        if self._dtype(name) == "F8_E4M3" and self._block is not None and row1 > row0:
            (high, wide), scale_name = self._block, name + "_scale_inv"
            first = row0 // high
            scales = self._home[scale_name].read_rows(scale_name, first, -(-row1 // high))
            by_row = scales[np.arange(row0, row1) // high - first]
            with np.errstate(all="ignore"):         # what is not finite is named by the caller
                block *= np.repeat(by_row, wide, axis=1)[:, :block.shape[1]]
        return block

    def read_packed(self, name: str, row0: int, row1: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Codes and scales of rows of an expert's matrix, as stored; None if it is not in MXFP4."""
        if name in self._home:
            return None
        codes, scales = (self._home[name + part].read_raw(name + part, row0, row1) for part in ("_packed", "_scale"))
        return codes, scales

    def expert(self, layer: int, expert: int) -> Expert:
        return _CheckpointExpert(self, layer, expert)


class _CheckpointExpert(Expert):
    def __init__(self, source: Checkpoint, layer: int, expert: int) -> None:
        self._source, self._layer, self._expert = source, layer, expert
        self._names = [source._expert_name(layer, expert, m) for m in range(3)]

    def _packed(self, matrix: int, row0: int, row1: int) -> tuple[np.ndarray, np.ndarray] | None:
        found = self._source.read_packed(self._names[matrix], row0, row1)
        if found is not None:
            mxfp4.check_values(*found, self._layer, self._expert, MATRICES[matrix], row0)
        return found

    def rows(self, matrix: int, row0: int, row1: int) -> np.ndarray:
        found = self._packed(matrix, row0, row1)
        return self._source.rows(self._names[matrix], row0, row1) if found is None else mxfp4.decode(*found)

    def packed(self, matrix: int) -> tuple[np.ndarray, np.ndarray]:
        found = self._packed(matrix, 0, self._source.expert_shapes()[matrix][0])
        assert found is not None
        return found
