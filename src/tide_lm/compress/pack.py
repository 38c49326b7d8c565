"""Pack a model's tables into a store beside its other weights, and verify such a folder."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError

from tide_lm.compress.encode import Encoder
from tide_lm.model import TideForCausalLM
from tide_lm.model.stored import StoredMemory
from tide_lm.run import files
from tide_lm.spec.form import Form
from tide_lm.store.format import Header, StoreError, write_store
from tide_lm.store.reader import StoreFile

STORE = "memory.tide"
_TABLES = "model.memory."
_ROWS_AT_ONCE = 4096


def fingerprint(model: TideForCausalLM) -> str:
    """Hash the weights that stay beside a store, and the tables that it is made from: half of it each."""
    return _sum(model, tables=False) + _sum(model, tables=True)


def _sum(model: TideForCausalLM, tables: bool) -> str:
    """Hash names, types, shapes and numbers."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if name.startswith(_TABLES) == tables:
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def pack(
    model: TideForCausalLM,
    folder: Path,
    form: Form,
    counts_V: np.ndarray | None = None,
    save_more: Callable[[Path], object] = lambda folder: None,
) -> Header:
    """Write a folder that opens as a model with its rows in a store; whole, or not at all.

    `save_more` adds what else belongs to a model, such as its tokenizer.
    """
    if model.model.tables is None:
        raise ValueError("a base model (num_memory_blocks=0) has no tables to pack")
    with files.claimed(folder, "packed"), files.write_folder(folder) as draft:
        encoder = Encoder(model.model.tables, form, fingerprint(model), counts_V)
        rows = (some.cpu().numpy() for some in encoder.rows())
        write_store(draft / STORE, encoder.header, encoder.sections, rows)
        without = {name: value for name, value in model.state_dict().items() if not name.startswith(_TABLES)}
        before = model.config.memory_store
        header = encoder.header
        marks = {"fingerprint": header.fingerprint, "header": header.checksum}
        model.config.memory_store = {"file": STORE, **marks}
        try:
            model.save_pretrained(draft, state_dict=without)
        except SafetensorError as error:  # of a full disk, above all
            raise OSError(f"{folder}: {error}") from error
        finally:
            model.config.memory_store = before
        save_more(draft)
    return encoder.header


def verify(model: TideForCausalLM) -> StoreFile:
    """Read every row of a packed model's store, and compare its fingerprint."""
    stored = model.model.memory
    if not isinstance(stored, StoredMemory) or stored.file is None:
        raise ValueError("this model has no store to verify: its tables are among its weights")
    header = stored.file.header
    if (found := _sum(model, tables=False)) != header.fingerprint[:32]:
        raise StoreError(
            f"{stored.file.path} belongs to weights with the sum {header.fingerprint[:32]}, and these have "
            f"{found}: the weights changed after packing, or were saved in another type; pack the model again"
        )
    for start in range(0, header.vocab_size, _ROWS_AT_ONCE):
        ids = np.arange(start, min(start + _ROWS_AT_ONCE, header.vocab_size))
        stored.file.read(ids)  # which compares checksums
    return stored.file
