"""The training loop of one run, resumable to the bit."""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tide_lm.data.loader import Batch, Loader
from tide_lm.model import TideForCausalLM
from tide_lm.ops.transfer import upload
from tide_lm.run import checkpoint, files, process_group
from tide_lm.run.directory import RunDirectory, write_result
from tide_lm.run.model_card import model_card
from tide_lm.run.settings import RunConfig
from tide_lm.spec.estimate import count_parameters, train_flops
from tide_lm.training import optim, schedule
from tide_lm.training.build import MakeModel, build_objective, build_row_optimizer
from tide_lm.training.checks import check_changes, check_folder, doubts
from tide_lm.training.export import export
from tide_lm.training.gradient_recorder import GradientRecorder
from tide_lm.training.held_out import HeldOut
from tide_lm.training.inputs import open_inputs, verify
from tide_lm.training.monitor import Monitor
from tide_lm.training.row_optimizer import StepRows, gains_are_zero
from tide_lm.training.schedule import Decay, learning_rate
from tide_lm.training.speed import Speedometer, progress_line

NON_FINITE_LIMIT = 3
SLOW_STEP = 3  # seconds, after which a person would wonder
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StepBatch(NamedTuple):
    """One step's micro-batches on the device, and their rows of the tables if the model has any."""

    micro_batches: list[Batch]
    rows: StepRows | None


