"""Small containers made once, and the golden numbers that belong to them."""
from pathlib import Path

import numpy as np
import pytest

from warp_embed import Model
from warp_embed.convert import convert

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Path of kl-tiny as a container with bf16 experts."""
    path = tmp_path_factory.mktemp("tiny") / "tiny.waste"
    convert(DATA / "kl-tiny", path, trunk="f32", experts="bf16")
    return path


@pytest.fixture(scope="session")
def arrays():
    with np.load(DATA / "kl-tiny" / "golden.npz") as golden:
        return dict(golden)


@pytest.fixture(scope="session")
def prompt(arrays):
    return arrays["input_ids"]


@pytest.fixture
def model(tiny):
    with Model.open(tiny, context=160, threads=2) as model:
        yield model
