"""Zero-shot scores: those of a plain loop, and lm-eval's texts, tokens and scores."""

import copy
import gzip
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import lm_evals
import pytest
import torch
from command import tide_lm
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tide_lm.evaluation import zero_shot
from tide_lm.evaluation.tasks import TASKS, Item, read_items
from tide_lm.evaluation.zero_shot import Encoder, Likelihood, Request
from tide_lm.run.optional import install

ARC = {
    "question": "What does every layer know?",
    "choices": {"text": ["the context", "the token", "it"], "label": ["A", "B", "C"]},
    "answerKey": "B",
}
HELLASWAG = {
    "activity_label": "Reading",
    "ctx_a": "[header] How to read [title] Open it.",
    "ctx_b": "the LAYER",
    "endings": ["knows [substeps] the token.", "reads.", "[step] adds  it.", "is."],
    "label": "2",
}
SCIQ = {
    "question": "What is beneath?",
    "support": " \n The token is beneath. ",
    "correct_answer": "a token",
    "distractor1": "a layer",
    "distractor2": "context",
    "distractor3": "it",
}
MADE = {  # a record of each task, and what is made of it
    "arc_challenge": (
        ARC | {"answerKey": "3", "choices": {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}},
        Item("Question: What does every layer know?\nAnswer:", ["a", "b", "c"], 2),
    ),
    "arc_easy": (
        ARC,
        Item("Question: What does every layer know?\nAnswer:", ["the context", "the token", "it"], 1),
    ),
    "boolq": (
        {"question": "is it known", "passage": "Every token is known.", "idx": 0, "label": 1},
        Item("Every token is known.\nQuestion: is it known?\nAnswer:", ["no", "yes"], 1),
    ),
    "hellaswag": (
        HELLASWAG,
        Item(
            "Reading: How to read. Open it. The layer", ["knows the token.", "reads.", " adds it.", "is."], 2
        ),
    ),
    "lambada_openai": (
        {"text": "every layer knows\nthe token beneath  the context"},
        Item("every layer knows\nthe token beneath  the", ["context"], 0),
    ),
    "openbookqa": (
        {
            "question_stem": "Every layer knows ",
            "choices": {"text": ["the token", "é"], "label": ["A", "B"]},
            "answerKey": " A",
        },
        Item("Every layer knows ", ["the token", "é"], 0),
    ),
    "piqa": (
        {"goal": "know the token", "sol1": "look beneath the context", "sol2": "ask", "label": 0},
        Item("Question: know the token\nAnswer:", ["look beneath the context", "ask"], 0),
    ),
    "sciq": (
        SCIQ,
        Item(
            "The token is beneath. \nQuestion: What is beneath?\nAnswer:",
            ["a layer", "context", "it", "a token"],
            3,
        ),
    ),
}
REAL_ITEMS = 25


def write(folder: Path, name: str, records: list[dict]) -> Path:
    path = folder / f"{name}_{TASKS[name].splits[-1]}.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def made(tmp_path) -> Path:
    """A folder of the records above, a word of LAMBADA's without context, and one file packed."""
    folder = tmp_path / "made"
    folder.mkdir()
    for name, (record, _) in MADE.items():
        write(folder, name, [record, {"text": "layer"} if name == "lambada_openai" else record])
    plain = folder / "piqa_validation.jsonl"
    plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return folder


@pytest.fixture
def model(tiny_model, tokenizer):
    return tiny_model(vocab_size=len(tokenizer), max_position_embeddings=128)


@torch.no_grad()
def loop(model, tokenizer, context: str, choice: str) -> tuple[float, bool]:
    """A choice's log-likelihood and whether it is the model's own, one token at a time."""
    before = tokenizer.encode(context.rstrip()) or [tokenizer.bos_token_id]
    answer = tokenizer.encode(f"{context} {choice}")[len(tokenizer.encode(context.rstrip())) :]
    total, greedy = 0.0, True
    for token in answer:
        logits = model(torch.tensor([before])).logits[0, -1]
        total += logits.log_softmax(0)[token].item()
        greedy &= logits.argmax().item() == token
        before = [*before, token]
    return total, greedy


