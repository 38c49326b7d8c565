"""Time training steps on random tokens: with the trainer's own objective and optimiser, or with plain ones.

Token ids follow Zipf's law, as in text, so that a batch repeats its common tokens. B batch, T tokens.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from tide_lm.bench import timing
from tide_lm.bench.wanted import shape_of
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.ops.transfer import upload
from tide_lm.run.settings import RunConfig, TrainSection
from tide_lm.spec import estimate
from tide_lm.spec.config import ModelConfig
from tide_lm.training import optim
from tide_lm.training.objective import Objective
from tide_lm.training.row_optimizer import RowOptimizer, StepRows
from tide_lm.training.speed import peak_flops

WARM_UP = 20  # steps, which compile, fill the allocator and bring a GPU to the clock that it can keep up
AGE = 1000  # steps that row-lazy tables have behind them when they are timed
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]
Step = Callable[["Clock"], None]


class Clock:
    """Measures the seconds between marks on the device."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """Begin this part of a step."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((part, event))
        else:
            self.marks.append((part, time.perf_counter()))

    def seconds(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for (part, begin), (_, end) in zip(self.marks, self.marks[1:], strict=False):
            taken = begin.elapsed_time(end) / 1e3 if self.on_gpu else end - begin
            found[part] = found.get(part, 0.0) + taken
        return found


def measure_all(
    models: Sequence[str],
    batch: int,
    sequence: int,
    steps: int,
    peers: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time each model; with `peers`, those without `:IDS` in a plain compiled loop too."""
    runs = []
    for model in models:
        for plain in (False, True) if peers and ":" not in model else (False,):
            log(f"{model}{', plain' if plain else ''}")
            runs.append(measure(model, batch, sequence, steps, plain))
    return {"runs": runs}


def measure(model: str, batch: int, sequence: int, steps: int, plain: bool = False) -> dict[str, Any]:
    """Return the speed, the peak memory and the parts of a step, or that it ran out of memory.

    A `plain` step has full logits, dense tables, and the model compiled as a whole.
    """
    shape = shape_of(model)
    result: dict[str, Any] = {
        "preset": model.partition(":")[0],
        "k": shape.num_memory_blocks,
        "vocab": shape.vocab_size,
        "plain": plain,
    }
    try:
        result |= _time(shape, batch, sequence, steps, plain)
    except torch.cuda.OutOfMemoryError:
        result["out_of_memory"] = True
    torch._dynamo.reset()
    gc.collect()  # after the error is gone, whose traceback holds the model
    torch.cuda.empty_cache()
    return result


def _time(shape: ModelConfig, batch: int, sequence: int, steps: int, plain: bool) -> dict[str, Any]:
    device = timing.device()
    timing.forget_peak()
    batches = zipf_batches(shape.vocab_size, batch, sequence)
    step = _plain_step(shape, batches, device) if plain else _own_step(shape, batches, device)
    for _ in range(WARM_UP):
        step(Clock(device))
    clock, started = Clock(device), timing.now()
    for _ in range(steps):
        step(clock)
    clock.mark("end")
    seconds = (timing.now() - started) / steps
    peak, gigabytes = peak_flops(device), timing.peak_gb()
    flops = estimate.train_flops(shape, sequence)
    return {
        "batch": batch,
        "sequence": sequence,
        "tokens_per_s": round(batch * sequence / seconds, 1),
        "mfu": None if peak is None else round(batch * sequence / seconds * flops / peak, 4),
        "peak_gb": gigabytes and round(gigabytes, 2),
        "step_ms": round(1e3 * seconds, 2),
        "parts_ms": {name: round(1e3 * taken / steps, 2) for name, taken in clock.seconds().items()},
    }


def _own_step(shape: ModelConfig, batches: Batches, device: torch.device) -> Step:
    on_gpu = device.type == "cuda"  # a CPU may be very slow in bfloat16
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if on_gpu else "float32"
    config = RunConfig(train=TrainSection(dtype=dtype, compile=on_gpu))
    model = timing.random_weights(TideForCausalLM, TideConfig(**shape.to_transformers())).train()
    objective = Objective(model, config.train, config.optim.z_loss).train()
    memory = model.model.memory
    tables = memory and RowOptimizer(memory, config.optim, getattr(torch, dtype))
    optimizer = optim.make_optimizer(model, config.optim)

    def prepare() -> tuple[torch.Tensor, torch.Tensor, StepRows | None]:
        inputs_BT, targets_BT = next(batches)
        rows = tables.prepare([inputs_BT]) if tables else None
        return upload(inputs_BT, device), upload(targets_BT, device), rows

    ahead = [prepare()]
    if tables is not None:
        _age(tables, missed_steps(shape, ahead[0][0].numel()), config.optim.max_lr)

    def step(clock: Clock) -> None:
        clock.mark("rows")
        inputs_BT, targets_BT, rows = ahead.pop()
        fetched = None
        if tables is not None and rows is not None:
            tables.begin(rows)
            fetched = tables.fetch(0)
        clock.mark("forward")
        loss = objective(inputs_BT, targets_BT, fetched).objective
        clock.mark("backward")
        loss.backward()
        if tables is not None and fetched is not None:
            tables.accumulate(0, fetched)
            tables.reduce()
        clock.mark("optimizer")
        norm = optim.gradient_norm(model, tables)
        ahead.append(prepare())
        norm.item()  # as in the trainer, which must know whether it is finite
        optim.step(optimizer, tables, config.optim.max_lr, config.optim, norm, ahead=ahead[0][2])
        optimizer.zero_grad()

    return step


def _plain_step(shape: ModelConfig, batches: Batches, device: torch.device) -> Step:
    values = shape.to_transformers()
    if shape.num_memory_blocks:
        model = timing.random_weights(TideForCausalLM, TideConfig(**values)).train()
    else:
        model = timing.random_weights(LlamaForCausalLM, LlamaConfig(**values)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=device.type == "cuda")
    forward = torch.compile(model) if device.type == "cuda" else model

    def step(clock: Clock) -> None:
        inputs_BT, targets_BT = next(batches)
        clock.mark("forward")
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits_BTV = forward(inputs_BT.to(device), use_cache=False).logits
            loss = nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1).float(), targets_BT.to(device).flatten()
            )
            del logits_BTV
        clock.mark("backward")
        loss.backward()
        clock.mark("optimizer")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _age(tables: RowOptimizer, missed_V: torch.Tensor, rate: float) -> None:
    """Put tables where they would be after `AGE` steps: rows lag behind, and moments are not 0."""
    table = tables.table
    tables.set_rates(torch.full((AGE,), rate, dtype=torch.float64))
    table.last_V.copy_(AGE - missed_V)
    table.touched_V.copy_(table.last_V)
    for moment in (table.exp_avg_VKD, table.exp_avg_sq_VKD):
        moment.uniform_(1e-6, 1e-4)


def missed_steps(shape: ModelConfig, tokens: int) -> torch.Tensor:
    """Return for how many steps, of so many tokens, each row has not been used; at most `AGE`.

    The hash spreads pairs of tokens over their rows.
    """
    pairs = shape.memory_pair_rows
    of_pairs = torch.full((pairs,), 1 / max(pairs, 1), dtype=torch.float64)
    shares_V = torch.cat([_zipf_shares(shape.vocab_size), of_pairs])
    generator = torch.Generator().manual_seed(0)
    # A row is not used for n steps with a chance of (1 - share) ** (tokens * n).
    chances_V = torch.rand(len(shares_V), generator=generator, dtype=torch.float64)
    return (chances_V.log() / (tokens * torch.log1p(-shares_V))).clamp(max=AGE).int()


def zipf_batches(vocabulary: int, batch: int, sequence: int) -> Batches:
    """Yield inputs and targets without end."""
    generator = torch.Generator().manual_seed(0)
    sums_V = _zipf_shares(vocabulary).cumsum(0)
    while True:
        drawn = torch.rand(batch, sequence + 1, generator=generator, dtype=torch.float64) * sums_V[-1]
        ids = torch.searchsorted(sums_V, drawn).clamp(max=vocabulary - 1)
        yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _zipf_shares(vocabulary: int) -> torch.Tensor:
    shares_V = 1 / (torch.arange(vocabulary, dtype=torch.float64) + 2.7)
    return shares_V / shares_V.sum()
