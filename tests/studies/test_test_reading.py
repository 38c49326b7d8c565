"""Reading the test split: how books are cut, and whose loss each token's is."""

import hashlib
import json
import lzma
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from studies import test_reading, test_split
from studies.optimum import Tuned
from studies.optimum_commands import app
from studies.test_reading import Piece, of_documents, pieces
from tide_lm.evaluation.perplexity import Windows, document_encoder, perplexity

PROSE = "It was a dark night. " * 12


def test_books_are_cut_at_their_headings():
    headings = "CHAPTER I ", "Chapter 12. The End", "PART II", "ACT ONE", "III", "4. Of Old Toys", "Book 3"
    chapters = [f"{heading}\n\n{PROSE}\n\n" for heading in headings]
    assert (
        pieces("book-a/b", "".join(["A Book\n\nby Nobody\n\n", *chapters]))
        == [
            "A Book\n\nby Nobody\n\n" + chapters[0],  # too short for a piece of its own
            *chapters[1:],
        ]
    )


def test_what_only_looks_like_a_heading_does_not_cut():
    for line in ("I saw it.", "Chapter and verse", "civil", "ACT I was long, said he, and then " + PROSE):
        text = f"{PROSE}\n\n{line}\n\n{PROSE}\n\nII\n\n{PROSE}"
        assert len(pieces("book-a/b", text)) == 2


def test_a_book_without_headings_is_cut_at_blank_lines():
    text = "\n\n".join([PROSE] * 200)
    found = pieces("book-a/b", text)
    assert "".join(found) == text
    assert all(piece.endswith("\n\n") for piece in found[:-1])
    assert all(20_000 <= len(piece) < 20_000 + len(PROSE) + 3 for piece in found[:-1])


def test_an_article_stays_whole():
    text = f"{PROSE}\n\nII\n\n{PROSE}"
    assert pieces("enwiki-1", text) == [text]


class Counting(torch.nn.Module):
    """The loss of a target is its id, so that all sums are known; it notes the longest context."""

    longest = 0

    def forward(self, inputs_BT, targets_BT):
        self.longest = max(self.longest, inputs_BT.shape[1])
        return SimpleNamespace(per_token_N=targets_BT.flatten().float())


def test_each_token_counts_once_and_in_its_own_piece(tokenizer):
    documents = [
        {"id": "enwiki-1", "text": "A short article, with an é."},
        {"id": "book-a/b", "text": f"I\n\n{PROSE}\n\nII\n\n{PROSE * 3}"},
        {"id": "enwiki-2", "text": PROSE},
    ]
    objective = Counting()
    found = of_documents(objective, tokenizer, torch.device("cpu"), documents, Windows(16, 8, 3))
    texts = [(d["id"], piece) for d in documents for piece in pieces(d["id"], d["text"])]
    assert len(texts) == 4
    expected = []
    for id, text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        expected.append(Piece(id, float(sum(ids)), len(ids), len(text.encode())))
    assert found == expected
    assert [piece.is_chapter for piece in found] == [False, True, True, False]
    assert objective.longest == 16


def test_a_model_reads_the_split_as_the_study_reads_other_texts(tokenizer, tiny_config, tmp_path):
    from tide_lm.model import TideForCausalLM

    torch.manual_seed(0)
    model = TideForCausalLM(tiny_config(vocab_size=len(tokenizer))).eval()

    def objective(inputs, targets):
        logits = model(inputs).logits.flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="none")
        return SimpleNamespace(per_token_N=losses)

    windows = Windows(32, 16, 4)
    document = {"id": "enwiki-1", "text": PROSE}
    (piece,) = of_documents(objective, tokenizer, model.device, [document], windows)
    (tmp_path / "text.jsonl").write_text(json.dumps(document))
    other = perplexity(model, tokenizer, tmp_path / "text.jsonl", windows)
    assert (piece.tokens, piece.bytes) == (other["tokens"], other["bytes"])
    assert piece.nats / piece.tokens == pytest.approx(other["loss"], rel=1e-5)


def test_a_document_begins_with_bos(tokenizer):
    encoder = document_encoder(tokenizer)
    (first, second) = test_reading._tokens(encoder, ["one\n", "two"])
    assert first[0] == tokenizer.bos_token_id
    assert np.array_equal(second, encoder(["two"])[0])


def test_the_split_is_written_in_the_order_of_its_list(tmp_path, monkeypatch):
    (tmp_path / "more").mkdir()
    texts = [f"text {number}" for number in range(3)]
    lines = "\n".join(json.dumps({"id": f"id {text}", "text": text}) for text in texts)
    (tmp_path / "more" / "wiki_train.jsonl.xz").write_bytes(lzma.compress(lines.encode()))
    listed = tmp_path / "listed.json"
    monkeypatch.setattr(test_split, "LISTED", listed)

    def listing(*texts):
        rows = [{"id": t, "sha256": hashlib.sha256(t.encode()).hexdigest()} for t in texts]
        listed.write_text(json.dumps({"documents": rows}))

    listing("text 2", "text 0")
    test_reading.write(test_split.documents(tmp_path), tmp_path)
    written = (tmp_path / test_reading.TEXT).read_text().splitlines()
    assert [json.loads(line)["text"] for line in written] == ["text 2", "text 0"]
    listing("text 2", "another")
    with pytest.raises(ValueError, match="lacks 1 documents of the test split, such as 'another'"):
        test_split.documents(tmp_path)


def test_a_run_reads_the_split_once(tmp_path):
    run = Tuned.named("base, 0.004, test")
    record = {"name": "base", "size": "6m", "batch": run.batch, "seed": 0, "warmup": 0.1, "peak_rate": 0.004}
    record |= {"tokens": 1, "tokens_per_parameter": 20.0, "val_loss": 4.0, "test": []}
    record["config"] = {"optim": {"beta2": 0.95}}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=r"'base, 0\.004, test' has read the test split"):
        app(["run", run.name, "--records", str(tmp_path / "records.jsonl")], standalone_mode=False)