@pytest.mark.parametrize("name", MADE)
def test_records_become_texts(name, tmp_path):
    record, item = MADE[name]
    write(tmp_path, name, [record])
    assert read_items(tmp_path, name) == (TASKS[name].splits[-1], [item])


def test_scores_are_those_of_a_loop(model, tokenizer, made, monkeypatch):
    for missing in ("lm_eval", "datasets"):
        monkeypatch.setitem(sys.modules, missing, None)
    found = zero_shot.score(model, tokenizer, made, batch=3)
    expected = {}
    for name, task in TASKS.items():
        split, items = read_items(made, name)
        right = []
        for item in items:
            values = [loop(model, tokenizer, item.context, choice) for choice in item.choices]
            if name == "lambada_openai":
                right.append(values[0])
                continue
            letters = [len(text) if task.metric == "acc_norm" else 1 for text in item.choices]
            best = max(range(len(values)), key=lambda i: values[i][0] / letters[i])
            right.append((0.0, best == item.right))
        score = sum(good for _, good in right) / len(right)
        expected[name] = {
            "score": score,
            "metric": task.metric,
            "stderr": pytest.approx(math.sqrt(score * (1 - score))),  # of two records
            "samples": 2,
            "split": split,
        }
        if name == "lambada_openai":
            perplexity = math.exp(-sum(value for value, _ in right) / len(right))
    assert found == {
        "tasks": expected,
        "average": pytest.approx(sum(task["score"] for task in expected.values()) / 8),
        "lambada_perplexity": pytest.approx(perplexity, rel=1e-4),
        "limit": None,
        "source": "made",
        "bos": False,
        "lm_eval": None,
    }


def test_likelihoods_are_those_of_a_loop_in_any_batch(model, tokenizer):
    encoder = Encoder(tokenizer, model.config)
    items = [item for _, item in MADE.values()]
    requests = [request for item in items for request in encoder.requests(item)]
    expected = [loop(model, tokenizer, item.context, choice) for item in items for choice in item.choices]
    for batch in (1, 5, 100):
        found = zero_shot.likelihoods(model, requests, batch)
        assert [choice.log for choice in found] == pytest.approx([value for value, _ in expected], rel=1e-5)
        assert [choice.greedy for choice in found] == [greedy for _, greedy in expected]


@pytest.fixture
def bonus(model, tokenizer) -> torch.Tensor:
    """The model's logits, all zero as yet."""
    logits = torch.zeros(len(tokenizer))
    model.lm_head.register_forward_hook(lambda _, __, found: found * 0 + logits)
    return logits


@pytest.mark.parametrize(
    ("name", "best"),
    [("boolq", 0), ("arc_easy", 1)],  # the fewest tokens; the fewest a letter, not a byte
)
def test_where_all_tokens_are_equally_likely_length_decides(
    model, tokenizer, tmp_path, monkeypatch, bonus, name, best
):
    choices = ["zz", "zzzz", "éééé"]
    found = Encoder(tokenizer, model.config).requests(Item("a", choices, 0))
    assert [request.predicted for request in found] == [3, 5, 9]
    made = replace(TASKS[name], item=lambda record: Item("a", choices, record["right"]))
    monkeypatch.setitem(TASKS, name, made)
    write(tmp_path, name, [{"right": right} for right in (best, 0, 1, 2, best)])
    task = zero_shot.score(model, tokenizer, tmp_path, [name])["tasks"][name]
    assert task == {
        "score": 3 / 5,
        "metric": TASKS[name].metric,
        "stderr": pytest.approx(math.sqrt(0.24 / 4)),
        "samples": 5,
        "split": TASKS[name].splits[0],
    }


def test_a_word_that_the_model_would_write_is_right(model, tokenizer, tmp_path, bonus):
    (the,), layer = tokenizer.encode(" the"), tokenizer.encode(" layer")
    bonus[the] = 5.0
    write(tmp_path, "lambada_openai", [{"text": f"every {word}"} for word in ("the", "layer", "thethe")])
    found = zero_shot.score(model, tokenizer, tmp_path, ["lambada_openai"])
    assert found["tasks"]["lambada_openai"]["score"] == 1 / 3
    likely = bonus.log_softmax(0)
    ids = [the, *layer, *tokenizer.encode(" thethe")]
    assert found["lambada_perplexity"] == pytest.approx(math.exp(-likely[ids].sum() / 3))


