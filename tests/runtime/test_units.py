import pytest

from warp_embed.units import format_bytes, parse_bytes


@pytest.mark.parametrize("text, expected", [
    ("24GB", 24 * 10**9), ("24GiB", 24 * 2**30), ("24 gb", 24 * 10**9), (" 1.5KiB ", 1536), ("0B", 0), ("7 B", 7),
    ("0.1MB", 100_000), ("2TB", 2 * 10**12), ("1TiB", 2**40), (0, 0), (12345, 12345),
])
def test_sizes_that_are_accepted(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "24", "24G", "-1GB", "1e9B", "GB", "24 GBs", "24PB", "1,5GB", "nan", "auto",
                                  "٣GB", "1" * 500 + "GB", -1])
def test_other_sizes_are_refused_with_what_is_accepted(text):
    with pytest.raises(ValueError, match='"24GB".*"24GiB"'):
        parse_bytes(text)


@pytest.mark.parametrize("value", [1.5, None, True, b"24GB", [1]])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError, match='"24GB"'):
        parse_bytes(value)


def test_numpy_integers_are_integers():
    import numpy as np
    assert type(parse_bytes(np.int64(5))) is int


@pytest.mark.parametrize("size, text", [
    (0, "0 B"), (999, "999 B"), (1000, "1.00 KB"), (9994, "9.99 KB"), (9996, "10.0 KB"), (99_960, "100 KB"),
    (999_499, "999 KB"), (999_500, "1.00 MB"), (24 * 10**9, "24.0 GB"), (10**15, "1000 TB"),
])
def test_sizes_are_shown_with_three_digits(size, text):
    assert format_bytes(size) == text


def test_what_is_shown_can_be_read():
    for size in (1, 999, 1234, 10**6 - 1, 29_190_000_000, 2**44):
        assert abs(parse_bytes(format_bytes(size)) - size) <= 0.005 * size
