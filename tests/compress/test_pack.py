"""Packed models: the same rows from wherever they are, and clear words when they cannot be had."""

import copy
import errno
import hashlib
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tide_lm.compress.pack import STORE, fingerprint, pack, verify
from tide_lm.model import TideForCausalLM
from tide_lm.spec.form import Form
from tide_lm.store import reader
from tide_lm.store.format import StoreError

PLACES = ["device", "cpu", "store"]


@pytest.fixture
def packed(tiny_model, tmp_path):
    """A model and the folder that it is packed into."""
    model = tiny_model(memory_values=True)
    pack(model, tmp_path / "packed", Form(4))
    return model, tmp_path / "packed"


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


@pytest.mark.parametrize("form", [Form(16), Form(8), Form(4), Form(3), Form(2), Form(8, rank=0.5)])
def test_rows_are_the_same_bit_for_bit_wherever_they_are(tiny_model, token_ids, tmp_path, form, monkeypatch):
    monkeypatch.setattr("tide_lm.model.stored._ROWS_PER_READ", 16)  # so that rows are read in several parts
    pack(tiny_model(memory_values=True), tmp_path / "packed", form)
    models = [TideForCausalLM.from_pretrained(tmp_path / "packed", memory=place) for place in PLACES]
    rows = [model.model.memory(token_ids)[0] for model in models]
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])
    found = [logits(model, token_ids) for model in models]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_sixteen_bits_are_the_rows_of_a_model_in_bfloat16(tiny_model, token_ids, tmp_path, monkeypatch):
    monkeypatch.setattr("tide_lm.store.rows._ROWS_PER_PIECE", 4)
    model = tiny_model()
    pack(model, tmp_path / "packed", Form(16))
    rows = (
        TideForCausalLM.from_pretrained(tmp_path / "packed")
        .model.memory(token_ids, torch.float32)
        .of_positions()
    )
    assert torch.equal(rows, model.model.memory(token_ids).rows_UJD.bfloat16().float())


@pytest.mark.parametrize("place", [None, *PLACES])
def test_a_packed_model_is_near_its_own_and_generates(packed, token_ids, place):
    model, folder = packed
    small = AutoModelForCausalLM.from_pretrained(folder, memory=place)
    assert torch.allclose(logits(small, token_ids), logits(model, token_ids), atol=0.2)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 2}
    cached = small.generate(token_ids, **options)
    assert torch.equal(cached, small.generate(token_ids, use_cache=False, **options))
    assert torch.equal(cached, small.generate(token_ids, stopping_criteria=[], **options))


def test_generation_reads_each_new_token_once(packed, token_ids):
    model = TideForCausalLM.from_pretrained(packed[1], memory="store", memory_cache_bytes=0)
    asked, rows = [], model.model.memory.rows
    fetch = rows.fetch
    rows.fetch = lambda tokens, into: (asked.append(tokens.tolist()), fetch(tokens, into))
    found = model.generate(token_ids[:1], max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=2)
    assert asked[1:] == [[token] for token in found[0, -4:-1].tolist()]
    assert rows.counters.misses == len(token_ids[0].unique()) + 3


def test_the_cache_is_as_large_as_is_asked_for(packed, token_ids):
    row = 48 + 3 + 4
    model = TideForCausalLM.from_pretrained(packed[1], memory="store", memory_cache_bytes=20 * row)
    everything = torch.arange(53)[None]
    for _ in range(2):
        logits(model, everything)
    counters = model.model.memory.counters
    assert (counters.hits, counters.misses, counters.bytes) == (20, 86, 86 * row)