class Trainer:
    """Owns the model, the optimisers and the position in the data.

    `log` takes messages for a person, and `progress` the number of steps done. In one process, `make_model`
    may make another model than TIDE, and without `row_lazy` AdamW trains the tables as a whole.
    With several processes each has a trainer, and all do the same in the same order; only the first writes
    what all share.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        log: Callable[[str], None],
        progress: Callable[[int], None] = lambda step: None,
        resume: bool = False,
        allow_changes: bool = False,
        make_model: MakeModel = TideForCausalLM,
        row_lazy: bool = True,
    ) -> None:
        self.config, self.run, self.log, self.progress = config, RunDirectory(run), log, progress
        self.resume, self.allow_changes = resume, allow_changes
        self.device = process_group.device()
        rank, world_size = process_group.rank(), process_group.world_size()
        process_group.run_on_first(self._check_run)
        if process_group.is_distributed():
            config.check_processes(world_size)
        self.monitor = Monitor(run, config.train.tensorboard, config.train.wandb)
        self.inputs = open_inputs(config.data, config.model)
        if config.data.verify:
            verify(self.inputs)
        self.loader = Loader(
            self.inputs.train, config.data.sequence, config.train.batch, config.train.seed, rank, world_size
        )
        begun = process_group.run_on_first(lambda: bool(checkpoint.steps(self.run.checkpoints)))
        start = Path(config.model.start) if config.model.start and not begun else None
        self.objective = build_objective(config, self.inputs.manifest, start, make_model)
        self.model = self.objective.model
        self.row_optimizer = build_row_optimizer(self.objective, config.optim) if row_lazy else None
        self.optimizer = optim.make_optimizer(self.model, config.optim)
        self.held_out = HeldOut(config, self.inputs, self.objective, self.row_optimizer)
        self.recorder = GradientRecorder(self.model) if config.train.record_gradients else None
        flops = train_flops(config.model.shape(), config.data.sequence)
        self.speed = Speedometer(self.device, flops / world_size)
        self._ahead: StepBatch | None = None
        self.step = 0
        self.decay: Decay | None = None  # that of the settings
        self.non_finite = 0
        self.stopped_by = 0  # the signal that all ranks know of
        self._signal = 0  # the signal that this rank knows of

    def _check_run(self) -> None:
        check_folder(self.run, self.config, self.resume, self.allow_changes)

    @property
    def status(self) -> int:
        """The exit status, as a shell says it: 128 and the signal that ended the run before its last step."""
        return 128 + self.stopped_by if self.stopped_by and self.step < self.config.train.steps else 0

    def train(self) -> dict[str, Any]:
        """Train to the last step, or to a signal; return the last validation, empty if there was none."""
        with process_group.open_on_first(self.run.locked):
            process_group.run_on_first(self._check_run)
            found = checkpoint.newest(self.run.checkpoints, self.log)
            if found is not None:
                self._restore(found)
            process_group.run_on_first(self._open_run)
            previous = {number: signal.signal(number, self._stop) for number in SIGNALS}
            try:
                return self._loop()
            finally:
                if process_group.is_first():
                    self.monitor.close()
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _open_run(self) -> None:
        """Bring the run's folder to the step at which the run stands, and log what is trained."""
        steps = self.config.train.steps
        if self.step > steps:
            raise ValueError(
                f"{self.run.path} stands at step {self.step:,}, and train.steps is {steps:,}: "
                f"set it to {self.step:,} or more"
            )
        self.monitor.open()
        checkpoint.remove_after(self.run.checkpoints, self.step)
        self.run.cut_metrics(self.step)
        logged = self.step - self.step % self.config.train.log_every
        if self.run.last_metrics().get("step", 0) < logged:
            self.log(f"{self.run.metrics} lacks what was recorded up to step {logged:,}")
        if start := self.config.model.start:
            self._keep_start(Path(start))
        files.write_atomically(self.run.config, json.dumps(self.config.to_dict(), indent=2) + "\n")
        self._describe()

    def _keep_start(self, start: Path) -> None:
        """Keep the configuration of the model to start from; its weights will be in a checkpoint."""
        kept = self.run.start_of(str(start))
        if not kept.exists():
            with files.write_folder(kept) as folder:
                for name in ("config.json", "generation_config.json"):
                    if (start / name).is_file():
                        shutil.copyfile(start / name, folder / name)

    def _describe(self) -> None:
        """Log what is trained on what, and what might not be meant."""
        settings, model, start = self.config.train, self.config.model, self.config.model.start
        processes = f"{process_group.world_size()} x " if process_group.is_distributed() else ""
        self.log(
            f"{model.name}: {count_parameters(model.shape()).total:,} parameters, "
            f"{settings.steps:,} steps of {self.loader.batch * self.loader.sequence:,} tokens, "
            f"{settings.dtype} on {processes}{self.device.type}"
        )
        if settings.dtype == "bfloat16" and self.device.type == "cpu":
            self.log("bfloat16 is very slow on many CPUs: train.dtype=float32 may be faster")
        for doubt in doubts(self.config, self.inputs.manifest):
            self.log(f"warning: {doubt}")
        if start and not Path(start, "tokenizer.json").is_file():
            self.log(f"{start} has no tokenizer: the tokenizer of the data is assumed to be the model's")
        if self.model.model.memory is not None:
            self.log(f"tables: {self.config.table_policy}")
        elif start:
            self.log(f"{start} has no memory, so a base is trained: `tide-lm upcycle` adds tables")
        if settings.parts != "all":
            self.log(f"only the memory is trained: all other weights of {start} stay as they are")

    def _loop(self) -> dict[str, Any]:
        settings = self.config.train
        validation = self._last_validation()
        losses: list[float | None] = []  # since the last record
        begun = self.step
        while self.step < settings.steps:
            started = time.monotonic()
            record = self._train_step()
            self.step += 1
            if self.step == begun + 2 and (seconds := time.monotonic() - started) > SLOW_STEP:
                left = timedelta(seconds=round(seconds * (settings.steps - self.step)))
                self.log(f"a step takes {seconds:.1f} s: about {left} for those left")
            losses.append(record["loss"] and round(record["loss"], 5))
            self.progress(self.step)
            last, stopping = self.step == settings.steps, self.stopped_by > 0
            if last or _is_due(self.step, settings.validate_every):
                record |= {"validation": self.held_out.validate(), "sample": self.held_out.sample()}
                validation = {"step": self.step, **record["validation"]}
            due = any(_is_due(self.step, every) for every in (settings.checkpoint_every, settings.keep_every))
            saving = last or stopping or due
            if "validation" in record or saving or _is_due(self.step, settings.log_every):
                process_group.run_on_first(partial(self._log, record | {"losses": losses}))
                losses = []
            if saving:
                self._save()
            if stopping and not last:
                self.log(f"stopped by a signal at step {self.step:,}: add --resume to continue")
                return validation
        if validation.get("step") != self.step:  # train.steps was lowered to a step that is done
            validation = {"step": self.step, **self.held_out.validate()}
        process_group.run_on_first(partial(self._write_results, validation))
        tokens = self.loader.windows * self.loader.sequence
        card = model_card(self.run.path.name, self.config, tokens, {"validation": validation})
        export(self.model, self.inputs.tokenizer, card, self.run.export, self.config.model.start)
        self.log(f"exported to {self.run.export}")
        return validation

    def _write_results(self, validation: dict[str, Any]) -> None:
        if self.recorder is not None:
            self.recorder.write(self.run.path, self.config.train.seed)
        write_result(self.run.path, "validation", validation, self.config.train.seed)

    def _last_validation(self) -> dict[str, Any]:
        last = process_group.run_on_first(self.run.last_metrics)
        return {"step": last["step"], **last["validation"]} if "validation" in last else {}

    def _train_step(self) -> dict[str, Any]:
        """Take one optimiser step over a global batch, and return its record."""
        started = time.monotonic()
        batch = self._ahead or self._prepare()
        self.loader.advance()
        mean_loss = self._accumulate_gradients(batch)
        gradient_norm = optim.gradient_norm(self.model, self.row_optimizer)
        process_group.all_sum(mean_loss)
        self.stopped_by = process_group.all_max(self._signal)
        rate = learning_rate(self.step, self.config.train.steps, self.config.optim, self.decay)
        self._ahead = self._prepare()  # while the GPU works, and before the host waits for it
        loss, norm = mean_loss.item(), gradient_norm.item()
        if self._is_finite(loss, norm):
            self._step_optimizers(rate, gradient_norm)
        elif self.recorder is not None:
            self.recorder.forget()
        self.optimizer.zero_grad()
        self.speed.add(self.loader.batch * self.loader.sequence, time.monotonic() - started)
        return {
            "step": self.step + 1,
            "tokens": self.loader.windows * self.loader.sequence,
            "loss": loss if math.isfinite(loss) else None,
            "gradient_norm": norm if math.isfinite(norm) else None,
            "learning_rate": rate,
        }

    def seconds_of_a_step(self) -> float:
        """Take two steps, which are not recorded, and return the time of the second."""
        self._train_step()
        started = time.monotonic()
        self._train_step()
        return time.monotonic() - started

    def _prepare(self) -> StepBatch:
        """Start to copy the next step's micro-batches and their rows to the device."""
        size = self.config.train.micro_batch_size(self.loader.world_size)
        batch = [part.split(size) for part in self.loader.peek()]
        rows = None if self.row_optimizer is None else self.row_optimizer.prepare(batch[0])
        micro_batches = [
            (upload(inputs, self.device), upload(targets, self.device))
            for inputs, targets in zip(*batch, strict=True)
        ]
        return StepBatch(micro_batches, rows)

    def _accumulate_gradients(self, batch: StepBatch) -> torch.Tensor:
        """Run all micro-batches forward and backward; return this rank's part of the mean loss."""
        pieces, rows = len(batch.micro_batches), self.row_optimizer
        mean_loss = torch.zeros((), device=self.device)
        if rows is not None and batch.rows is not None:
            rows.begin(batch.rows)
        for number, (inputs, targets) in enumerate(batch.micro_batches):
            fetched = None if rows is None else rows.fetch(number)
            objective, per_token = self.objective(inputs, targets, fetched)
            (objective / pieces).backward()
            if rows is not None and fetched is not None:
                rows.accumulate(number, fetched)
            mean_loss += per_token.mean() / (pieces * process_group.world_size())
        if rows is not None:
            rows.reduce()
        return mean_loss

    def _step_optimizers(self, rate: float, gradient_norm: torch.Tensor) -> None:
        if self.recorder is not None:  # before gradients are clipped
            self.recorder.collect(self.row_optimizer)
        dense = self.model.model.tables if self.row_optimizer is None else None
        if dense and self.model.config.memory_gain_init == 0 and gains_are_zero(dense):
            dense.weight.grad = None  # or a table that learns nothing yet would decay
        ahead = None if self._ahead is None else self._ahead.rows
        optim.step(self.optimizer, self.row_optimizer, rate, self.config.optim, gradient_norm, ahead)

    def _is_finite(self, loss: float, norm: float) -> bool:
        """Tell whether the step counts; others are left out, and several of them in a row end the run."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.non_finite = 0
            return True
        self.non_finite += 1
        batch = f"windows {self.loader.windows - self.loader.batch} to {self.loader.windows - 1} of the order"
        message = f"step {self.step + 1:,} is not finite (loss {loss}, gradient norm {norm}; {batch})"
        if self.non_finite == NON_FINITE_LIMIT:
            damaged = self.config.model.start and self.step < NON_FINITE_LIMIT
            cure = f"{self.config.model.start} may be damaged" if damaged else "lower optim.max_lr"
            raise ValueError(f"{message}, {NON_FINITE_LIMIT} times in a row: {cure}")
        self.log(f"{message}: left out")
        return False

    def _log(self, record: dict[str, Any]) -> None:
        record["timing"] = self.speed.take(self.config.train.steps - self.step)
        self.run.add_metrics(record)
        self.monitor.add(record)
        self.log(progress_line(record, self.config.train.steps))
        if "sample" in record:
            self.log(f"sample: {record['sample']!r}")

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return a checkpoint's tensors by name, without those of the row optimiser."""
        tensors = optim.named_tensors(self.model, self.optimizer)
        if self.recorder is not None:
            tensors |= {f"gradients.{name}": value for name, value in self.recorder.squared.items()}
        return tensors

    def _save(self) -> None:
        rows = self.row_optimizer
        tensors = self._tensors() | ({} if rows is None else rows.to_checkpoint())
        state = {
            "step": self.step,
            "tokens": self.loader.windows * self.loader.sequence,
            "decay": self.decay,
            "non_finite": self.non_finite,
            "table_steps": 0 if rows is None else rows.history.steps,
            "loader": self.loader.state_dict(),
            "model": self.model.config.to_diff_dict(),
            "config": self.config.to_dict(),
        }
        checkpoint.save(self.run.checkpoints, self.step, tensors, state)
        keep, every = self.config.train.keep, self.config.train.keep_every
        process_group.run_on_first(lambda: checkpoint.prune(self.run.checkpoints, keep, every))

    def _restore(self, path: Path) -> None:
        state, rows = checkpoint.read_state(path), self.row_optimizer
        check_changes(self.run, state["config"], self.config, self.allow_changes)
        placeholders = {} if rows is None else rows.placeholders(state["table_steps"])
        checkpoint.load(path, self._tensors() | placeholders)
        if rows is not None:
            rows.from_checkpoint(placeholders)
        self.step, self.non_finite = state["step"], state["non_finite"]
        self.loader.load_state_dict(state["loader"])
        self._ahead = None
        self.log(f"resumed from step {self.step}")
        before, begin = RunConfig.from_saved(state["config"]), state.get("decay")
        self.decay, told = schedule.go_on(before, self.config, self.step, begin and Decay(*begin))
        if told:
            self.log(told)

    def _stop(self, number: int, _: Any) -> None:
        """Stop after the present step at the first signal, and at once at a second interrupt."""
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
