"""Containers that WARP's own tools wrote, where they are at hand: they are for comparing against, not part of this
repository. The same numbers, computed by an independent reader and forward pass, are within 1e-4 of ours."""
from pathlib import Path

import numpy as np
import pytest

from warp_embed import Model

FOLDER = Path(__file__).parents[3] / "shared" / "oracles" / "warp-containers"


@pytest.mark.skipif(not FOLDER.is_dir(), reason="WARP's own containers are not beside this checkout")
@pytest.mark.parametrize("name", ["t", "kl"])
def test_logits_after_each_token(name):
    with np.load(FOLDER / f"{name}-golden.npz") as golden:
        arrays = dict(golden)
    ids = next(value for value in arrays.values() if value.dtype.kind in "iu").ravel()
    want = next(value for value in arrays.values() if value.ndim == 2 and value.dtype.kind == "f")
    with Model.open(FOLDER / name, kv="f32", context=64) as model, model.session() as session:
        assert np.abs(session.prefill(ids, all_logits=True) - want).max() < 1e-4
