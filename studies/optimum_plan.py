"""The runs at the optimum, the most important first, and which of them is next.

An entry of the plan is one of these:

- `ARM, RATE`, and what differs, as in "base, 0.004, beta2 0.995": that run.
- `ARM, rates LOW to HIGH`, and what differs: a grid of rates by factors of 2. It grows by one rate at a time
  while its best rate is at an edge.
- `ARM, best rate`, and what differs, as in "base, best rate, seed 1": the rate, beta2, batch and warm-up that
  are best so far at these tokens; or at the next fewer tokens that are known; or else at the next more.
  `ARM, best rate at 20` takes those of 20 tokens for each parameter. `half the best rate` and `twice the best
  rate` are its neighbours.

A best rate is unknown until all runs before the entry are done that may change it: those with seed 0, and
without the test split, of the same arm, size and tokens.
"""

import re
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from studies.optimum import Tuned, train_kept
from studies.optimum_summary import Record, best

HEADLINE = "base", "paper", "best", "pairs one hash"
WITH_TABLES = "paper", "best", "pairs one hash"
CONTROLS = "own tables", "stem", "reinjected in values", "fast embedding", "nanochat values x5"
RIVALS = "stem published", "nanochat values", "modded values", "gemma tables best", "gemma tables equal"
OTHERS = "scalars", "base untied", "base doubled", "mole equal"
SMALL = "base", "paper", "pairs one hash", "own tables"
RARE = "base", "paper", "best", "pairs one hash", "base untied", "paper untied", "best untied"
GRID = "rates 0.002 to 0.008"
SHOWN = 12  # of the runs that are left
WAIT = 5  # seconds, for other processes' results
_BEST = re.compile(
    r"(?P<arm>[^,]+), ((?P<times>half|twice) the )?best rate( at (?P<at>[\d.]+))?(?P<more>(, .+)?)"
)
_GRID = re.compile(r"(?P<arm>[^,]+), rates (?P<low>[\d.]+) to (?P<high>[\d.]+)(?P<more>(, .+)?)")


def plan() -> list[str]:
    """Return the study's runs in the order of their worth; a comment says what each group asks."""
    return [
        # How long should the optimiser remember squares?
        "base, 0.004, beta2 0.995",
        "pairs one hash, 0.004, beta2 0.995",
        # Which rate is best for each arm of the headline at 20 tokens for each parameter?
        *(f"{arm}, {GRID}, beta2 0.99" for arm in HEADLINE),
        # What do the arms of the headline have with three seeds, and on the test split?
        *(f"{arm}, best rate, seed {seed}, test" for seed in (0, 1, 2) for arm in HEADLINE),
        # How do the gains fall with tokens, and with how many does a model with tables reach the base at 1?
        *(f"{arm}, best rate at 20, tokens {n}" for n in (1, 10, 5, 2) for arm in HEADLINE),
        *(f"{arm}, best rate at 20, tokens 0.5" for arm in WITH_TABLES),
        # What are the controls worth at their own rates, and is the gain over them more than chance?
        *(f"{arm}, {GRID}, beta2 0.99" for arm in CONTROLS),
        *(f"{arm}, best rate, seed {seed}" for seed in (1, 2) for arm in CONTROLS),
        # Which rate is best in the small size, and what do tables gain there, up to four passes?
        *(f"{arm}, {GRID}, beta2 0.99, size small, tokens 2" for arm in SMALL),
        *(f"{arm}, best rate at 2, size small, tokens {n}" for n in (1, 5, 10) for arm in SMALL),
        *(f"{arm}, best rate at 2, size small, tokens 20" for arm in ("base", "pairs one hash")),
        # Do tokens that are rare gain more? The Llama 3 tokenizer has thousands that occur once.
        *(f"{arm}, 0.004, beta2 0.99, size 6m-llama3" for arm in RARE),
        # What do rivals have as their authors have them, and other bases?
        *(f"{arm}, {GRID}, beta2 0.99" for arm in (*RIVALS, *OTHERS)),
        # Do fewer tokens want smaller batches? With beta2 0.95 the base had half the batch better at 5.
        *(f"{arm}, best rate at 20, tokens {n}, batch 32" for n in (1, 5, 2) for arm in HEADLINE),
        *(f"{arm}, best rate at 20, tokens 0.5, batch 32" for arm in WITH_TABLES),
        # Does it hold in larger models, and at a neighbour of the small size's rate?
        *(f"{arm}, 0.002, beta2 0.99, size medium, tokens 1.5" for arm in ("base", "pairs one hash")),
        *(f"{arm}, half the best rate at 2, size small, tokens 10" for arm in SMALL),
    ]


Place = tuple[str, str, float]  # arm, size and tokens


class Wanted(NamedTuple):
    """The runs of a plan that can begin, in its order, and by reason the entries that cannot."""

    runs: list[Tuned]
    waiting: dict[str, list[str]]


def wanted(entries: Sequence[str], records: Sequence[Record]) -> Wanted:
    """Return what is to be run of a plan, as far as the records say it."""
    done = {Tuned.of(record) for record in records}
    done |= {replace(run, test=False) for run in done}
    undecided: set[Place] = set()
    runs: dict[Tuned, None] = {}
    waiting = defaultdict[str, list[str]](list)
    for entry in entries:
        try:
            found = [run for run in resolve(entry, records, undecided) if run not in done]
        except LookupError as reason:
            waiting[str(reason.args[0])].append(entry)
            found = [_about(_BEST.fullmatch(entry))]
        else:
            runs |= dict.fromkeys(found)
        undecided |= {_place(run) for run in found if not (run.seed or run.test)}
    return Wanted(list(runs), dict(waiting))


