"""Benchmarks through lm-eval: its own tasks, scores that a few lines confirm, nothing from the network."""

import copy
import gzip
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import tide_lm
from huggingface_hub import constants
from tokenizers.processors import TemplateProcessing

from tide_lm.evaluate import tasks as lm_eval_tasks

SENTENCE = "every layer knows the token beneath the context and adds what it has seen of it"
WORDS = SENTENCE.split()
REAL = ["arc_challenge", "openbookqa", "piqa", "sciq"]


def arc(number: int) -> dict:
    choices = [" ".join(WORDS[number + i : number + 2 * i + 1]) for i in range(4)]
    return {
        "id": str(number),
        "question": f"What comes after {WORDS[number]}?",
        "choices": {"text": choices, "label": list("ABCD")},
        "answerKey": "ABAC"[number % 4],
    }


def boolq(number: int) -> dict:
    return {
        "question": f"is {WORDS[number]} a word",
        "passage": " ".join(WORDS[number:]),
        "idx": number,
        "label": int(number % 4 > 0),
    }


def hellaswag(number: int) -> dict:
    return {
        "activity_label": "Reading",
        "ctx_a": f"[header] {WORDS[number]} is read.",
        "ctx_b": "the reader",
        "endings": [" ".join(WORDS[i : number + i + 1]) for i in range(4)],
        "label": str(number % 4),
    }


def lambada(number: int) -> dict:
    return {"text": " ".join(WORDS[number:] + WORDS[:number])}


def sciq(number: int) -> dict:
    """The answer is all q, the others all z; in one of four it is the other way round."""
    right, wrong = ("q", "z") if number % 4 else ("z", "q")
    return {
        "question": "Which letter?",
        "support": "",
        "correct_answer": right * 4,
        **{f"distractor{i}": wrong * (i + 2) for i in (1, 2, 3)},
    }


MADE = {
    "arc_easy_test": arc,
    "boolq_validation": boolq,
    "hellaswag_validation": hellaswag,
    "lambada_openai_test": lambada,
}


def write_records(path: Path, make) -> None:
    path.write_text("".join(json.dumps(make(number)) + "\n" for number in range(8)))


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> Path:
    """Four small tasks, one of them packed."""
    folder = tmp_path_factory.mktemp("records")
    for name, make in MADE.items():
        write_records(folder / f"{name}.jsonl", make)
    plain = folder / "boolq_validation.jsonl"
    plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    return folder


@pytest.fixture
def model(tiny_model, tokenizer):
    return tiny_model(vocab_size=len(tokenizer), max_position_embeddings=512)


def tasks_of(folder: Path) -> list[str]:
    return [name for name in lm_eval_tasks.TASKS if list(folder.glob(f"{name}_*"))]


@torch.no_grad()
def log_likelihood(model, tokenizer, context: str, answer: str) -> tuple[float, bool]:
    """Of the answer, one sequence at a time, and whether the model would have written it."""
    ids = tokenizer.encode(context + answer)
    start = len(tokenizer.encode(context))
    logits = model(torch.tensor([ids[:-1]])).logits[0, start - 1 :].log_softmax(-1)
    targets = torch.tensor(ids[start:])
    return logits.gather(1, targets[:, None]).sum().item(), bool((logits.argmax(-1) == targets).all())


def best(model, tokenizer, context: str, answers: list[str], by_length: bool) -> int:
    found = [log_likelihood(model, tokenizer, context, f" {answer}")[0] for answer in answers]
    if by_length:
        found = [value / len(answer) for value, answer in zip(found, answers, strict=True)]
    return found.index(max(found))


def test_scores_are_those_of_a_few_lines(model, tokenizer, records):
    found = lm_eval_tasks.run(model, tokenizer, str(records), tasks_of(records), batch=3)
    by_length, plain = (
        sum(
            "ABCD"[best(model, tokenizer, f"Question: {a['question']}\nAnswer:", a["choices"]["text"], norm)]
            == a["answerKey"]
            for a in map(arc, range(8))
        )
        for norm in (True, False)
    )
    assert found["tasks"]["arc_easy"]["score"] == by_length / 8 != plain / 8
    right = [
        best(model, tokenizer, f"{b['passage']}\nQuestion: {b['question']}?\nAnswer:", ["no", "yes"], False)
        == b["label"]
        for b in map(boolq, range(8))
    ]
    assert found["tasks"]["boolq"]["score"] == sum(right) / 8
    right = [
        best(model, tokenizer, f"Reading: {WORDS[number]} is read. The reader", h["endings"], True)
        == int(h["label"])
        for number, h in enumerate(map(hellaswag, range(8)))
    ]
    assert found["tasks"]["hellaswag"]["score"] == sum(right) / 8
    last = [
        log_likelihood(model, tokenizer, *_before_and_last(lambada(number)["text"])) for number in range(8)
    ]
    assert found["tasks"]["lambada_openai"]["score"] == sum(greedy for _, greedy in last) / 8
    assert found["lambada_perplexity"] == pytest.approx(
        math.exp(-sum(value for value, _ in last) / 8), rel=1e-4
    )
    assert found["average"] is None  # of four tasks, it is not the paper's


