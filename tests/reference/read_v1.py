"""Reader of containers of format version 1, numpy only, written from docs/format.md. Clarity over speed."""
import json
import os
import struct
import zlib

import numpy as np
from reference import check_reader
from reference.check_config import BadContainer, Config, integer, mapping, need
from reference.check_reader import Bank

ENCODINGS = {"F32": 0, "BF16": 1, "Q8G": 2, "Q4G": 3, "MXFP4": 9}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
HEADER = struct.Struct("<4sHHBBHHHIIIIIIII")


class Container(check_reader.Container):
    """The trunk is version 0's; records hold whole matrices in F32, BF16, Q8G, Q4G or MXFP4."""

    def __init__(self, directory):
        self.directory = directory
        with open(os.path.join(directory, "manifest.json"), encoding="utf-8") as file:
            self.manifest = json.load(file)
        need(self.manifest.get("format_version") == 1, "not version 1")
        self.config = cfg = Config.parse(self.manifest)
        quant = mapping(self.manifest, "expert_quant")
        need(quant.get("fmt") in ENCODINGS, f"fmt {quant.get('fmt')!r}")
        self.encoding, self.group = ENCODINGS[quant["fmt"]], integer(quant, "group", 128)
        need(self.encoding != 9 or self.group == 32, "MXFP4 has groups of 32")
        self._open_trunk(self.manifest.get("trunk"))
        self._require_tensors()
        self.shapes = {"gate": (cfg.moe_inter, cfg.expert_width), "up": (cfg.moe_inter, cfg.expert_width),
                       "down": (cfg.expert_width, cfg.moe_inter)}
        self._lay_out()
        self.banks = {}
        for layer in range(cfg.layers):
            if cfg.is_moe(layer):
                meta = self.manifest["layers"][str(layer)]
                path = os.path.join(directory, meta["file"])
                need(meta["experts"] == cfg.experts and meta["bytes"] == cfg.experts * self.record_bytes
                     == os.path.getsize(path) and meta["codebook_base"] == 0, f"bank of layer {layer}")
                self.banks[layer] = Bank(path, cfg.experts, self.record_bytes, 0)

    def _lay_out(self):
        """Offsets of payloads and scales in a record."""
        self.payload, self.scales, position = {}, {}, 64
        for kind, (rows, cols) in self.shapes.items():
            groups = -(-cols // self.group)
            padded = groups * self.group
            stride = {0: 4 * cols, 1: 2 * cols, 2: padded, 3: padded // 2, 9: padded // 2}[self.encoding]
            self.payload[kind] = (position, rows * stride)
            position = -(-(position + rows * stride) // 64) * 64
        self.first_scales = position
        for kind, (rows, cols) in self.shapes.items():
            n = rows * -(-cols // self.group) if self.encoding >= 2 else 0
            self.scales[kind] = (position, n)
            position += n if self.encoding == 9 else 2 * n
        self.end = position
        self.record_bytes = -(-position // 4096) * 4096

    def record(self, layer, expert, check_crc=True):
        with open(self.banks[layer].path, "rb") as file:
            file.seek(expert * self.record_bytes)
            data = file.read(self.record_bytes)
        offsets = [self.payload[kind][0] for kind in self.shapes]
        want = HEADER.pack(b"WEXP", layer, expert, self.encoding, 0, 0, 0, 0, self.record_bytes // 4096, *offsets,
                           self.first_scales, zlib.crc32(data[48:self.end]), 0, 0)
        if data[:48] != want:
            raise BadContainer(f"layer {layer} expert {expert}: header or checksum")
        need(not any(data[48:64]) and not any(data[self.end:]), "padding")
        return want, data

    def expert(self, layer, expert, check_crc=True):
        _, data = self.record(layer, expert)
        return {kind: self._matrix(kind, data) for kind in self.shapes}

    def _matrix(self, kind, data):
        rows, cols = self.shapes[kind]
        start, size = self.payload[kind]
        payload = data[start:start + size]
        if self.encoding == 0:
            return np.frombuffer(payload, "<f4").reshape(rows, cols)
        if self.encoding == 1:
            return (np.frombuffer(payload, "<u2").astype(np.uint32) << 16).view(np.float32).reshape(rows, cols)
        groups = -(-cols // self.group)
        at, n = self.scales[kind]
        if self.encoding == 9:
            return mxfp4_values(np.frombuffer(payload, np.uint8).reshape(rows, -1),
                                np.frombuffer(data, np.uint8, n, at).reshape(rows, groups))[:, :cols]
        if self.encoding == 2:
            codes = np.frombuffer(payload, np.int8).reshape(rows, -1)
        else:
            packed = np.frombuffer(payload, np.uint8).reshape(rows, -1)
            codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(rows, -1).astype(np.int8) - np.int8(8)
        scales = np.frombuffer(data, "<f2", n, at).astype(np.float32).reshape(rows, groups, 1)
        return (codes.astype(np.float32).reshape(rows, groups, self.group) * scales).reshape(rows, -1)[:, :cols]


def mxfp4_values(codes, scales):
    """float32 [rows, 32 groups] of codes [rows, 16 groups] and scales [rows, groups], both uint8."""
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    values = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7]).reshape(*scales.shape, 32)
    return (values * np.exp2(scales.astype(np.float64) - 127)[..., None]).reshape(len(codes), -1).astype(np.float32)


def read(directory):
    """The container in a directory, of either version."""
    with open(os.path.join(directory, "manifest.json"), encoding="utf-8") as file:
        version = json.load(file).get("format_version")
    return (Container if version == 1 else check_reader.Container)(str(directory))
