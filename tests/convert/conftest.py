import pytest

from warp_embed.convert import codebooks


@pytest.fixture
def quick_fit(monkeypatch):
    """Codebooks that are poor and fast."""
    monkeypatch.setattr(codebooks, "ITERATIONS", 1)
    monkeypatch.setattr(codebooks, "SAMPLE_VECTORS", 1200)