def test_any_causal_model_is_scored_and_only_needed_logits_are_made(tokenizer):
    torch.manual_seed(0)
    sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = GPT2Config(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1, **sizes)
    gpt2 = GPT2LMHeadModel(config).eval()
    item = MADE["sciq"][1]
    requests = Encoder(tokenizer, config).requests(item)
    assert max(len(request.ids) for request in requests) == 33  # the longest was cut
    made = []
    gpt2.lm_head.register_forward_hook(lambda _, __, logits: made.append(logits.shape))
    found = zero_shot.likelihoods(gpt2, requests, 4)
    first = min(len(request.ids) - request.predicted for request in requests)
    assert made == [(4, 33 - first, len(tokenizer))]

    class Old(torch.nn.Module):
        """A model that always gives all logits."""

        device = torch.device("cpu")

        def forward(self, ids, use_cache):
            return gpt2(ids, use_cache=use_cache)

        def get_input_embeddings(self):
            return gpt2.get_input_embeddings()

    assert [one.log for one in zero_shot.likelihoods(Old(), requests, 4)] == pytest.approx(
        [one.log for one in found], rel=1e-5
    )
    for request, one in zip(requests, found, strict=True):
        with torch.no_grad():
            logs = gpt2(torch.tensor([request.ids[:-1]])).logits[0].log_softmax(-1)
        targets = request.ids[-request.predicted :]
        places = range(len(logs) - len(targets), len(logs))
        total = sum(logs[place, token].item() for place, token in zip(places, targets, strict=True))
        assert one.log == pytest.approx(total, rel=1e-5)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # on processors without bfloat16
def test_a_model_of_16_bits_has_likelihoods_of_32(model, tokenizer):
    encoder = Encoder(tokenizer, model.config)
    requests = encoder.requests(MADE["piqa"][1])
    whole = zero_shot.likelihoods(model, requests, 2)
    half = zero_shot.likelihoods(model.bfloat16(), requests, 2)
    assert [one.log for one in half] == pytest.approx([one.log for one in whole], rel=1e-2)
    assert any(torch.tensor(one.log).bfloat16().item() != one.log for one in half)
    assert all(isinstance(one, Likelihood) for one in half)


def test_limit_takes_the_first_records_and_few_tasks_have_no_average(model, tokenizer, made):
    found = zero_shot.score(model.train(), tokenizer, made, ["sciq", "arc_easy", "sciq"], limit=2)
    assert not model.training
    assert list(found["tasks"]) == ["arc_easy", "sciq"]
    assert [task["samples"] for task in found["tasks"].values()] == [2, 2]
    assert found["tasks"]["sciq"]["split"] == "validation"
    assert found["average"] is found["lambada_perplexity"] is None
    assert found["limit"] == 2


def words_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Its tokens are words or parts of them."""
    return trained_tokenizer(texts, 800, words=True)


def bridging_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A token may begin in a context and end in a choice, as `s ` does, and texts begin with BOS."""
    tokenizer = trained_tokenizer(texts, 320, words=False)
    processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def trained_tokenizer(texts: list[str], size: int, words: bool) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<bos>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>")


