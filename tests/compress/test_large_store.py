"""A store that is larger than what a process may take: 1 GB, from which a model generates."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from transformers import PreTrainedModel

from tide_lm.compress.pack import STORE, fingerprint
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.store.codec import RowCodec
from tide_lm.store.format import Header, checksum, write_store

SHAPE = {
    "vocab_size": 2**17,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
BLOCKS, AT_ONCE = 60, 1024
GENERATE = """
import json, sys, threading, time
import torch
from tide_lm import TideForCausalLM

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

most, done = 0, threading.Event()

def watch():
    global most
    while not done.is_set():
        most = max(most, anonymous())
        time.sleep(0.005)

watching = threading.Thread(target=watch)
watching.start()
torch.manual_seed(0)
model = TideForCausalLM.from_pretrained(sys.argv[1], **json.loads(sys.argv[2])).eval()
prompt = torch.randint(2**17, (1, 64))
found = model.generate(prompt, max_new_tokens=200, min_new_tokens=200, do_sample=True, pad_token_id=0)
done.set()
watching.join()
read = model.model.memory.counters.bytes if sys.argv[2] != "{}" else 0
print(json.dumps({"most": most, "tokens": found.shape[1], "read": read}))
"""


def generated(folder, **options):
    command = [sys.executable, "-c", GENERATE, str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status, as Linux has it")
def test_a_gigabyte_of_tables_takes_little_memory(tmp_path):
    if shutil.disk_usage(tmp_path).free < 3 << 30:
        pytest.skip("needs 3 GB of free disk")
    torch.manual_seed(0)
    stored = {"file": STORE, "fingerprint": "0" * 64}
    model = TideForCausalLM(TideConfig(**SHAPE, num_memory_blocks=BLOCKS, memory_store=stored))
    codec = RowCodec(BLOCKS * SHAPE["hidden_size"], bits=4)
    sections = {"levels": codec.levels.numpy(), "columns": torch.full((codec.numbers,), 0.1).numpy()}
    sums = {name: checksum(array) for name, array in sections.items()}
    stored["fingerprint"] = fingerprint(model)
    sizes = SHAPE["vocab_size"], BLOCKS, SHAPE["hidden_size"]
    header = Header(*sizes, 4, 32, (), stored["fingerprint"], sums)
    rows = codec.encode(torch.randn(AT_ONCE, codec.numbers)).numpy()
    PreTrainedModel.save_pretrained(model, tmp_path / "packed")  # without its rows, which come next
    write_store(tmp_path / "packed" / STORE, header, sections, [rows] * (SHAPE["vocab_size"] // AT_ONCE))
    assert header.file_bytes > 1e9
    TideForCausalLM(TideConfig(**SHAPE, num_memory_blocks=0)).save_pretrained(tmp_path / "base")

    base, packed = generated(tmp_path / "base"), generated(tmp_path / "packed", memory="store")
    shutil.rmtree(tmp_path / "packed")
    assert base["tokens"] == packed["tokens"] == 264
    assert packed["read"] > 200 * header.codec.row_bytes
    more = packed["most"] - base["most"]
    print(f"{header.file_bytes / 1e9:.2f} GB of tables take {more / 1e6:.0f} MB")
    assert more <= 200e6
