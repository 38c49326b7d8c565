"""Settings before torch and transformers load, and the small models that many tests share."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import fcntl
import hashlib
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from tide_lm.data.shards import Manifest, ShardWriter
from tide_lm.model import TideConfig, TideForCausalLM

torch.set_num_threads(1)
# A shell has what it starts behind a `&` ignore interrupts, and so would all processes of tests.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A busy machine is no fault. `make test` has the same examples each time, and what follows it has others.
hypothesis.settings.register_profile("patient", deadline=None, print_blob=True, derandomize=False)
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)

VOCAB = 53
# Each of these markers, registered in pyproject.toml, leaves a test to `make test-all`.
LATER = ("browser", "cluster", "kernels", "slow", "torchrun")
LEFT_OUT = pytest.StashKey[dict[str, int]]()


def pytest_addoption(parser):
    choices = {
        "fast": "all but what a marker leaves for later",
        "rest": "what the markers leave for later, and random examples",
    }
    told = "; ".join(f"{name}: {what}" for name, what in choices.items())
    parser.addoption("--part", choices=choices, help=f"One part of the suite. {told}.")


def pytest_xdist_auto_num_workers(config):
    """Start a worker for each core that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def pytest_configure(config):
    fast = config.getoption("--part") == "fast"
    hypothesis.settings.load_profile("repeatable" if fast else "patient")


def pytest_collection_modifyitems(config, items):
    """Keep one part of the suite, and count by marker what is left out of it."""
    part = config.getoption("--part")
    if part is None:
        return
    first = {item: next((name for name in LATER if item.get_closest_marker(name)), None) for item in items}

    def is_in(item: pytest.Item) -> bool:
        if part == "rest" and hypothesis.is_hypothesis_test(item.obj):
            return True  # again, with other examples each time
        return (first[item] is None) == (part == "fast")

    left_out = [item for item in items if not is_in(item)]
    config.stash[LEFT_OUT] = dict(Counter(first[item] or "fast" for item in left_out))
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if is_in(item)]


def pytest_sessionfinish(session):
    """Have a worker send what it left out to the process that talks to the user."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(LEFT_OUT, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_unconfigure(config):
    """End with one line that says what was left out, and how to run it."""
    left_out = config.stash.get(LEFT_OUT, {})
    if left_out and config.getoption("--part") == "fast" and not hasattr(config, "workeroutput"):
        counts = ", ".join(f"{count} {name}" for name, count in sorted(left_out.items()))
        print(f"left out: {counts}, other versions, vLLM; `make test-all` runs them too")


@pytest.fixture(scope="session")
def made_once(pytestconfig, tmp_path_factory):
    """Return `made(name, make)`: a folder that all workers share, and that the first of them fills."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if hasattr(pytestconfig, "workerinput") else base

    def made(name: str, make: Callable[[Path], None]) -> Path:
        folder = root / "shared" / name
        folder.parent.mkdir(exist_ok=True)
        with folder.with_suffix(".lock").open("a+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            lock.seek(0)
            if not lock.read():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                lock.write("made")
        return folder

    return made


@pytest.fixture
def tiny_config():
    """Makes the config of a model of a few thousand parameters: two layers, grouped queries."""

    def make(**changes) -> TideConfig:
        settings = {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_memory_blocks": 3,
            "max_position_embeddings": 64,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }
        return TideConfig(**{**settings, **changes})

    return make


@pytest.fixture
def tiny_model(tiny_config):
    """Makes a tiny model in evaluation mode, its routers sharp enough to prefer some blocks."""

    def make(**changes) -> TideForCausalLM:
        torch.manual_seed(0)
        model = TideForCausalLM(tiny_config(**changes)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".router." in name:
                    parameter.mul_(30)
        return model

    return make


@pytest.fixture
def token_ids():
    """Two rows of ordinary tokens, some of them repeated."""
    return torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="session")
def tokenizer():
    """A real byte-level tokenizer over a few sentences, with the special tokens of the tiny models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<bos>", "<eos>", "<pad>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["every layer knows the token beneath the context"] * 4, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )


@pytest.fixture(scope="session")
def prepared(tokenizer, tmp_path_factory):
    """A small set of prepared data: real text, a real tokenizer, shards as `prepare` writes them."""
    from pydoc_data.topics import topics

    folder = tmp_path_factory.mktemp("prepared")
    tokenizer.save_pretrained(folder / "tokenizer")
    writers = {name: ShardWriter(folder, name, "uint16", 20_000) for name in ("train", "validation")}
    counts = np.zeros(len(tokenizer), dtype=np.int64)
    for i, name in enumerate(sorted(topics)[:30]):
        ids = np.array([0, *tokenizer(topics[name]).input_ids[:3_000]])
        split = "validation" if i % 5 == 0 else "train"
        writers[split].add(ids)
        if split == "train":
            counts += np.bincount(ids, minlength=len(counts))
    np.save(folder / "counts.npy", counts)
    text = (folder / "tokenizer" / "tokenizer.json").read_bytes()
    Manifest(
        dtype="uint16",
        vocab_size=len(tokenizer),
        tokenizer_sha256=hashlib.sha256(text).hexdigest(),
        bos_token_id=0,
        eos_token_id=1,
        source={"name": "topics"},
        splits={name: writer.finish() for name, writer in writers.items()},
    ).write(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data():
    """Real corpora beside the checkout, if they are there."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.exists():
        pytest.skip("the shared data are not here")
    return folder


@pytest.fixture(scope="module")
def browser():
    """A real one, without a window; its loop of events would disturb tests of other modules."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is missing: pip install playwright"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is missing: apt-get install chromium")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=flags)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def trained(prepared, tmp_path_factory):
    """A finished run of a tiny TIDE model: checkpoints at steps 2 and 4, gradients recorded."""
    import json

    from tide_lm.run.settings import RunConfig
    from tide_lm.training.trainer import Trainer

    run = tmp_path_factory.mktemp("trained") / "run"
    settings = [
        f"data.path={json.dumps(str(prepared))}",
        "data.sequence=32",
        "model.preset=tide-2e-tiny",
        "train.steps=4",
        "train.batch=4",
        "train.micro_batch=4",
        "train.validation_sequences=4",
        "train.checkpoint_every=2",
        "optim.warmup_steps=0",
        "train.record_gradients=true",
        "train.tensorboard=false",
    ]
    Trainer(RunConfig.load(None, settings), run, lambda line: None).train()
    return run