def _place(run: Tuned) -> Place:
    return run.arm, run.size, run.tokens


def resolve(entry: str, records: Sequence[Record], undecided: Collection[Place] = frozenset()) -> list[Tuned]:
    """Return the runs that an entry means; LookupError says why its rate is not known."""
    if found := _GRID.fullmatch(entry):
        return _grid(found["arm"], float(found["low"]), float(found["high"]), found["more"], records)
    if found := _BEST.fullmatch(entry):
        return [_best(found, records, undecided)]
    return [Tuned.named(entry)]


def _grid(arm: str, low: float, high: float, more: str, records: Sequence[Record]) -> list[Tuned]:
    """Return the runs of a grid, which grows beyond the best rate while that is at an edge."""

    def at(rate: float) -> Tuned:
        return Tuned.named(f"{arm}, {rate:g}{more}")

    losses = {Tuned.of(record): record["val_loss"] for record in records}
    rates = [low]
    while rates[-1] < 0.999 * high:
        rates.append(2 * rates[-1])
    while all(at(rate) in losses for rate in rates):
        known = {rate: loss for rate in rates if (loss := losses[at(rate)]) is not None}
        if not known or (lowest := min(known, key=lambda rate: known[rate])) not in (rates[0], rates[-1]):
            break
        rates = [rates[0] / 2, *rates] if lowest == rates[0] else [*rates, 2 * rates[-1]]
    return [at(rate) for rate in rates]


def _about(entry: re.Match[str] | None) -> Tuned:
    """Return the run of an entry with a best rate, but for what is best."""
    assert entry is not None
    return Tuned.named(f"{entry['arm']}, 1{entry['more']}")


def _best(entry: re.Match[str], records: Sequence[Record], undecided: Collection[Place]) -> Tuned:
    run, more = _about(entry), entry["more"]
    known = {tokens: mean.schedule for tokens, mean in best(records, run.arm, run.size).items()}
    tokens = float(entry["at"] or _nearest(run.tokens, list(known)))
    for of in (float(entry["at"] or run.tokens), tokens):
        if (run.arm, run.size, of) in undecided:
            raise LookupError(f"the best of {run.arm}, size {run.size}, {of:g} tokens, is not decided")
    if tokens not in known:
        raise LookupError(f"nothing is known of {run.arm}, size {run.size}, {tokens:g} tokens")
    rate, beta2, batch, warmup = known[tokens]
    rate *= {"half": 0.5, "twice": 2.0, None: 1.0}[entry["times"]]
    found = {"beta2": beta2, "batch": batch, "warmup": warmup}
    kept = [f", {key} {value:g}" for key, value in found.items() if f", {key} " not in more]
    return Tuned.named(f"{run.arm}, {rate:g}{''.join(kept)}{more}")


def _nearest(tokens: float, known: Sequence[float]) -> float:
    """Return the most tokens that are known up to some, or else the fewest above; these if none are."""
    fewer = [other for other in known if other <= tokens]
    return max(fewer) if fewer else min(known, default=tokens)


def train_plan(
    entries: Sequence[str],
    records: Callable[[], Sequence[Record]],
    places: tuple[Path, Path, Path],
    until: float,
    processes: int,
    tell: Callable[[str], None],
) -> None:
    """Train what is next until nothing is that can end in time; `places` are data, scratch and kept.

    Other processes may do the same: while they train runs that decide about others, this one waits. A run
    that fails is told, and not tried again by this process, which ends with a ValueError then.
    """
    data, scratch, kept = places
    failed: set[Tuned] = set()

    def can_begin(run: Tuned) -> bool:
        in_time = time.time() + seconds_left(run, scratch, processes) < until
        return in_time and run not in failed and not (kept / f"{run.slug}.json").exists()

    def trained(run: Tuned) -> bool:
        try:
            return train_kept(run, data, scratch, kept, tell, quiet=True)
        except (RuntimeError, ValueError) as error:
            tell(f"{run.name} failed: {error}")
            failed.add(run)
            return True

    while next_runs := [run for run in wanted(entries, records()).runs if can_begin(run)]:
        if not any(map(trained, next_runs)):
            time.sleep(WAIT)
    if failed:
        raise ValueError(f"these runs failed: {'; '.join(sorted(run.name for run in failed))}")


def seconds_left(run: Tuned, scratch: Path, processes: int) -> float:
    """Estimate the time that a run takes from its newest checkpoint on."""
    folder = scratch / run.slug / "checkpoints"
    done = max((int(path.name) for path in folder.glob("[0-9]*")), default=0)
    return run.seconds(processes, done)


def left(entries: Sequence[str], records: Sequence[Record], scratch: Path, processes: int) -> list[str]:
    """Return lines that say what is next in a plan, what waits for it, and how much is left."""
    runs, waiting = wanted(entries, records)
    minutes = {run: seconds_left(run, scratch, processes) / 60 for run in runs}
    lines = [f"{run.name}: {minutes[run]:.0f} minutes" for run in runs[:SHOWN]]
    lines += [f"{reason}: {len(these)} wait" for reason, these in waiting.items()]
    together = f"{sum(minutes.values()) / processes:.0f} minutes of {processes} processes"
    waits = sum(map(len, waiting.values()))
    return [*lines, f"{len(runs)} runs are left that can begin, {together}, and {waits} that wait for others"]
