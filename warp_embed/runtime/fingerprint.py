"""What tells one model's weights from another's, without reading them all."""
from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from warp_embed._store import File
from warp_embed.runtime.config import ModelConfig

if TYPE_CHECKING:
    from warp_embed._store import Trunk
    from warp_embed.runtime.manifest import Manifest

RECORD_HEADER_BYTES = 48


def fingerprint(manifest: Manifest, trunk: Trunk) -> str:
    """A digest of the manifest, of the small tensors, and of the first record header of every layer, which holds a
    CRC: other weights of the same shape differ in them. And of the experts per token, where they are not the release's:
    the same tokens have another state then."""
    digest = hashlib.sha256(manifest.fingerprint.encode())
    if manifest.config != ModelConfig.parse(manifest.raw_config):
        digest.update(b"experts_per_token %d" % manifest.config.top_k)
    small = [entry.name for entry in manifest.text_entries() if entry.rows == 1]
    for name in sorted(small):
        digest.update(trunk.decode(name).tobytes())
    header = bytearray(RECORD_HEADER_BYTES)
    for layer in sorted(manifest.banks):
        with File(os.path.join(str(manifest.directory), manifest.banks[layer].file)) as bank:
            bank.read_into(header, 0)
        digest.update(header)
    return digest.hexdigest()