def test_no_table_is_made_on_the_way(packed):
    model = TideForCausalLM.from_pretrained(packed[1], memory="store")
    assert not any("memory" in name and "memory_" not in name for name in model.state_dict())
    assert not list(model.model.memory.buffers())
    device = TideForCausalLM.from_pretrained(packed[1], memory="device")
    assert [buffer.dtype for buffer in device.model.memory.buffers()] == [torch.uint8]
    assert model.num_parameters(exclude_embeddings=True) < model.num_parameters()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rows_follow_the_precision_of_the_model(packed, token_ids, dtype):
    models = [TideForCausalLM.from_pretrained(packed[1], memory=place, dtype=dtype) for place in PLACES]
    found = [logits(model, token_ids) for model in models]
    assert {each.dtype for each in found} == {dtype}
    assert all(torch.equal(each, found[0]) for each in found)
    turned = TideForCausalLM.from_pretrained(packed[1]).to(dtype)
    assert torch.equal(turned.model.memory(token_ids)[0], models[0].model.memory(token_ids)[0])
    assert torch.allclose(logits(turned, token_ids), found[0], atol=0.02)


def test_a_packed_model_that_is_saved_opens_again(packed, token_ids, tmp_path):
    _, folder = packed
    model = TideForCausalLM.from_pretrained(folder, memory="store")
    model.save_pretrained(tmp_path / "again")
    again = TideForCausalLM.from_pretrained(tmp_path / "again", memory="store")
    assert torch.equal(logits(again, token_ids), logits(model, token_ids))
    model.save_pretrained(folder)  # onto itself
    assert verify(TideForCausalLM.from_pretrained(folder, memory="store")).header.vocab_size == 53


@pytest.mark.parametrize("place", PLACES)
def test_a_copy_of_a_packed_model_is_a_model(packed, token_ids, place, monkeypatch, tmp_path):
    monkeypatch.chdir(packed[1].parent)
    model = TideForCausalLM.from_pretrained(packed[1].name, memory=place)
    monkeypatch.chdir("/")
    expected = logits(model, token_ids)
    sent = pickle.dumps(model.model.memory)
    assert torch.equal(pickle.loads(sent)(token_ids)[0], model.model.memory(token_ids)[0])
    assert torch.equal(logits(copy.deepcopy(model), token_ids), expected)
    model.save_pretrained(tmp_path / "again")
    (packed[1] / STORE).unlink()
    assert torch.equal(logits(copy.deepcopy(model), token_ids), expected)
    with pytest.raises(StoreError, match=r"replaced or removed.*open the model again"):
        pickle.dumps(model.model.memory)


@pytest.mark.parametrize("place", ["cpu", "store"])
def test_a_token_beyond_the_vocabulary_is_no_damaged_row(packed, place):
    model = TideForCausalLM.from_pretrained(packed[1], memory=place)
    for token in (-1, 53):
        with pytest.raises(ValueError, match=f"token id {token} .* 53"):
            model.model.memory(torch.tensor([[3, token]]))


def test_the_store_is_among_what_is_pushed_to_the_hub(packed):
    """Files that are as old as before the weights were written are not uploaded with them."""
    model = TideForCausalLM.from_pretrained(packed[1], memory="store")
    assert STORE not in model._get_files_timestamps(packed[1])
    assert "model.safetensors" in model._get_files_timestamps(packed[1])


def test_other_processes_write_no_store(packed, tmp_path):
    model = TideForCausalLM.from_pretrained(packed[1], memory="store")
    model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out" / STORE).exists()


def test_beams_read_no_row_twice_in_a_step(packed, token_ids):
    model = TideForCausalLM.from_pretrained(packed[1], memory="store", memory_cache_bytes=0)
    rows, steps = model.model.memory.rows, [[]]
    read, fetch = rows.file.read, rows.fetch

    def noted(tokens):
        steps[-1] += tokens.tolist()
        return read(tokens)

    def one_step(tokens, into):
        fetch(tokens, into)
        assert set(steps[-1]) >= set(tokens.tolist())
        steps.append([])

    rows.file.read, rows.fetch = noted, one_step
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 2, "num_beams": 3}
    found = model.generate(token_ids, **options)
    in_memory = TideForCausalLM.from_pretrained(packed[1], memory="device")
    assert torch.equal(found, in_memory.generate(token_ids, **options))
    assert len(steps) > 5
    assert all(len(set(step)) == len(step) for step in steps)


