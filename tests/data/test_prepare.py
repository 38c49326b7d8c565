"""Text to token shards: the same whatever the batches, whole or not at all, in flat memory."""

import hashlib
import importlib.util
import json
import lzma
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from disk import files_of_at_most
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tide_lm.data import encoding, prepare, sources, tokenizers
from tide_lm.data.shards import Manifest, TokenSplit
from tide_lm.data.split import ENOUGH
from tide_lm.run import files

WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext" / "wikitext2_raw_test.txt.xz"
WORDS = ["every", "layer", "knows", "the", "token", "beneath", "the", "context", "and", "adds", "it"]


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Three hundred documents of all lengths."""
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, draw.integers(1, 300))) + f". {i}\n" for i in range(300)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def sha256(*data: bytes) -> bytes:
    return hashlib.sha256(b"".join(data)).digest()


def texts_of(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text().split("\n")[:-1]]


def decoded(folder: Path, split: str) -> list[str]:
    """The split's documents as text again, found by their BOS."""
    data = TokenSplit(folder, split)
    data.verify()
    tokens = data.read(0, len(data))
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    starts = np.flatnonzero(tokens == data.manifest.bos_token_id)
    assert starts[0] == 0
    return [tokenizer.decode(part[1:]) for part in np.split(tokens, starts[1:])]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_prepared_is_the_text(corpus, tmp_path):
    out = tmp_path / "made" / "here"
    manifest = prepare.prepare(
        prepare.Settings(str(corpus), train_tokenizer=300, validation=0.1, shard_tokens=5000), out
    )
    train, validation = decoded(out, "train"), decoded(out, "validation")
    texts = texts_of(corpus)
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text not in set(validation)]
    assert 10 < len(validation) < 60
    assert len(manifest.splits["train"]) > 2
    assert manifest == Manifest.read(out)
    assert manifest.source["documents"] == {"train": len(train), "validation": len(validation)}
    assert manifest.source["sha256"] == sha256(sha256(*(sha256(text.encode()) for text in texts))).hex()
    assert manifest.source["bytes"] == len("".join(texts).encode())
    saved = AutoTokenizer.from_pretrained(out / "tokenizer")
    assert manifest.tokenizer_sha256 == tokenizers.fingerprint(saved)
    split = TokenSplit(out)
    counts = np.load(out / "counts.npy")
    assert np.array_equal(counts, np.bincount(split.read(0, len(split)), minlength=manifest.vocab_size))
    assert (counts.dtype, counts[0]) == (np.int64, len(train))


def test_batches_of_any_size_give_the_same_files(corpus, tmp_path, monkeypatch):
    made = []
    for size in (1, 10_000, 2**20):
        monkeypatch.setattr(encoding, "BATCH_CHARACTERS", size)
        settings = prepare.Settings(str(corpus), train_tokenizer=300, validation=0.1)
        prepare.prepare(settings, tmp_path / str(size))
        made.append(files_of(tmp_path / str(size)))
    assert made[0] == made[1] == made[2]


def test_the_split_does_not_depend_on_the_order(corpus, tmp_path):
    prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300, validation=0.1), tmp_path / "a")
    corpus.write_text("".join(sorted(corpus.read_text().splitlines(keepends=True), reverse=True)))
    prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300, validation=0.1), tmp_path / "b")
    assert sorted(decoded(tmp_path / "a", "validation")) == sorted(decoded(tmp_path / "b", "validation"))


def test_a_tokenizer_without_bos_ends_documents_with_eos(tokenizer, tmp_path):
    with_eos = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>")
    with_eos.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text('{"text": "the"}\n{"text": ""}\n{"text": "token"}\n')
    prepare.prepare(
        prepare.Settings(str(tmp_path / "a.jsonl"), tokenizer=str(tmp_path / "tokenizer"), validation=0),
        tmp_path / "out",
    )
    split = TokenSplit(tmp_path / "out")
    assert with_eos.decode(split.read(0, len(split))) == "the<eos>token<eos>"
    assert split.manifest.source["documents"] == {"train": 2, "validation": 0}
    assert len(TokenSplit(tmp_path / "out", "validation")) == 0


def test_a_text_cannot_spell_a_special_token(tokenizer):
    (ids,) = encoding.Encoder(tokenizer.backend_tokenizer.to_str(), "uint16")(["<bos>the<eos>"])
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(ids) == "<bos>the<eos>"