@pytest.mark.parametrize(
    "make_tokenizer", [pytest.param(words_tokenizer, marks=pytest.mark.slow), bridging_tokenizer]
)
def test_lm_eval_has_the_same_tokens_likelihoods_and_scores(
    make_tokenizer, tiny_model, shared_data, monkeypatch, tmp_path
):
    """Of a model with random weights: it prefers any choice, unless texts and tokens are the same."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    folder = shared_data / "benchmarks"
    items = [item for name in TASKS for item in read_items(folder, name, REAL_ITEMS)[1]]
    assert len(items) == 8 * REAL_ITEMS
    texts = [f"{item.context} {choice}" for item in items for choice in item.choices]
    tokenizer = make_tokenizer(texts)
    model = tiny_model(vocab_size=len(tokenizer), max_position_embeddings=256)
    with torch.no_grad():
        model.lm_head.weight.mul_(30)
    seen = []
    score_tokens = huggingface.HFLM._loglikelihood_tokens

    def spy(self, requests, **options):
        answers = score_tokens(self, requests, **options)
        seen.extend((*request, *answer) for request, answer in zip(requests, answers, strict=True))
        return answers

    monkeypatch.setattr(huggingface.HFLM, "_loglikelihood_tokens", spy)
    theirs = lm_evals.scores(model, tokenizer, folder, tmp_path, REAL_ITEMS, monkeypatch)
    assert [context + continuation for (context, continuation), *_ in seen] == texts

    encoder = Encoder(tokenizer, model.config)
    requests = [request for item in items for request in encoder.requests(item)]
    assert requests == [Request((context + added)[-257:], len(added)) for _, context, added, *_ in seen]
    assert any(len(context) + len(added) > 257 for _, context, added, *_ in seen)  # some were cut
    over = [
        tokenizer.encode(text) != context + added
        for text, (_, context, added, *_) in zip(texts, seen, strict=True)
    ]
    assert any(over) == (make_tokenizer is bridging_tokenizer)

    found = zero_shot.likelihoods(model, requests, 32)
    assert [one.log for one in found] == pytest.approx([log for *_, log, _ in seen], rel=1e-4)
    assert [one.greedy for one in found] == [greedy for *_, greedy in seen]

    ours = zero_shot.score(model, tokenizer, folder, limit=REAL_ITEMS)
    compare(ours, theirs, TASKS)
    assert ours["average"] == sum(task["score"] for task in ours["tasks"].values()) / 8
    assert ours["bos"] == (make_tokenizer is bridging_tokenizer)


def compare(ours: dict, theirs: dict, tasks) -> None:
    for name in tasks:
        task, found = ours["tasks"][name], theirs["results"][name]
        assert task["score"] == found[f"{task['metric']},none"]
        if (deviation := found[f"{task['metric']}_stderr,none"]) != "N/A":  # as it is in a quick evaluation
            assert task["stderr"] == pytest.approx(deviation)
        assert task["samples"] == theirs["n-samples"][name]["effective"]
    perplexity = theirs["results"]["lambada_openai"]["perplexity,none"]
    assert ours["lambada_perplexity"] == pytest.approx(perplexity, rel=1e-4)


def test_datasets_splits_and_metrics_are_those_of_lm_eval():
    loader = pytest.importorskip("lm_eval.tasks._yaml_loader")
    for name, task in TASKS.items():
        theirs = loader.load_yaml(lm_evals.definition(name), resolve_func=False)
        assert task.dataset == (theirs["dataset_path"], theirs.get("dataset_name"))
        assert task.splits[0] == (theirs.get("test_split") or theirs["validation_split"])
        assert task.metric in [metric["metric"] for metric in theirs["metric_list"]]
        assert "num_fewshot" not in theirs


@pytest.mark.slow
def test_lm_evals_own_command_gives_the_same_numbers(trained, made, tmp_path):
    """Compare `tide-lm evaluate RUN` with `lm_eval` on the run's export."""
    pytest.importorskip("lm_eval")
    done = tide_lm("evaluate", trained, "--benchmarks", made, "--run", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    ours = json.loads((tmp_path / "run" / "results" / "benchmarks.json").read_text())

    lm_evals.write_tasks(made, tmp_path / "tasks", TASKS)
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", ",".join(TASKS)]
    command += ["--model_args", f"pretrained={trained / 'export'},trust_remote_code=True", "--device", "cpu"]
    command += ["--batch_size", "8", "--include_path", str(tmp_path / "tasks")]
    command += ["--output_path", str(tmp_path / "theirs.json")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=offline, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (theirs,) = tmp_path.glob("theirs*.json")
    compare(ours, json.loads(theirs.read_text()), TASKS)


def test_the_command_prints_the_papers_columns_as_rows(trained, made, tmp_path):
    arguments = ["evaluate", trained, "--benchmarks", made, "--run", tmp_path / "run"]
    done = tide_lm(*arguments, "--tasks", "sciq,arc_easy", "--limit", "1")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert rows[-4:] == ["PPL", "ARC-E", "SciQ", "Average"]
    assert "the validation split stands in for the test split" in done.stderr
    result = json.loads((tmp_path / "run" / "results" / "benchmarks.json").read_text())
    assert (result["model"], result["limit"]) == ("run", 1)
    assert result["provenance"]["versions"]["torch"]


@pytest.mark.parametrize("adds", [False, True])
def test_contexts_begin_with_bos_if_the_tokenizer_adds_it(model, tokenizer, made, adds):
    own = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer), bos_token="<bos>"
    )
    if adds:
        own.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert zero_shot.score(model, own, made, ["boolq"])["bos"] is adds
    assert all((ids[:, 0] == 0).all() == adds for ids in seen)