@pytest.mark.parametrize("place", PLACES)
def test_rows_of_padding_drafts_and_static_caches_are_those_in_memory(packed, token_ids, place):
    """All ways of `generate` give what they give with the whole table on the device, decoded beforehand."""
    model = TideForCausalLM.from_pretrained(packed[1], memory=place)
    resident = TideForCausalLM.from_pretrained(packed[1])
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 2}
    padded = torch.cat([torch.full((len(token_ids), 3), 2), token_ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 3).long().expand_as(padded)
    plain = resident.generate(token_ids, **options)
    assert torch.equal(model.generate(token_ids, **options), plain)
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 3:], plain)
    assert torch.equal(model.generate(token_ids, cache_implementation="static", **options), plain)
    drafted = model.generate(token_ids[:1], assistant_model=resident, **options)
    assert torch.equal(drafted, plain[:1])


def test_a_store_that_was_replaced_is_not_saved_as_what_was_opened(packed, tmp_path):
    _, folder = packed
    model = TideForCausalLM.from_pretrained(folder, memory="store")
    other = tmp_path / "other"
    other.write_bytes((folder / STORE).read_bytes())
    other.rename(folder / STORE)
    with pytest.raises(StoreError, match=r"replaced or removed.*open the model again"):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / STORE).exists()


def test_rows_of_weights_that_are_offloaded_stay_in_the_hosts_memory(packed, token_ids, tmp_path):
    pytest.importorskip("accelerate")
    whole = TideForCausalLM.from_pretrained(packed[1])
    apart = TideForCausalLM.from_pretrained(
        packed[1], device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    assert apart.model.memory.bytes_VR is None
    assert torch.equal(logits(apart, token_ids), logits(whole, token_ids))


def test_a_base_model_has_no_rows_to_be_anywhere(tiny_model, tmp_path):
    tiny_model(num_memory_blocks=0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is a base model.*leave that out"):
        TideForCausalLM.from_pretrained(tmp_path, memory="store")


def test_a_folder_that_is_there_is_left_as_it_is(tiny_model, tmp_path):
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(ValueError, match=r"not an empty folder.*remove it"):
        pack(tiny_model(), tmp_path, Form(4))
    assert (tmp_path / "thesis.txt").read_text() == "all of it"


def test_the_folder_holds_what_is_left_of_the_weights(packed):
    model, folder = packed
    config = json.loads((folder / "config.json").read_text())
    header = reader.StoreFile(folder / STORE).header.checksum
    assert config["memory_store"] == {"file": STORE, "fingerprint": fingerprint(model), "header": header}
    assert not any(name.startswith("model.memory.") for name in load_file(folder / "model.safetensors"))
    assert model.config.memory_store is None
    assert sorted(path.name for path in folder.parent.iterdir()) == ["packed"]


def test_what_a_packed_model_cannot_do_is_said(packed, token_ids):
    model = TideForCausalLM.from_pretrained(packed[1], memory="store")
    with pytest.raises(ValueError, match=r"cannot be trained.*model\.eval"):
        model.train()(token_ids)
    with pytest.raises(ValueError, match=r"is packed.*take the model"):
        model.resize_token_embeddings(60)
    with pytest.raises(ValueError, match=r"is packed.*take the model"):
        pack(model, packed[1].with_name("twice"), Form(4))
    with pytest.raises(ValueError, match="from_pretrained"):
        TideForCausalLM(model.config).eval()(token_ids)
    with pytest.raises(ValueError, match=r"'disk'.*device, cpu, store"):
        TideForCausalLM.from_pretrained(packed[1], memory="disk")


@pytest.mark.parametrize("place", ["cpu", "store"])
def test_a_model_that_is_not_packed_is_not_read_from_a_store(tiny_model, tmp_path, place):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"'{place}'.* is not packed: pack it"):
        TideForCausalLM.from_pretrained(tmp_path, memory=place)
    with pytest.raises(ValueError, match="has no tables to pack"):
        pack(tiny_model(num_memory_blocks=0), tmp_path / "base", Form(4))


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ({"file": "../x", "fingerprint": "a"}, "beside config.json"),
        ({"file": "/etc/passwd", "fingerprint": "a"}, "beside config.json"),
        ({"file": "a\\b", "fingerprint": "a"}, "beside config.json"),
        ({"file": ".hidden", "fingerprint": "a"}, "beside config.json"),
        ({"file": 3, "fingerprint": "a"}, "a file and a fingerprint"),
        ({"file": "x"}, "a file and a fingerprint"),
    ],
)
def test_a_config_cannot_name_any_file(packed, store, message):
    path = packed[1] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"memory_store": store}))
    with pytest.raises(StrictDataclassError, match=message):
        TideForCausalLM.from_pretrained(packed[1])


