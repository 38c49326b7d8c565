"""One training run, from its settings to a Hugging Face folder, resumable to the bit."""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import GenerationConfig

from tide_lm.data.loader import Batch, Loader, validation_windows
from tide_lm.evaluate.loss import held_out_loss
from tide_lm.interop import upcycle
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.ops.transfer import upload
from tide_lm.run import checkpoint, files, process_group
from tide_lm.run.directory import RunDirectory, write_result
from tide_lm.run.model_card import model_card
from tide_lm.run.settings import RunConfig, differences, is_fixed
from tide_lm.spec.estimate import count_parameters, train_flops
from tide_lm.train import optim, parallel
from tide_lm.train.gradients import GradientRecorder
from tide_lm.train.inputs import open_inputs
from tide_lm.train.monitor import Monitor
from tide_lm.train.objective import Objective, choose_parts, model_config
from tide_lm.train.speed import Speedometer, progress_line
from tide_lm.train.tables import RowLazyTables, StepRows, let_wait

NON_FINITE_LIMIT = 3
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Trainer:
    """Owns the model, the optimiser and the position in the data.

    `tell` takes lines for a person, and `advance` the number of steps done. In one process, `build` may make
    another model than TIDE of a shape, and without `row_lazy` the optimiser moves the tables as a whole. On
    several ranks each has a trainer, and all do the same in the same order; the first alone writes what is
    not a rank's own.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        tell: Callable[[str], None],
        advance: Callable[[int], None] = lambda step: None,
        resume: bool = False,
        allow_changes: bool = False,
        build: Callable[[TideConfig], TideForCausalLM] = TideForCausalLM,
        row_lazy: bool = True,
    ) -> None:
        self.config, self.run, self.tell, self.advance = config, RunDirectory(run), tell, advance
        self.resume, self.allow_changes = resume, allow_changes
        self.device = process_group.device()
        process_group.from_first(self._check)
        if not process_group.is_first():
            self.inputs = open_inputs(config.data, config.model)
        if config.data.verify:
            self._verify()
        self.loader = Loader(
            self.inputs.train,
            config.data.sequence,
            config.train.batch,
            config.train.seed,
            process_group.rank(),
            process_group.count(),
        )
        torch.manual_seed(config.train.seed)
        shape = model_config(config, self.inputs.manifest)
        begun = process_group.from_first(lambda: bool(checkpoint.steps(self.run.checkpoints)))
        start = Path(config.model.start) if config.model.start and not begun else None
        if start is not None:
            upcycle.check_weights(start)
        if process_group.together():
            self.model = parallel.without_weights(shape)
        elif start is not None:
            self.model = TideForCausalLM.from_pretrained(
                start, config=shape, dtype=torch.float32, use_safetensors=True
            )
        else:
            self.model = build(shape)
        choose_parts(self.model, config.train)
        self.objective = Objective(self.model, config).train()
        if process_group.together():
            parallel.shard(self.objective, self.device, start)
        else:
            self.model.to(self.device)
        self.tables = self._row_lazy_tables() if row_lazy else None
        self.optimizer = optim.make_optimizer(self.model, config.optim)
        self.gradients = GradientRecorder(self.model) if config.train.record_gradients else None
        flops = train_flops(config.model.shape(), config.data.sequence)
        self.speed = Speedometer(self.device, flops / process_group.count())
        self._ahead: tuple[list[Batch], StepRows | None] | None = None
        self.step = 0
        self.non_finite = 0
        self.stopped_by = 0  # a signal, which all ranks know of
        self._signal = 0  # a signal, which this rank knows of

    def _row_lazy_tables(self) -> RowLazyTables | None:
        memory = self.model.model.tables
        if memory is None:
            return None
        dtype = torch.bfloat16 if self.objective.in_bfloat16 else memory.weight.dtype
        return RowLazyTables(memory, self.config.optim, dtype, self.model.config.memory_gain_init == 0)

    def _check(self) -> None:
        """All that can be wrong with a run before a model is built."""
        self._check_run()
        if process_group.together():
            self.config.check_ranks(process_group.count())
        self.monitor = Monitor(self.run.path, self.config.train.tensorboard, self.config.train.wandb)
        self.inputs = open_inputs(self.config.data, self.config.model)

    def _verify(self) -> None:
        """Compares checksums of the data, each rank those of its share."""
        fault = None
        try:
            self.inputs.train.verify(process_group.rank(), process_group.count())
            self.inputs.validation.verify(process_group.rank(), process_group.count())
        except ValueError as error:
            fault = str(error)
        if faults := [fault for fault in process_group.gather(fault) if fault is not None]:
            raise ValueError(faults[0])

    def _check_run(self) -> None:
        """Check that the folder is free, or holds a run with these settings that is to be resumed."""
        before = self.run.read_config()
        if not self.resume and (before is not None or checkpoint.steps(self.run.checkpoints)):
            raise ValueError(f"{self.run.path} holds a run already: add --resume, or choose another --run")
        if before is not None:
            self._refuse_changes(before)

    def _refuse_changes(self, before: dict[str, Any]) -> None:
        """Refuse changed settings, but of places: shards are verified by their checksums."""
        changed = differences(RunConfig.from_saved(before), self.config)
        changed = [line for line in changed if not line.startswith(("data.path:", "model.start:"))]
        fixed = [line for line in changed if is_fixed(line)]
        if fixed:
            raise ValueError(f"{self.run.path} has begun, and cannot change\n  " + "\n  ".join(fixed))
        if changed and not self.allow_changes:
            raise ValueError(
                f"the settings differ from those of {self.run.path}:\n  "
                + "\n  ".join(changed)
                + "\nput them back, or add --allow-changes"
            )

    def train(self) -> dict[str, Any]:
        """Runs to the last step, or to a signal; returns the last validation, empty if there was none."""
        with process_group.first_opens(self.run.locked):
            process_group.from_first(self._check_run)
            self._begin()
            previous = {number: signal.signal(number, self._stop) for number in SIGNALS}
            try:
                return self._loop()
            finally:
                if process_group.is_first():
                    self.monitor.close()
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _begin(self) -> None:
        found = checkpoint.newest(self.run.checkpoints, self.tell)
        if found is not None:
            self._restore(found)
        process_group.from_first(self._open_run)

    def _open_run(self) -> None:
        """Brings the run's folder to the step at which it stands, and says what is done."""
        settings = self.config.train
        if self.step > settings.steps:
            raise ValueError(
                f"{self.run.path} stands at step {self.step:,}, and train.steps is {settings.steps:,}: "
                "set at least as many"
            )
        self.monitor.open()
        checkpoint.remove_after(self.run.checkpoints, self.step)
        self.run.cut_metrics(self.step)
        logged = self.step - self.step % settings.log_every
        if self.run.last_metrics().get("step", 0) < logged:
            self.tell(f"{self.run.metrics} lacks what was recorded up to step {logged:,}")
        self._keep_start()
        files.write_atomically(self.run.config, json.dumps(self.config.to_dict(), indent=2) + "\n")
        tokens = settings.batch * self.config.data.sequence
        self.tell(
            f"{self.config.model.name}: {count_parameters(self.config.model.shape()).total:,} parameters, "
            f"{settings.steps:,} steps of {tokens:,} tokens, {settings.dtype} on "
            f"{f'{process_group.count()} x ' if process_group.together() else ''}{self.device.type}"
        )
        if settings.dtype == "bfloat16" and self.device.type == "cpu":
            self.tell("bfloat16 is very slow on many CPUs: train.dtype=float32 may be faster")
        used, has = self.inputs.manifest.vocab_size, self.model.config.vocab_size
        if used < 0.9 * has and not self.config.model.start:
            self.tell(
                f"the data use {used:,} of the model's {has:,} ids: model.vocab_size={used} saves the rest"
            )
        if self.config.model.start and not Path(self.config.model.start, "tokenizer.json").is_file():
            self.tell(f"{self.config.model.start} has no tokenizer: that of the data is taken for its own")
        if self.model.model.memory is not None:
            self.tell(f"tables: {self.config.table_policy}")
        if settings.parts != "all":
            self.tell(f"trained: the memory; all else stays as it is in {self.config.model.start}")

    def _keep_start(self) -> None:
        """Keep what is needed of the start's folder, once its weights are in a checkpoint."""
        start, kept = Path(self.config.model.start), self.run.start_of(self.config.model.start)
        if self.config.model.start and not kept.exists():
            with files.write_folder(kept) as folder:
                for name in ("config.json", "generation_config.json"):
                    if (start / name).is_file():
                        shutil.copyfile(start / name, folder / name)

    def _loop(self) -> dict[str, Any]:
        settings = self.config.train
        validation = self._last_validation()
        while self.step < settings.steps:
            record = self._train_step()
            self.step += 1
            self.advance(self.step)
            last, stopping = self.step == settings.steps, self.stopped_by > 0
            if last or _due(self.step, settings.validate_every):
                record |= {"validation": self._validate(), "sample": self.sample()}
                validation = {"step": self.step, **record["validation"]}
            if "validation" in record or _due(self.step, settings.log_every):
                process_group.from_first(partial(self._log, record))
            saving = _due(self.step, settings.checkpoint_every) or _due(self.step, settings.keep_every)
            if last or stopping or saving:
                self._save()
            if stopping and not last:
                self.tell(f"stopped by a signal at step {self.step:,}: resume to go on")
                return validation
        if validation.get("step") != self.step:  # fewer steps were set, and they were done
            validation = {"step": self.step, **self._validate()}
        process_group.from_first(lambda: self._write_results(validation))
        self._export(validation)
        return validation

    def _write_results(self, validation: dict[str, Any]) -> None:
        if self.gradients is not None:
            self.gradients.write(self.run.path, self.config.train.seed)
        write_result(self.run.path, "validation", validation, self.config.train.seed)

    def _last_validation(self) -> dict[str, Any]:
        last = process_group.from_first(self.run.last_metrics)
        return {"step": last["step"], **last["validation"]} if "validation" in last else {}

    def _train_step(self) -> dict[str, Any]:
        """One optimiser step over a global batch, in micro-batches."""
        started = time.monotonic()
        settings = self.config
        micro_batches, rows = self._ahead or self._prepare()
        self.loader.advance()
        pieces = len(micro_batches)
        total = torch.zeros((), device=self.device)
        if self.tables is not None and rows is not None:
            self.tables.begin(rows)
        for number, (ids, wanted) in enumerate(micro_batches):
            lent = None if self.tables is None else self.tables.lend(number)
            objective, per_token = self.objective(ids, wanted, lent)
            (objective / pieces).backward()
            if self.tables is not None and lent is not None:
                self.tables.take_back(number, lent)
            total += per_token.mean() / (pieces * process_group.count())
        if self.tables is not None:
            self.tables.collect()
        norm = optim.gradient_norm(self.model, self.tables)
        process_group.add_up(total)
        self.stopped_by = process_group.largest(self._signal)
        rate = optim.learning_rate(self.step, settings.train.steps, settings.optim)
        self._ahead = self._prepare()  # while the device is at work, and before it is waited for
        loss, size = total.item(), norm.item()
        if self._is_finite(loss, size):
            if self.gradients is not None:  # which takes gradients as they are, before clipping
                self.gradients.collect(self.tables)
            if self.tables is None and self.model.config.memory_gain_init == 0:
                let_wait(self.model.model.tables)
            optim.step(self.optimizer, self.tables, rate, settings.optim, norm, ahead=self._ahead[1])
        elif self.gradients is not None:
            self.gradients.forget()
        self.optimizer.zero_grad()
        self.speed.add(settings.train.batch * settings.data.sequence, time.monotonic() - started)
        return {
            "step": self.step + 1,
            "tokens": self.loader.windows * settings.data.sequence,
            "loss": loss if math.isfinite(loss) else None,
            "gradient_norm": size if math.isfinite(size) else None,
            "learning_rate": rate,
        }

    def _prepare(self) -> tuple[list[Batch], StepRows | None]:
        """The next step's micro-batches and their rows, on their way to the device."""
        at_once = self.config.train.windows_at_once(process_group.count())
        inputs, targets = (part.split(at_once) for part in self.loader.peek())
        rows = None if self.tables is None else self.tables.prepare(inputs)
        batches = zip(inputs, targets, strict=True)
        return [(upload(ids, self.device), upload(wanted, self.device)) for ids, wanted in batches], rows

    def _is_finite(self, loss: float, norm: float) -> bool:
        """Tell whether the step counts; it is left out if not, and several in a row end the run."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.non_finite = 0
            return True
        self.non_finite += 1
        batch = f"windows {self.loader.windows - self.loader.batch} to {self.loader.windows - 1} of the order"
        told = f"step {self.step + 1:,} is not finite (loss {loss}, gradient norm {norm}; {batch})"
        if self.non_finite == NON_FINITE_LIMIT:
            damaged = self.config.model.start and self.step < NON_FINITE_LIMIT
            cure = f"{self.config.model.start} may be damaged" if damaged else "lower optim.max_lr"
            raise ValueError(f"{told}, {NON_FINITE_LIMIT} times in a row: {cure}")
        self.tell(f"{told}: left out")
        return False

    def _log(self, record: dict[str, Any]) -> None:
        record["timing"] = self.speed.take(self.config.train.steps - self.step)
        self.run.add_metrics(record)
        self.monitor.add(record)
        self.tell(progress_line(record, self.config.train.steps))
        if "sample" in record:
            self.tell(f"it writes: {record['sample']!r}")

    def _validate(self) -> dict[str, Any]:
        settings = self.config
        windows = validation_windows(
            self.inputs.validation,
            settings.data.sequence,
            settings.train.validation_sequences,
            settings.train.windows_at_once(process_group.count()),
            process_group.rank(),
            process_group.count(),
        )

        def per_token(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            own = targets.numel()
            if not own:  # a rank that has no window left takes part all the same
                inputs = targets = torch.zeros(1, settings.data.sequence, dtype=torch.long)
            return self.objective(inputs.to(self.device), targets.to(self.device)).per_token_N[:own]

        with self._evaluating():
            return held_out_loss(per_token, windows, self.inputs.bins, process_group.add_up)

    def sample(self) -> str:
        """What the model writes after the beginning of a document, the likeliest token each time."""
        start = self.inputs.manifest.bos_token_id
        ids = torch.tensor([[0 if start is None else start]], device=self.device)
        with self._evaluating(), self.objective.precision(self.device):
            parallel.gather(self.objective)
            written = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=32,
                do_sample=False,
                pad_token_id=0,
                synced_gpus=process_group.together(),
            )
        return self.inputs.tokenizer.decode(written[0], skip_special_tokens=True)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model as it stands, and not compiled: validation and generation have shapes of their own."""
        self._flush()
        self.objective.eval()
        with torch.compiler.set_stance("force_eager"):
            yield
        parallel.spread(self.objective)
        self.objective.train()

    def _flush(self) -> None:
        """Bring all rows up to date, before the model is read as a whole."""
        if self.tables is not None:
            self.tables.flush()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors but the tables', by name; moments exist from the start, for loading to fill them."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
        for parameter, name in names.items():
            if not parameter.requires_grad:
                continue
            state = self.optimizer.state[parameter]
            if not state:
                # A fused optimiser counts on the device, others on the host.
                fused = self.optimizer.defaults["fused"]
                state["step"] = torch.zeros((), device=parameter.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"optimizer.{key}.{name}": value for key, value in state.items()}
        if self.gradients is not None:
            tensors |= {f"gradients.{name}": value for name, value in self.gradients.squared.items()}
        return tensors

    def _save(self) -> None:
        self._flush()
        tensors = self._tensors()
        if self.tables is not None:
            tensors |= self.tables.to_checkpoint()
        state = {
            "step": self.step,
            "tokens": self.loader.windows * self.config.data.sequence,
            "non_finite": self.non_finite,
            "table_steps": 0 if self.tables is None else self.tables.history.steps,
            "loader": self.loader.state_dict(),
            "model": self.model.config.to_diff_dict(),
            "config": self.config.to_dict(),
        }
        checkpoint.save(self.run.checkpoints, self.step, tensors, state)
        keep, every = self.config.train.keep, self.config.train.keep_every
        process_group.from_first(lambda: checkpoint.prune(self.run.checkpoints, keep, every))

    def _restore(self, path: Path) -> None:
        state = checkpoint.read_state(path)
        self._refuse_changes(state["config"])
        room = {} if self.tables is None else self.tables.room(state["table_steps"])
        checkpoint.load(path, self._tensors() | room)
        if self.tables is not None:
            self.tables.from_checkpoint(room)
        self.step, self.non_finite = state["step"], state["non_finite"]
        self.loader.load_state_dict(state["loader"])
        self._ahead = None
        self.tell(f"resumed from step {self.step}")

    def _export(self, validation: dict[str, Any]) -> None:
        """A Hugging Face folder with its tokenizer, whole or not at all."""
        kept = Path(self.config.model.start, "generation_config.json")
        if has_kept := bool(self.config.model.start) and kept.is_file():
            self.model.generation_config = GenerationConfig()  # some that are used cannot be saved
        with process_group.first_opens(lambda: files.write_folder(self.run.export)) as folder:
            if process_group.together():
                parallel.save_pretrained(self.model, folder)
            else:
                try:
                    self.model.save_pretrained(folder)
                except SafetensorError as error:  # of a full disk, above all
                    raise OSError(f"{self.run.export}: {error}") from error
            if process_group.is_first():
                if has_kept:
                    shutil.copyfile(kept, folder / kept.name)
                self.inputs.tokenizer.save_pretrained(folder)
                tokens = self.loader.windows * self.config.data.sequence
                card = model_card(self.run.path.name, self.config, tokens, {"validation": validation})
                (folder / "README.md").write_text(card, encoding="utf-8")
        self.tell(f"exported to {self.run.export}")

    def _stop(self, number: int, _: Any) -> None:
        """The first signal ends the run after the present step; a second interrupt ends it at once."""
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = number


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
