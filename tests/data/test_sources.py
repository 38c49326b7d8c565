"""Documents of every format and compression, and what is said of files that are not what they seem."""

import gzip
import importlib
import json
import lzma
import re

import pyarrow
import pyarrow.parquet
import pytest

from tide_lm.data import sources
from tide_lm.run.optional import install

TEXTS = ["One line.\nAnother, after\u2028a separator.", "", "Zwei Wörter\r\n", "三"]


def zstd(data: bytes) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACK = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}


def jsonl(texts: list[str], field: str = "text") -> bytes:
    lines = [json.dumps({field: text, "id": i}, ensure_ascii=False) for i, text in enumerate(texts)]
    return "\n".join(lines).encode() + b"\n"


def documents_of(source, **options) -> list[sources.Document]:
    return [document for part in sources.parts(str(source), **options) for document in part.documents()]


def texts_of(source, **options) -> list[str]:
    return [text for _, text in documents_of(source, **options)]


@pytest.mark.parametrize("packing", PACK)
def test_a_txt_file_is_one_document(tmp_path, packing):
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACK[packing](TEXTS[0].encode()))
    assert documents_of(path) == [(str(path), TEXTS[0])]


@pytest.mark.parametrize("packing", PACK)
def test_a_jsonl_file_is_a_document_a_line(tmp_path, packing):
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACK[packing](jsonl(TEXTS) + b"\n" + jsonl(["last"])[:-1]))
    found = documents_of(path)
    assert [text for _, text in found] == [*TEXTS, "last"]
    assert [name for name, _ in found][-2:] == [f"{path}:4", f"{path}:6"]


def test_a_parquet_file_is_a_document_a_row(tmp_path):
    path = tmp_path / "a.parquet"
    many = [f"{text} {i}" for i in range(200) for text in TEXTS]
    pyarrow.parquet.write_table(pyarrow.table({"body": many, "id": range(len(many))}), path)
    found = documents_of(path, text_field="body")
    assert [text for _, text in found] == many
    assert found[-1][0] == f"{path}:{len(many)}"


def test_another_field_may_hold_the_text(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(TEXTS, "body"))
    assert texts_of(tmp_path, text_field="body") == TEXTS


def test_folders_and_globs_are_read_in_order_of_their_names(tmp_path):
    for name in ("b.txt", "a/z.txt", "a/y.txt", "c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(jsonl([name]) if name.endswith("l") else name.encode())
    (tmp_path / "notes.md").write_text("not a text to train on")
    assert texts_of(tmp_path) == ["a/y.txt", "a/z.txt", "b.txt", "c.jsonl"]
    assert texts_of(tmp_path / "**" / "*.txt") == ["a/y.txt", "a/z.txt", "b.txt"]


def test_a_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfword")
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl(["word"]))
    assert texts_of(tmp_path) == ["word", "word"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"one\ntwo\xff\n", "a.txt:2 is not UTF-8 .*iconv"),
        ("a.jsonl", jsonl(["one"]) + b'{"text": "\xe4"}\n', "a.jsonl:2 is not UTF-8"),
        ("a.jsonl", jsonl(["one"]) + b'{"text": "cut', r"a.jsonl:2 is not JSON .*remove the line"),
        (
            "a.jsonl",
            jsonl(["one"], "body"),
            "a.jsonl:1 has no field 'text', only 'body', 'id': .*--text-field",
        ),
        ("a.jsonl", b'["one"]\n', "a.jsonl:1 has no field 'text', nor any other"),
        ("a.jsonl", b'{"text": null}\n', "a.jsonl:1 has None in its field 'text', which is no text"),
        ("a.txt.gz", b"no gzip", "a.txt.gz is damaged or cut short"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "a.txt.gz is damaged or cut short"),
        ("a.jsonl.xz", lzma.compress(jsonl(TEXTS * 99))[:-40], "a.jsonl.xz is damaged or cut short"),
        ("a.jsonl.xz", b"no xz", "a.jsonl.xz is damaged or cut short"),
        (
            "a.jsonl.zst",
            zstd(jsonl([str(i) for i in range(9999)]))[:9000],
            "a.jsonl.zst is damaged or cut short",
        ),
        ("a.txt.zst", b"no zstd", "a.txt.zst is damaged or cut short"),
        ("a.parquet", b"PAR1 but no more", "a.parquet is damaged or cut short"),
    ],
)
def test_a_bad_file_is_named_with_its_cure(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        texts_of(tmp_path)


def test_a_parquet_file_without_the_field_says_which_it_has(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="has no field 'text', only 'body', 'n'"):
        texts_of(tmp_path)
    with pytest.raises(ValueError, match=r"a.parquet:1 has 1 in its field 'n'"):
        texts_of(tmp_path, text_field="n")


@pytest.mark.parametrize("source", ["nothing/here", "*.txt", ".", "a.csv"])
def test_a_source_without_text_names_the_ways_to_give_one(tmp_path, monkeypatch, source):
    (tmp_path / "a.csv").write_text("a,b")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"there is no (text in )?'.*hf:DATASET"):
        texts_of(source)


@pytest.mark.parametrize(
    ("source", "package"), [("hf:some/data", "datasets"), ("a.parquet", "pyarrow"), ("a.txt.zst", "pyarrow")]
)
def test_a_missing_package_is_named_with_its_install_command(tmp_path, monkeypatch, source, package):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    (tmp_path / source.removeprefix("hf:").replace("/", "-")).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ValueError, match=rf"needs the package {package} .*{re.escape(install('data'))}"):
        texts_of(source)


@pytest.mark.parametrize("config", ["", ":default"])
def test_a_dataset_is_streamed_by_its_name(tmp_path, monkeypatch, config):
    pytest.importorskip("datasets", reason="the extra `data` is not installed")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.jsonl").write_bytes(jsonl(TEXTS))
    monkeypatch.chdir(tmp_path)
    assert texts_of(f"hf:mine{config}") == TEXTS
    with pytest.raises(ValueError, match=rf"hf:mine{config}:1 has no field 'body', only 'text', 'id'"):
        texts_of(f"hf:mine{config}", text_field="body")


def test_a_broken_link_and_a_dataset_without_a_name_are_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match=r"b\.txt is a link to a file that does not exist"):
        documents_of(tmp_path)
    with pytest.raises(ValueError, match="names no dataset"):
        documents_of("hf:")
    with pytest.raises(ValueError, match="the source is empty: name a file"):
        sources.parts("")
    with pytest.raises(ValueError, match=r"there is no '.*nowhere'"):
        documents_of(tmp_path / "nowhere")
