"""Which kernels run, and who may choose."""
import os
import subprocess
import sys

import pytest

from warp_embed import _kernels


def test_the_best_level_is_in_use_and_others_can_be_forced():
    before = _kernels.active()
    assert _kernels.levels()[0] == "reference"
    for name in _kernels.levels():
        _kernels.force(name)
        assert _kernels.active() == name
    _kernels.force(None)
    assert _kernels.active() == _kernels.levels()[-1]
    _kernels.force(before)


def test_an_unknown_level_is_refused_and_changes_nothing():
    before = _kernels.active()
    with pytest.raises(ValueError, match="'mmx'.*reference"):
        _kernels.force("mmx")
    assert _kernels.active() == before


@pytest.mark.parametrize("name, expected", [("reference", "reference"), ("", None), ("mmx", "WARP_EMBED_ISA: ")])
def test_the_environment_chooses_at_import(name, expected):
    code = "from warp_embed import _kernels; print(_kernels.active())"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "WARP_EMBED_ISA": name},
                          capture_output=True, text=True)
    assert (expected or _kernels.levels()[-1]) in done.stdout + done.stderr
    assert (done.returncode == 0) == (name != "mmx")