def test_records_come_from_the_hub_too(model, tokenizer, monkeypatch):
    datasets, asked = pytest.importorskip("datasets"), []

    def load(*where, split):
        asked.append((*where, split))
        return [MADE["sciq"][0]] * 3

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = zero_shot.score(model, tokenizer, "hub", ["sciq"], limit=2)
    assert asked == [("allenai/sciq", None, "test")]
    assert (found["source"], found["tasks"]["sciq"]["samples"]) == ("hub", 2)
    assert found["tasks"]["sciq"]["split"] == "test"

    def refuse(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(ValueError, match=r"allenai/sciq cannot be read .*no network.*give a folder"):
        zero_shot.score(model, tokenizer, "hub", ["sciq"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=re.escape(install("data"))):
        zero_shot.score(model, tokenizer, "hub", ["sciq"])


@pytest.mark.parametrize(
    ("tasks", "options", "message"),
    [
        (["arc"], {}, "unknown task 'arc': choose from arc_challenge"),
        ([], {}, "no task is named: choose from arc_challenge"),
        (["piqa"], {}, "has no piqa_validation.jsonl, plain or .gz: add it"),
        (["boolq"], {"limit": 0}, "limit is 0: give at least 1"),
        (["boolq"], {"batch": -1}, "batch is -1: give at least 1"),
        (["boolq"], {}, "holds no records of boolq, validation: put them there"),
        (["sciq"], {}, "has no sciq_test.jsonl or sciq_validation.jsonl"),
    ],
)
def test_a_wrong_call_says_why(model, tokenizer, tmp_path, tasks, options, message):
    write(tmp_path, "boolq", [])
    with pytest.raises(ValueError, match=message):
        zero_shot.score(model, tokenizer, tmp_path, tasks, **options)
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        zero_shot.score(model, tokenizer, tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("piqa", {"prompt": "a"}, r"KeyError: 'goal'.*fields of the Hugging Face dataset baber/piqa"),
        ("piqa", MADE["piqa"][0] | {"label": 2}, "number 2 .*of 2"),
        ("piqa", MADE["piqa"][0] | {"sol2": None}, "choice is no text"),
        ("piqa", ["a"], "TypeError"),
        ("arc_easy", ARC | {"answerKey": "D"}, "'D' is not in list"),
        ("hellaswag", HELLASWAG | {"label": ""}, "invalid literal for int"),
        ("sciq", SCIQ | {"support": None}, "no attribute 'lstrip'"),
    ],
)
def test_records_of_another_shape_are_named(model, tokenizer, tmp_path, name, record, message):
    path = write(tmp_path, name, [MADE[name][0], record])
    with pytest.raises(ValueError, match=rf"{path.name}:2, .* is no record of {name} .*{message}"):
        zero_shot.score(model, tokenizer, tmp_path, [name])
    path.write_text("{")
    with pytest.raises(ValueError, match=f"{path.name}:1 is not JSON"):
        zero_shot.score(model, tokenizer, tmp_path, [name])


def test_what_cannot_be_scored_is_named(tiny_model, model, tokenizer):
    encoder = Encoder(tokenizer, tiny_model(vocab_size=len(tokenizer), max_position_embeddings=8).config)
    with pytest.raises(ValueError, match=r"'it is longer than eight' adds \d+ tokens .* 1 to 8"):
        encoder.requests(Item("a", ["it is longer than eight"], 0))
    bare = copy.deepcopy(tokenizer)
    bare.bos_token = bare.eos_token = None
    with pytest.raises(ValueError, match=r"no context.*BOS or EOS"):
        Encoder(bare, model.config).requests(Item(" ", ["a"], 0))
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="weights are damaged"):
        zero_shot.likelihoods(model, [Request([3, 4], 1)], 1)
    with pytest.raises(ValueError, match="id 999"):
        zero_shot.likelihoods(model, [Request([3, 999], 1)], 1)