def test_a_store_that_is_missing_or_of_another_model_is_refused(packed, tiny_model, tmp_path):
    model, folder = packed
    others = {
        "vocab_size is 60": tiny_model(vocab_size=60, memory_values=True),
        "blocks is 2": tiny_model(num_memory_blocks=2, memory_values=True),
        "fingerprint is": tiny_model(intermediate_size=40, memory_values=True),
        f"fingerprint is {fingerprint(model)[:32]}": tiny_model(memory_values=True),  # but for its tables
    }
    with torch.no_grad():
        list(others.values())[-1].model.memory.weight[7] += 1
    for number, (message, other) in enumerate(others.items()):
        pack(other, tmp_path / str(number), Form(4))
        shutil.copy(tmp_path / str(number) / STORE, folder / STORE)
        with pytest.raises(StoreError, match=f"another model.*{message}"):
            TideForCausalLM.from_pretrained(folder, memory="store")
    (folder / STORE).unlink()
    with pytest.raises(StoreError, match=f"{STORE} is not there.*copy it again"):
        TideForCausalLM.from_pretrained(folder, memory="store")


def test_weights_that_have_changed_since_are_found_by_verify(packed):
    _, folder = packed
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StoreError, match="changed after"):
        verify(TideForCausalLM.from_pretrained(folder, memory="store"))


@pytest.mark.parametrize("token", [0, 16, 31, 52])
def test_verify_reads_every_row(packed, monkeypatch, token):
    monkeypatch.setattr("tide_lm.compress.pack._ROWS_AT_ONCE", 16)
    _, folder = packed
    model = TideForCausalLM.from_pretrained(folder, memory="store")
    content = bytearray((folder / STORE).read_bytes())
    content[int(model.model.memory.file.header.row_at(np.array([token]))[0])] ^= 1
    (folder / STORE).write_bytes(content)
    with pytest.raises(StoreError, match=rf"row {token} is damaged"):
        verify(TideForCausalLM.from_pretrained(folder, memory="store"))
    for place in ("device", "cpu"):
        with pytest.raises(StoreError, match=rf"row {token} is damaged"):
            TideForCausalLM.from_pretrained(folder, memory=place)


@pytest.mark.parametrize("short", [True, False], ids=["short", "failing"])
def test_a_read_that_fails_during_generation_is_an_error_and_no_wrong_token(
    packed, token_ids, monkeypatch, short
):
    model = TideForCausalLM.from_pretrained(packed[1], memory="store", memory_cache_bytes=0)
    read, calls = os.preadv, iter(range(10**6))

    def fail_later(descriptor, buffers, at):
        if next(calls) < 2:
            return read(descriptor, buffers, at)
        if short:
            return read(descriptor, [memoryview(buffers[0])[:100]], at)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reader.os, "preadv", fail_later)
    with pytest.raises(StoreError, match=r"row \d+ (is damaged or cut off|cannot be read)"):
        model.generate(token_ids[:1], max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=2)


FULL = """
import sys, torch
from pathlib import Path
from tide_lm.spec.form import Form
from tide_lm.compress.pack import pack
from tide_lm.model import TideForCausalLM
pack(TideForCausalLM.from_pretrained(sys.argv[1]), Path(sys.argv[2]), Form(16))
"""


