"""`tide-lm demo`: train a base and a TIDE model of one transformer on real text, and compare them.

The text is Python's own language reference, which every installation carries: no network is needed.
"""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tide_lm import runs
from tide_lm.cli.output import AsJson, print_json, print_table

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer

    from tide_lm.model import TideForCausalLM

SEED = 0
BATCH, SEQUENCE = 8, 128
LEARNING_RATE, WARMUP_STEPS = 3e-3, 20


def command(
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps of each model.")] = 200,
    run: Annotated[Path, typer.Option("--run", help="The run directory to write.")] = Path("runs/demo"),
    as_json: AsJson = False,
) -> None:
    """Train a base and a TIDE model on the same real text and compare them; two minutes on two cores."""
    started = time.monotonic()
    runs.results_folder(run)
    typer.echo("Reading Python's language reference and training a tokenizer on it ...", err=True)
    training_text, held_out_text = _texts()
    tokenizer = _train_tokenizer(training_text)
    training, held_out = _encode(tokenizer, training_text), _encode(tokenizer, held_out_text)
    typer.echo(f"{len(training):,} tokens to train on, {len(held_out):,} held out.", err=True)

    result: dict[str, Any] = {"steps": steps, "tokens": steps * BATCH * SEQUENCE}
    for kind, preset in {"base": "base-tiny", "tide": "tide-4e-tiny"}.items():
        model, seconds = _train(kind, preset, training, steps)
        result[kind] = {
            "preset": preset,
            "parameters": model.num_parameters(),
            "val_loss": _loss(model, held_out),
            "seconds": round(seconds, 1),
            "sample": _sample(model, tokenizer),
        }
    result["seconds"] = round(time.monotonic() - started, 1)
    path = runs.write_result(run, "demo", result, SEED)
    if as_json:
        print_json(result)
    else:
        _print(result)
    typer.echo(f"Numbers: {path}", err=True)


def _texts() -> tuple[list[str], list[str]]:
    """The reference's topics, every tenth held out, less the paragraphs that other topics share."""
    from pydoc_data.topics import topics

    ordered = [topics[name] for name in sorted(topics)]
    training = [text for i, text in enumerate(ordered) if i % 10]
    seen = {line.strip() for text in training for line in text.splitlines() if len(line.strip()) > 30}
    held_out = [
        "\n\n".join(
            paragraph
            for paragraph in text.split("\n\n")
            if not any(line.strip() in seen for line in paragraph.splitlines())
        )
        for text in ordered[::10]
    ]
    return training, held_out


def _train_tokenizer(texts: list[str]) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        special_tokens=["<|begin_of_text|>", "<|end_of_text|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode(tokenizer: "Tokenizer", texts: list[str]) -> "torch.Tensor":
    """All texts as one row of ids, each begun by the token of id 0."""
    import torch

    ids = [token for text in tokenizer.encode_batch(texts) for token in (0, *text.ids)]
    return torch.tensor(ids)


def _train(kind: str, preset: str, tokens: "torch.Tensor", steps: int) -> tuple["TideForCausalLM", float]:
    """Trains one model; both kinds start from the same Llama weights and see the same batches."""
    import torch
    from rich.console import Console
    from rich.progress import Progress

    from tide_lm.model import TideConfig, TideForCausalLM

    torch.manual_seed(SEED)
    model = TideForCausalLM(TideConfig.from_preset(preset)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _schedule(step, steps))
    draw = torch.Generator().manual_seed(SEED)
    started = time.monotonic()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"training {kind}", total=steps)
        for _ in range(steps):
            starts = torch.randint(len(tokens) - SEQUENCE, (BATCH,), generator=draw)
            batch = torch.stack([tokens[i : i + SEQUENCE] for i in starts.tolist()])
            loss = model(batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            progress.update(bar, advance=1, description=f"training {kind}, loss {loss.item():.2f}")
    return model.eval(), time.monotonic() - started


def _schedule(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth."""
    warmup = min(WARMUP_STEPS, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


def _loss(model: "TideForCausalLM", tokens: "torch.Tensor") -> float:
    """Mean loss over the held-out tokens, in windows of one sequence."""
    import torch

    windows = tokens[: len(tokens) // SEQUENCE * SEQUENCE].view(-1, SEQUENCE)
    with torch.no_grad():
        losses = [model(window[None], labels=window[None]).loss.item() for window in windows]
    return sum(losses) / len(losses)


def _sample(model: "TideForCausalLM", tokenizer: "Tokenizer") -> str:
    import torch

    prompt = tokenizer.encode("The statement").ids
    ids = torch.tensor([[0, *prompt]])
    generated = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=1
    )
    return " ".join(tokenizer.decode(generated[0].tolist()).split())


def _print(result: dict[str, Any]) -> None:
    base, tide = result["base"], result["tide"]
    rows = [
        (model["preset"], f"{model['parameters']:,}", f"{model['val_loss']:.3f}", f"{model['seconds']:.0f} s")
        for model in (base, tide)
    ]
    rows.append(("difference", "", f"{tide['val_loss'] - base['val_loss']:+.3f}", ""))
    title = f"Held-out loss after {result['tokens']:,} tokens"
    print_table(title, ["model", "parameters", "loss (nats a token)", "training"], rows)
    for model in (base, tide):
        typer.echo(f"{model['preset']}: {model['sample']}")
