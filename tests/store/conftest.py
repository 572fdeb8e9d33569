import copy
import dataclasses
import itertools

import pytest
from reference import container

from warp_embed._experts import ExpertStore
from warp_embed.runtime.manifest import Manifest

# name: arguments of container.build
KINDS = {
    "vq3r": {"experts": "VQ3R"},
    "vq2r": {"experts": "VQ2R", "trunk": "q3"},
    "vq4p": {"experts": "VQ4P", "trunk": "q8"},
    "vq3r-40-entries": {"experts": "VQ3R", "entries": 40},
    "vq-5-stages-vec-4": {"experts": "VQ3R", "stages": 5, "vec_dim": 4, "trunk": "f32"},
    "q8g": {"experts": "Q8G", "trunk": "bf16"},
    "q4g": {"experts": "Q4G", "group": 32},
    "mxfp4": {"experts": "MXFP4", "group": 32},
    "bf16": {"experts": "BF16", "trunk": "f32"},
    "f32": {"experts": "F32"},
    "k3": {"config": container.K3, "experts": "VQ3R", "prefix": "language_model."},
}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """built(kind): a container on disk and its values; made once, not to be written to."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = container.build(tmp_path_factory.mktemp(kind), **KINDS[kind])
        return made[kind]
    return get


@pytest.fixture(params=KINDS)
def any_built(built, request):
    return built(request.param)


@pytest.fixture
def copy_of(built, tmp_path):
    """copy_of(kind): a container that may be damaged."""
    number = itertools.count()

    def get(kind):
        original = built(kind)
        path = tmp_path / f"{kind}-{next(number)}"
        path.mkdir()
        for file in original.path.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        return dataclasses.replace(original, path=path, manifest=copy.deepcopy(original.manifest))
    return get


@pytest.fixture
def open_store():
    """open_store(built, slots): an ExpertStore, closed at the end of the test."""
    opened = []

    def get(b, slots=4, **options):
        m = Manifest.read(b.path)
        banks = {layer: (m.path(bank.file), bank.n_experts, bank.codebook_base) for layer, bank in m.banks.items()}
        opened.append(ExpertStore(m.experts.layout(m.config), m.config.n_layers, banks, m.read_books(), slots,
                                  **options))
        return opened[-1]
    yield get
    for store in opened:
        store.close()
