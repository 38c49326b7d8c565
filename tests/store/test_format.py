"""The file: where things are, and that no header can do harm."""

import io
import json
import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import HEADER, LEVELS, written

from tide_lm.store.format import (
    BLOCK,
    HEADER_BYTES,
    MAGIC,
    PREFIX,
    Header,
    StoreError,
    read_header,
    read_section,
)


@pytest.mark.parametrize("sizes", [(50,), (1, 2, 47), (7,) * 7 + (1,), (20, 30)])
def test_rows_are_where_the_header_says(tmp_path, sizes):
    rows = written(tmp_path / "a", sizes=sizes)
    content = (tmp_path / "a").read_bytes()
    assert len(content) == HEADER.file_bytes
    for token, at in enumerate(HEADER.row_at(np.arange(50))):
        row = content[at : at + HEADER.row_bytes]
        assert row[:-4] == rows[token].tobytes()
        assert struct.unpack("<I", row[-4:]) == (zlib.crc32(row[:-4], token),)


def test_the_header_and_what_all_rows_share_come_back(tmp_path):
    written(tmp_path / "a")
    with (tmp_path / "a").open("rb") as file:
        header = read_header(file, HEADER.file_bytes)
        assert header == HEADER
        assert np.array_equal(read_section(file.fileno(), header.sections["levels"], "levels"), LEVELS)
    text = (tmp_path / "a").read_bytes()[PREFIX.size :].partition(b"\0")[0]
    assert json.loads(text)["stride"] == HEADER.stride


@pytest.mark.parametrize("hidden", [1, 8, 31, 64, 100, 512, 2048])
@pytest.mark.parametrize("blocks", [1, 3, 8, 24])
@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
def test_strides_are_of_whole_blocks_and_hold_little_else(hidden, blocks, bits):
    checksums = {"levels": 0, "columns": 0} if bits < 16 else {}
    header = replace(HEADER, hidden=hidden, blocks=blocks, bits=bits, checksums=checksums, vocab_size=5000)
    assert header.stride % BLOCK == header.rows_at % BLOCK == 0
    assert header.padding < 0.09
    ends = header.row_at(np.arange(5000))[1:]
    assert (ends - header.row_at(np.arange(4999)) >= header.row_bytes).all()


def test_the_papers_rows_are_as_large_as_is_said():
    """About 8 KiB for 8 blocks and 24 KiB for 24, at d 2048 and 4 bits."""
    large = [replace(HEADER, hidden=2048, blocks=blocks) for blocks in (8, 24)]
    assert [header.stride / 1024 for header in large] == [9, 26]
    assert [f"{header.padding:.1%}" for header in large] == ["5.5%", "1.9%"]


def test_too_few_rows_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="there were 49 rows to write, and not 50"):
        written(tmp_path / "a", sizes=(49,))
    with pytest.raises(FileExistsError):
        written(tmp_path / "a")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"blocks": 2**40}, "blocks is 1099511627776"),
        ({"bits": 5}, "bits is 5"),
        ({"group": 12}, "group is 12"),
        ({"ranks": (4, 4)}, "there are 2 ranks"),
        ({"ranks": (4, 4, 33)}, "a rank is 33"),
        ({"fingerprint": "abc"}, "fingerprint is 'abc'"),
        ({"checksums": {"levels": 0}}, r"sections are \['levels'\]"),
        ({"checksums": {"levels": 0, "columns": -1}}, "checksum of columns is -1"),
    ],
)
def test_bad_headers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(HEADER, **changes)


def test_every_bit_of_the_header_that_is_turned_is_found():
    good = HEADER.to_bytes()
    used = PREFIX.size + len(good[PREFIX.size :].partition(b"\0")[0])
    assert Header.from_bytes(good) == HEADER
    for bit in range(8 * used):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError):
            Header.from_bytes(bytes(bad))


@pytest.mark.parametrize("size", [0, 7, PREFIX.size, HEADER_BYTES - 1])
def test_a_header_that_is_cut_off_is_found(size):
    with pytest.raises(StoreError, match="cut off"):
        Header.from_bytes(HEADER.to_bytes()[:size])


@pytest.mark.parametrize("size", [HEADER_BYTES, HEADER.file_bytes - 1, HEADER.file_bytes + 1])
def test_a_file_of_another_size_is_found(size):
    with pytest.raises(StoreError, match=rf"it has {size:,} bytes, .* calls for {HEADER.file_bytes:,}"):
        read_header(io.BytesIO(HEADER.to_bytes()), size)


def with_text(text: bytes) -> bytes:
    """A header whose checksum fits."""
    return (PREFIX.pack(MAGIC, 1, len(text), zlib.crc32(text)) + text).ljust(HEADER_BYTES, b"\0")


@settings(max_examples=300)
@given(text=st.binary(max_size=400))
def test_no_bytes_crash_the_parser(text):
    for start in (text.ljust(HEADER_BYTES, b"\0"), MAGIC + text.ljust(HEADER_BYTES, b"\0"), with_text(text)):
        with pytest.raises(StoreError):
            Header.from_bytes(start[:HEADER_BYTES])


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300)
@given(data=st.data())
def test_no_value_in_the_header_crashes_the_parser_or_is_believed(data):
    """A header whose checksum fits, with one value changed, says what no writer says."""
    found = HEADER.to_dict()
    place = found
    while True:
        key = data.draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or data.draw(st.booleans()):
            break
        place = place[key]
    before = place[key]
    place[key] = data.draw(ANYTHING)
    text = json.dumps(found).encode()
    try:
        header = Header.from_bytes(with_text(text))
    except StoreError:
        return
    assert header.to_dict() == found
    assert place[key] == before or key in ("crc32", "fingerprint")


@pytest.mark.parametrize("text", [b"[" * 60000, b"null", b"[]", b"{}", b'{"sections": 3}', b"\xff"])
def test_other_texts_are_no_header(text):
    with pytest.raises(StoreError, match="is none of a store"):
        Header.from_bytes(with_text(text))


def test_a_newer_version_and_another_file_are_told_apart():
    start = bytearray(HEADER.to_bytes())
    start[8] = 2
    with pytest.raises(StoreError, match="version is 2, and 1 is known"):
        Header.from_bytes(bytes(start))
    with pytest.raises(StoreError, match="it begins with b'PK"):
        Header.from_bytes(b"PK\x03\x04".ljust(HEADER_BYTES, b"\0"))