def test_a_long_document_is_encoded_in_pieces_to_the_same_tokens(tokenizer, monkeypatch):
    monkeypatch.setattr(sources, "LONG_TEXT", 100)
    draw = np.random.default_rng(1)
    words = draw.choice(WORDS, 3000)
    seams = [" ", "\n", "\n\n", " \n ", "\n  ", "\t\n", ".\r\n", "\n "]
    text = "".join(word + seam for word, seam in zip(words, draw.choice(seams, 3000), strict=True))
    encoder = encoding.Encoder(tokenizer.backend_tokenizer.to_str(), "uint16")
    pieces = list(encoder.pieces(sources.lines(text), "train"))
    assert {piece.split for piece in pieces} == {"train"}
    assert len(pieces) > 50
    assert [piece.begins for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "".join(piece.text for piece in pieces) == text
    joined = np.concatenate(encoder([piece.text for piece in pieces]))
    assert np.array_equal(joined, encoder([text])[0])


def test_a_tokenizer_that_marks_the_start_of_a_text_gets_whole_documents(monkeypatch):
    monkeypatch.setattr(sources, "LONG_TEXT", 10)
    backend = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2, "?": 3}, unk_token="?"))
    backend.normalizer = normalizers.Prepend("▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder = encoding.Encoder(backend.to_str(), "uint16")
    assert len(list(encoder.pieces(sources.lines("one\ntwo\n three\n" * 9)))) == 1


STORY = "".join(f"Line {i}: every layer knows the token beneath the context.\n" for i in range(4000))


@pytest.mark.parametrize(
    ("name", "text", "validation"),
    [
        ("a.txt", STORY, 0.005),
        ("a.txt", STORY[:5000], 0.005),
        ("a.txt", STORY.replace("\n", ""), 0.005),
        ("a.txt", STORY, 0.5),
        ("a.txt", "125 " + STORY, 0.005),  # whose key is below the share
        ("many.jsonl", "".join(json.dumps({"text": STORY[i : i + 50]}) + "\n" for i in range(1069)), 0.005),
        ("same.jsonl", (json.dumps({"text": STORY[:900]}) + "\n") * 90, 0.005),
        ("few.jsonl", "".join(json.dumps({"text": STORY[i:]}) + "\n" for i in range(5)), 0.005),
        ("small.jsonl", "".join(json.dumps({"text": STORY[i : i + 50]}) + "\n" for i in range(56)), 0.06),
    ],
)
def test_enough_is_held_out_of_any_text(tmp_path, name, text, validation):
    (tmp_path / name).write_text(text)
    settings = prepare.Settings(str(tmp_path / name), train_tokenizer=300, validation=validation)
    manifest = prepare.prepare(settings, tmp_path / "out")
    train, held_out = manifest.tokens("train"), manifest.tokens("validation")
    share = max(validation, min(0.09, 2 * ENOUGH / len(text)))
    assert share * 0.9 < held_out / (train + held_out) < share * 1.5
    pieces = decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "validation")
    assert sum(map(len, pieces)) == len(text if name == "a.txt" else "".join(texts_of(tmp_path / name)))
    if name == "a.txt":
        assert "".join(pieces) == text
    assert manifest.source["split"]


def test_a_share_that_holds_out_enough_decides_alone(corpus, tmp_path):
    settings = prepare.Settings(str(corpus), train_tokenizer=300, validation=0.1)
    manifest = prepare.prepare(settings, tmp_path / "out")
    assert "split" not in manifest.source
    below = [text for text in texts_of(corpus) if int.from_bytes(sha256(text.encode())[-4:]) < 0.1 * 2**32]
    assert decoded(tmp_path / "out", "validation") == below


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("", {}, r"the source '.*corpus.jsonl' has 0 tokens .*, and at least 257 .*: give more text$"),
        ('{"text": ""}\n', {"validation": 0}, "has 0 tokens .*, and at least 1 "),
        (
            '{"text": "a"}\n',
            {},
            "has 0 tokens to train on and 2 to validate on, .* 257 and 33 are .*, or lower --val",
        ),
        (json.dumps({"text": STORY[:5000]}), {"validation": 0.9}, "at least 257 and 33 are needed"),
        ('{"text": "\\ud800"}\n', {}, r"corpus.jsonl:1 has '\\ud800', half of a surrogate pair"),
        ('{"text": "a"}\n{"text": "b\n', {}, "corpus.jsonl:2 is not JSON"),
        ('{"text": "a"}\n', {"validation": 1.0}, "is 1.0: .* below 1"),
        ('{"text": "a"}\n', {"train_tokenizer": 10}, "vocab_size is 10: .* at least 258 tokens"),
        ('{"text": "a"}\n', {"tokenizer": "no-such"}, "the tokenizer 'no-such' cannot be loaded"),
    ],
)
def test_bad_input_leaves_nothing(tmp_path, lines, options, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(lines)
    with pytest.raises(ValueError, match=message):
        prepare.prepare(prepare.Settings(str(path), **options), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [path]


def test_an_existing_folder_is_used_only_if_empty(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300), out)
    before = files_of(out)
    with pytest.raises(ValueError, match="exists and is not an empty folder: remove it"):
        prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300), out)
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        prepare.prepare(prepare.Settings(str(corpus)), corpus)
    assert files_of(out) == before