def _before_and_last(text: str) -> tuple[str, str]:
    before, _, word = text.rpartition(" ")
    return before, f" {word}"


def test_a_model_of_known_answers_has_known_scores(model, tokenizer, records, tmp_path):
    """All tokens are equally likely, but those of yes and of q."""
    shutil.copytree(records, tmp_path / "records")
    write_records(tmp_path / "records" / "sciq_validation.jsonl", sciq)
    bonus = torch.zeros(len(tokenizer))
    favoured = {i for text in ("yes", "qqqq") for i in tokenizer.encode(text)}
    bonus[list(favoured)] = 8.0
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.lm_head.register_forward_hook(lambda _, __, logits: logits + bonus)
    found = lm_eval_tasks.run(
        model, tokenizer, str(tmp_path / "records"), ["sciq", "boolq", "lambada_openai"], limit=4
    )
    assert list(found["tasks"]) == ["boolq", "lambada_openai", "sciq"]
    for name, metric, split in (("boolq", "acc", "validation"), ("sciq", "acc_norm", "validation")):
        assert found["tasks"][name] == {
            "score": 0.75,
            "metric": metric,
            "stderr": pytest.approx(0.25),
            "samples": 4,
            "split": split,
        }
    likely = bonus.log_softmax(0)
    last = [tokenizer.encode(_before_and_last(lambada(number)["text"])[1]) for number in range(4)]
    expected = math.exp(-sum(likely[ids].sum().item() for ids in last) / 4)
    assert found["lambada_perplexity"] == pytest.approx(expected, rel=1e-5)
    assert found["limit"] == 4
    assert found["source"] == "records"


@pytest.mark.parametrize("adds", [False, True])
def test_prompts_begin_with_bos_if_the_tokenizer_adds_it(model, tokenizer, records, adds):
    from transformers import PreTrainedTokenizerFast

    own = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(tokenizer.backend_tokenizer), bos_token="<bos>"
    )
    if adds:
        own.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 0)])
    seen = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    found = lm_eval_tasks.run(model, own, str(records), ["boolq"], limit=2)
    assert found["bos"] is adds
    assert all((ids[:, 0] == 0).all() == adds for ids in seen)
    assert own.pad_token is None  # lm-eval gave one to a copy


def test_a_folder_needs_no_network_and_nothing_goes_to_stdout(model, tokenizer, records, monkeypatch, capfd):
    def refuse(*_):
        raise AssertionError("something reached for the network")

    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(constants.HF_HUB_OFFLINE))
    lm_eval_tasks.run(model, tokenizer, str(records), ["boolq", "lambada_openai"], limit=2)
    assert all(seen)
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE
    written = capfd.readouterr()
    assert not written.out
    assert "loglikelihood" in written.err


def test_tasks_differ_from_those_of_lm_eval_in_their_data_alone(tmp_path):
    from lm_eval.tasks._yaml_loader import load_yaml

    for name, task in lm_eval_tasks.TASKS.items():
        (tmp_path / f"{name}_{task.splits[-1]}.jsonl").touch()
    data = {"dataset_path", "dataset_name", "dataset_kwargs"}
    splits = {"training_split", "validation_split", "test_split"}
    for path in lm_eval_tasks.write_tasks(tmp_path, tmp_path / "tasks"):
        task = lm_eval_tasks.TASKS[path.stem]
        ours = load_yaml(path, resolve_func=False)
        theirs = load_yaml(lm_eval_tasks._definition(path.stem), resolve_func=False)
        assert {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)} <= data | splits
        assert (theirs.get("test_split") or theirs["validation_split"]) == task.splits[0]
        assert "num_fewshot" not in theirs
        assert task.metric in [metric["metric"] for metric in theirs["metric_list"]]
        assert list(ours["dataset_kwargs"]["data_files"]) == [task.splits[-1]]