@pytest.mark.parametrize(
    ("limit", "layers"),
    [  # the last is full at the weights
        *(pytest.param(limit, 2, marks=pytest.mark.slow) for limit in (40_000, 70_000)),
        (100_000, 24),
    ],
)
def test_a_disk_that_is_full_leaves_nothing_under_the_name(tiny_model, tmp_path, limit, layers):
    tiny_model(num_hidden_layers=layers).save_pretrained(tmp_path / "model")
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path / "model", tmp_path / "packed"],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 1
    assert re.search(r"OSError: .*File too large", done.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("bits", [16, 8, 4, 3, 2])
@pytest.mark.parametrize("rank", [{}, {"rank": 0.4}, {"rank": 0.4, "blocks": "joint"}])
def test_the_reader_in_the_docs_reads_the_same_rows(tiny_model, tmp_path, bits, rank):
    page = (Path(__file__).parents[2] / "docs" / "store-format.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict = {}
    exec(source, names)
    pack(tiny_model(), tmp_path / "packed", Form(bits, **rank))
    rows = (
        TideForCausalLM.from_pretrained(tmp_path / "packed")
        .model.memory(torch.arange(53)[None])
        .of_positions()
    )
    found = [names["read_row"](tmp_path / "packed" / STORE, token) for token in range(53)]
    if rank:
        assert torch.allclose(torch.tensor(np.stack(found)), rows, atol=1e-6)
    else:
        assert torch.equal(torch.tensor(np.stack(found)), rows)


def test_the_fingerprint_is_what_the_format_says(packed):
    model, folder = packed

    def half(tensors):
        found = hashlib.sha256()
        for name in sorted(tensors):
            found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode())
            found.update(tensors[name].numpy().tobytes())
        return found.hexdigest()[:32]

    beside = half(load_file(folder / "model.safetensors"))
    tables = half({name: value for name, value in model.state_dict().items() if ".memory." in name})
    assert json.loads((folder / "config.json").read_text())["memory_store"]["fingerprint"] == beside + tables


def test_two_that_pack_into_one_folder_do_not_disturb_each_other(tiny_model, tmp_path):
    model, meanwhile = tiny_model(), []

    def pack_again(draft):
        with pytest.raises(ValueError, match="is being packed by another process"):
            pack(model, tmp_path / "packed", Form(8))
        meanwhile.append(draft)

    pack(model, tmp_path / "packed", Form(4), save_more=pack_again)
    assert meanwhile
    assert verify(TideForCausalLM.from_pretrained(tmp_path / "packed", memory="store")).header.bits == 4


def test_rows_that_changed_places_are_found(packed, token_ids):
    _, folder = packed
    header = reader.StoreFile(folder / STORE).header
    content = bytearray((folder / STORE).read_bytes())
    one, other = (slice(at, at + header.row_bytes) for at in header.row_at(np.array([3, 4])).tolist())
    content[one], content[other] = content[other], content[one]
    (folder / STORE).write_bytes(content)
    with pytest.raises(StoreError, match="row 3 is damaged"):
        verify(TideForCausalLM.from_pretrained(folder, memory="store"))


def test_only_rows_that_are_there_are_saved(packed, tmp_path):
    model = TideForCausalLM.from_pretrained(packed[1], memory="store")
    with pytest.raises(ValueError, match="has no rows to save"):
        TideForCausalLM(model.config).save_pretrained(tmp_path / "unopened")
    os.truncate(packed[1] / STORE, 70_000)
    with pytest.raises(StoreError, match=r"was cut off.*copy it again"):
        model.save_pretrained(tmp_path / "cut")


@pytest.mark.parametrize("wrong", [-1, 1.5, "64", None, True])
def test_a_budget_that_is_none_is_refused_before_anything_is_read(wrong):
    with pytest.raises(ValueError, match=r"memory_cache_bytes is .* 0 or more"):
        TideForCausalLM.from_pretrained("no/such", memory="store", memory_cache_bytes=wrong)
