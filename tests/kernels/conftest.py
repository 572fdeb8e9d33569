import pytest

from warp_embed import _kernels


@pytest.fixture(params=_kernels.levels())
def level(request):
    """Each kernel level of this machine in turn; the one in use before comes back afterwards."""
    before = _kernels.active()
    _kernels.force(request.param)
    yield request.param
    _kernels.force(before)