@pytest.fixture(scope="module")
def both_ways(trained, records, tmp_path_factory):
    """The scores of `tide-lm evaluate RUN` and those of lm-eval's own command on the run's export."""
    top = tmp_path_factory.mktemp("both")
    folder = shutil.copytree(records, top / "records")
    real = Path(__file__).parents[3] / "shared" / "data" / "benchmarks"
    for name in REAL if real.exists() else []:
        split = lm_eval_tasks.TASKS[name].splits[-1]
        shutil.copy(real / f"{name}_{split}.jsonl.gz", folder)
    tasks = tasks_of(folder)

    arguments = ["--benchmarks", str(folder), "--limit", "8", "--run", str(top / "run")]
    done = tide_lm("evaluate", trained, *arguments, "--tasks", ",".join(tasks))
    assert done.returncode == 0, done.stderr
    ours = json.loads((top / "run" / "results" / "benchmarks.json").read_text())

    lm_eval_tasks.write_tasks(folder, top / "tasks", tasks)
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--tasks", ",".join(tasks)]
    command += ["--model_args", f"pretrained={trained / 'export'},trust_remote_code=True", "--device", "cpu"]
    command += ["--batch_size", "8", "--limit", "8", "--include_path", str(top / "tasks")]
    command += ["--output_path", str(top / "theirs.json")]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=offline, cwd=top)
    assert done.returncode == 0, done.stderr
    (theirs,) = top.glob("theirs*.json")
    return ours, json.loads(theirs.read_text())


def compare(both_ways, tasks) -> None:
    ours, theirs = both_ways
    for name in tasks:
        task, found = ours["tasks"][name], theirs["results"][name]
        assert task["score"] == found[f"{task['metric']},none"]
        assert task["stderr"] == pytest.approx(found[f"{task['metric']}_stderr,none"], rel=1e-12)
        assert task["samples"] == theirs["n-samples"][name]["effective"] == 8


@pytest.mark.slow
def test_lm_evals_own_command_gives_the_same_numbers(both_ways, records):
    compare(both_ways, tasks_of(records))
    ours, theirs = both_ways
    assert ours["lambada_perplexity"] == theirs["results"]["lambada_openai"]["perplexity,none"]
    assert ours["lm_eval"] == theirs["lm_eval_version"]


@pytest.mark.slow
def test_lm_evals_own_command_gives_the_same_numbers_on_real_records(both_ways):
    if not set(REAL) <= set(both_ways[0]["tasks"]):
        pytest.skip("the benchmarks are not beside the checkout, in shared/data/benchmarks")
    compare(both_ways, REAL)
    ours = both_ways[0]
    assert ours["tasks"]["sciq"]["split"] == "validation"
    assert ours["average"] == sum(task["score"] for task in ours["tasks"].values()) / 8


def test_the_command_prints_the_papers_columns_as_rows(trained, records, tmp_path):
    run = str(tmp_path / "run")
    shutil.copytree(records, tmp_path / "all")
    write_records(tmp_path / "all" / "sciq_validation.jsonl", sciq)
    arguments = ["evaluate", str(trained), "--benchmarks", str(tmp_path / "all"), "--run", run]
    done = tide_lm(*arguments, "--tasks", "sciq,arc_easy", "--limit", "4")
    assert done.returncode == 0, done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.strip()]
    assert rows[-4:] == ["PPL", "ARC-E", "SciQ", "Average"]
    assert "the validation split stands in for the test split" in done.stderr
    result = json.loads((tmp_path / "run" / "results" / "benchmarks.json").read_text())
    assert result["model"] == "run"
    assert result["provenance"]["versions"]["torch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "3"], "give --benchmarks"),
        (["--benchmarks", "hub", "--text", "a.txt"], "--text does nothing with --benchmarks"),
    ],
)
def test_a_wrong_call_says_why(arguments, message):
    done = tide_lm("evaluate", "no-model", *arguments)
    assert done.returncode == 2
    assert message in done.said


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (["piqa"], "has no piqa_validation.jsonl, plain or .gz"),
        (["sciq"], "has no sciq_test.jsonl or sciq_validation.jsonl"),
        (["arc"], "unknown task 'arc': choose from arc_challenge"),
        ([], "no task is named"),
    ],
)
def test_what_is_missing_is_named(records, tasks, message):
    with pytest.raises(ValueError, match=message):
        lm_eval_tasks.check(str(records), tasks)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        lm_eval_tasks.check(str(tmp_path / "nowhere"))


def test_records_of_another_shape_are_named(model, tokenizer, tmp_path):
    (tmp_path / "piqa_validation.jsonl").write_text('{"prompt": "a"}\n')
    with pytest.raises(ValueError, match="the records of piqa cannot be read"):
        lm_eval_tasks.run(model, tokenizer, str(tmp_path), ["piqa"])


def test_the_hub_out_of_reach_is_said(model, tokenizer):
    with pytest.raises(ValueError, match=r"cannot be read from hub .*give a folder"):
        lm_eval_tasks.run(model, tokenizer, "hub", ["sciq"])


def test_without_the_extra_the_install_command_is_named(monkeypatch, records):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[eval\]'"):
        lm_eval_tasks.check(str(records), ["boolq"])