def test_what_a_killed_preparer_left_is_removed(corpus, tmp_path):
    (tmp_path / ".out.tmp").mkdir()
    (tmp_path / ".out.tmp" / "train-00000.bin").write_bytes(b"half a shard")
    (tmp_path / ".out.lock").touch()
    prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300), tmp_path / "out")
    assert "train-00000.bin" in files_of(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "out"}


def test_two_preparers_of_one_folder_are_kept_apart(corpus, tmp_path):
    (tmp_path / ".out.tmp").mkdir()
    with (
        files.claimed(tmp_path / "out", "prepared"),
        pytest.raises(ValueError, match="is being prepared by another process: wait for it"),
    ):
        prepare.prepare(prepare.Settings(str(corpus)), tmp_path / "out")
    assert (tmp_path / ".out.tmp").exists()
    prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300), tmp_path / "out")


def test_an_empty_part_changes_nothing_but_the_parts_of_a_text_count(corpus, tmp_path):
    lines = corpus.read_text().splitlines(keepends=True)
    corpus.unlink()

    def sha256_of(*files: str) -> str:
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for number, text in enumerate(files):
            (folder / f"{number}.jsonl").write_text(text)
        return prepare.prepare(prepare.Settings(str(folder), train_tokenizer=300), folder / "out").source[
            "sha256"
        ]

    whole, first, second = "".join(lines), "".join(lines[:100]), "".join(lines[100:])
    assert sha256_of(whole) == sha256_of("", whole, '{"text": ""}\n')
    assert sha256_of(first, second) == sha256_of(first, "", second)
    assert sha256_of(whole) != sha256_of(first, second)


def test_an_error_while_a_batch_is_encoded_is_raised_here(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(encoding.Encoder, "tokens", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300), tmp_path / "out")
    assert list(tmp_path.iterdir()) == [corpus]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_corpus(tmp_path, tokenizer):
    """Compare 50 MB with 20 MB, which fill all queues; benchmarks/prepare.py measures to 500 MB."""
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = """
import re, sys
from tide_lm.data.prepare import Settings, prepare
prepare(Settings(sys.argv[1], tokenizer=sys.argv[3], shard_tokens=4_000_000), sys.argv[2])
print(*re.findall(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read()))
"""
    line = json.dumps({"text": " ".join(WORDS * 100)}) + "\n"
    peaks = []
    for megabytes in (20, 50):
        path = tmp_path / f"{megabytes}.jsonl"
        path.write_text(line * (megabytes * 10**6 // len(line)))
        command = [sys.executable, "-c", code, path, tmp_path / str(megabytes), tmp_path / "tokenizer"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout) / 1e3)
    assert peaks[1] - peaks[0] < 20, peaks


def test_a_full_disk_leaves_nothing_and_says_where(corpus, tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    told = rf"cannot write {re.escape(str(tmp_path / 'out'))}: File too large"
    with files_of_at_most(40_000), pytest.raises(OSError, match=told):
        prepare.prepare(
            prepare.Settings(str(corpus), tokenizer=str(tmp_path / "tokenizer")), tmp_path / "out"
        )
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, "tokenizer"}


@pytest.mark.skipif(not WIKITEXT.exists(), reason="the shared data are not here")
def test_a_real_corpus_is_read_whole(tmp_path):
    with lzma.open(WIKITEXT, "rt", encoding="utf-8", newline="") as file:
        text = file.read()
    manifest = prepare.prepare(
        prepare.Settings(str(WIKITEXT), train_tokenizer=500, validation=0), tmp_path / "out"
    )
    assert decoded(tmp_path / "out", "train") == [text]
    assert manifest.source["bytes"] == len(text.encode())


@pytest.mark.skipif(not WIKITEXT.exists(), reason="the shared data are not here")
@pytest.mark.skipif(not importlib.util.find_spec("llama_models"), reason="llama-models is not installed")
def test_wikitext_in_llama3_tokens(tmp_path):
    manifest = prepare.prepare(
        prepare.Settings(str(WIKITEXT), tokenizer="llama3", validation=0), tmp_path / "out"
    )
    assert manifest.tokens("train") == 289_076 + 1  # and its BOS
    assert (manifest.dtype, manifest.vocab_size) == ("uint32", 128_256)


def test_the_tokenizer_learns_from_no_text_that_is_held_out(corpus, tmp_path, monkeypatch):
    read, train = [], prepare.tokenizers.train

    def noting(texts, size):
        read.extend(texts)
        return train(read, size)

    monkeypatch.setattr(prepare.tokenizers, "train", noting)
    prepare.prepare(prepare.Settings(str(corpus), train_tokenizer=300, validation=0.3), tmp_path / "out")
    assert read == decoded(tmp_path / "out", "train")
    assert decoded(tmp_path / "out", "validation")
