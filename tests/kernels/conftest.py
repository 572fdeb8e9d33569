import pytest

from warp_embed import _kernels


@pytest.fixture(params=["reference", "avx2"])
def level(request):
    """Each kernel level in turn; the one in use before comes back afterwards."""
    before = _kernels.active()
    try:
        _kernels.force(request.param)
    except ValueError as error:
        pytest.skip(str(error))
    yield request.param
    _kernels.force(before)
