"""One training run, from its settings to a Hugging Face folder, resumable to the bit."""

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tide_lm import checkpoint, runs
from tide_lm.data.loader import Batch, Loader, validation_windows
from tide_lm.estimate import train_flops
from tide_lm.evaluate.loss import held_out_loss
from tide_lm.model import TideForCausalLM
from tide_lm.model_card import model_card
from tide_lm.ops.memory_rows import RowIndex
from tide_lm.ops.transfer import upload
from tide_lm.run_config import RunConfig, differences, is_fixed
from tide_lm.train import optim
from tide_lm.train.gradients import GradientRecorder
from tide_lm.train.inputs import open_inputs
from tide_lm.train.monitor import Monitor
from tide_lm.train.objective import Objective, model_config
from tide_lm.train.speed import Speedometer, progress_line
from tide_lm.train.tables import RowLazyTables

NON_FINITE_LIMIT = 3
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Trainer:
    """Owns the model, the optimiser and the position in the data.

    `tell` takes lines for a person, and `advance` the number of steps done. `shard` may replace the
    objective's parameters in place, before the optimiser takes them.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Path,
        tell: Callable[[str], None],
        advance: Callable[[int], None] = lambda step: None,
        resume: bool = False,
        allow_changes: bool = False,
        shard: Callable[[nn.Module], None] = lambda objective: None,
    ) -> None:
        self.config, self.run, self.tell, self.advance = config, runs.RunDirectory(run), tell, advance
        self.resume, self.allow_changes = resume, allow_changes
        self._check_run()
        self.monitor = Monitor(self.run.path, config.train.tensorboard, config.train.wandb)
        self.inputs = open_inputs(config.data, config.model)
        self.loader = Loader(self.inputs.train, config.data.sequence, config.train.batch, config.train.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(config.train.seed)
        self.model = TideForCausalLM(model_config(config, self.inputs.manifest)).to(self.device)
        self.objective = Objective(self.model, config).train()
        shard(self.objective)
        self.tables = self._row_lazy_tables()
        self.optimizer = optim.make_optimizer(self.model, config.optim)
        self.gradients = GradientRecorder(self.model) if config.train.record_gradients else None
        self.speed = Speedometer(self.device, train_flops(config.model.shape(), config.data.sequence))
        self._ahead: tuple[list[Batch], list[RowIndex]] | None = None
        self.step = 0
        self.non_finite = 0
        self.stopped_by: int | None = None  # a signal

    def _row_lazy_tables(self) -> RowLazyTables | None:
        memory = self.model.model.memory
        if memory is None or self.config.optim.table_update == "dense":
            return None
        dtype = torch.bfloat16 if self.objective.in_bfloat16 else memory.weight.dtype
        return RowLazyTables(memory, self.config.optim, self.model.config.num_hidden_layers, dtype)

    def _check_run(self) -> None:
        """That the folder is free, or holds a run with these settings that is to be resumed."""
        before = self.run.read_config()
        if not self.resume and (before is not None or checkpoint.steps(self.run.checkpoints)):
            raise ValueError(f"{self.run.path} holds a run already: add --resume, or choose another --run")
        if before is not None:
            self._refuse_changes(before)

    def _refuse_changes(self, before: dict[str, Any]) -> None:
        """Where the data lie may change: the loader knows them by their checksums."""
        changed = differences(RunConfig.from_dict(before), self.config)
        changed = [line for line in changed if not line.startswith("data.path:")]
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
        with self.run.locked():
            self._check_run()
            self._begin()
            previous = {number: signal.signal(number, self._stop) for number in SIGNALS}
            try:
                return self._loop()
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _begin(self) -> None:
        found = checkpoint.newest(self.run.checkpoints, self.tell)
        if found is not None:
            self._restore(found)
        settings = self.config.train
        if self.step > settings.steps:
            raise ValueError(
                f"{self.run.path} stands at step {self.step:,}, and train.steps is {settings.steps:,}: "
                "set at least as many"
            )
        checkpoint.remove_after(self.run.checkpoints, self.step)
        self.run.cut_metrics(self.step)
        logged = self.step - self.step % settings.log_every
        if self.run.last_metrics().get("step", 0) < logged:
            self.tell(f"{self.run.metrics} lacks what was recorded up to step {logged:,}")
        runs.write_atomically(self.run.config, json.dumps(self.config.to_dict(), indent=2) + "\n")
        tokens = settings.batch * self.config.data.sequence
        self.tell(
            f"{self.config.model.preset}: {self.model.num_parameters():,} parameters, "
            f"{settings.steps:,} steps of {tokens:,} tokens, {settings.dtype} on {self.device.type}"
        )
        used, has = self.inputs.manifest.vocab_size, self.model.config.vocab_size
        if used < 0.9 * has:
            self.tell(
                f"the data use {used:,} of the model's {has:,} ids: model.vocab_size={used} saves the rest"
            )
        if self.model.model.memory is not None:
            self.tell(f"tables: {self.config.optim.table_policy}")

    def _loop(self) -> dict[str, Any]:
        settings = self.config.train
        validation = self._last_validation()
        while self.step < settings.steps:
            record = self._train_step()
            self.step += 1
            self.advance(self.step)
            last, stopping = self.step == settings.steps, self.stopped_by is not None
            if last or _due(self.step, settings.validate_every):
                record |= {"validation": self._validate(), "sample": self.sample()}
                validation = {"step": self.step, **record["validation"]}
            if "validation" in record or _due(self.step, settings.log_every):
                self._log(record)
            saving = _due(self.step, settings.checkpoint_every) or _due(self.step, settings.keep_every)
            if last or stopping or saving:
                self._save()
            if stopping and not last:
                self.tell(f"stopped by a signal at step {self.step:,}: resume to go on")
                return validation
        if validation.get("step") != self.step:  # fewer steps were set, and they were done
            validation = {"step": self.step, **self._validate()}
        if self.gradients is not None:
            self.gradients.write(self.run.path, settings.seed)
        runs.write_result(self.run.path, "validation", validation, settings.seed)
        self._export(validation)
        return validation

    def _last_validation(self) -> dict[str, Any]:
        last = self.run.last_metrics()
        return {"step": last["step"], **last["validation"]} if "validation" in last else {}

    def _train_step(self) -> dict[str, Any]:
        """One optimiser step over a global batch, in micro-batches."""
        started = time.monotonic()
        settings = self.config
        micro_batches, indices = self._ahead or self._prepare()
        self.loader.advance()
        pieces = len(micro_batches)
        total = torch.zeros((), device=self.device)
        if self.tables is not None:
            self.tables.begin(indices)
        for number, (ids, wanted) in enumerate(micro_batches):
            memory = None if self.tables is None else self.tables.lend(number)
            objective, per_token = self.objective(ids, wanted, memory)
            (objective / pieces).backward()
            if self.tables is not None:
                self.tables.take_back()
            total += per_token.mean() / pieces
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        if self.tables is not None:
            gradients.append(self.tables.gradient_UKD)
        norm = torch.nn.utils.get_total_norm(gradients)
        rate = optim.learning_rate(self.step, settings.train.steps, settings.optim)
        self._ahead = self._prepare()  # while the device is at work, and before it is waited for
        loss, size = total.item(), norm.item()
        if self._is_finite(loss, size):
            if self.gradients is not None:  # which takes gradients as they are, before clipping
                self.gradients.collect(self.tables)
            optim.step(self.optimizer, self.tables, rate, settings.optim, norm)
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

    def _prepare(self) -> tuple[list[Batch], list[RowIndex]]:
        """The next step's micro-batches and their rows, on their way to the device."""
        inputs, targets = self.loader.peek()
        pieces = self.config.train.batch // self.config.train.windows_at_once
        parts = list(zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True))
        indices = [] if self.tables is None else [RowIndex.of(ids).to(self.device) for ids, _ in parts]
        uploaded = [(upload(ids, self.device), upload(wanted, self.device)) for ids, wanted in parts]
        return uploaded, indices

    def _is_finite(self, loss: float, norm: float) -> bool:
        """Whether the step counts; it is left out if not, and several in a row end the run."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.non_finite = 0
            return True
        self.non_finite += 1
        batch = f"windows {self.loader.windows - self.loader.batch} to {self.loader.windows - 1} of the order"
        told = f"step {self.step + 1:,} is not finite (loss {loss}, gradient norm {norm}; {batch})"
        if self.non_finite == NON_FINITE_LIMIT:
            raise ValueError(f"{told}, {NON_FINITE_LIMIT} times in a row: lower optim.max_lr")
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
            settings.train.windows_at_once,
        )

        def per_token(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return self.objective(inputs.to(self.device), targets.to(self.device)).per_token_N

        with self._evaluating():
            return held_out_loss(per_token, windows, self.inputs.bins)

    def sample(self) -> str:
        """What the model writes after the beginning of a document, the likeliest token each time."""
        start = self.inputs.manifest.bos_token_id
        ids = torch.tensor([[0 if start is None else start]], device=self.device)
        with self._evaluating():
            written = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0
            )
        return self.inputs.tokenizer.decode(written[0], skip_special_tokens=True)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model as it stands, and not compiled: validation and generation have shapes of their own."""
        self._flush()
        self.objective.eval()
        with torch.compiler.set_stance("force_eager"):
            yield
        self.objective.train()

    def _flush(self) -> None:
        """Before the model is read as a whole."""
        if self.tables is not None:
            self.tables.flush()

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the run by name; the moments exist from the start, so that loading can fill them."""
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
        if self.tables is not None:
            tensors |= {f"tables.{name}": value for name, value in self.tables.tensors().items()}
        if self.gradients is not None:
            tensors |= {f"gradients.{name}": value for name, value in self.gradients.squared.items()}
        return tensors

    def _save(self) -> None:
        self._flush()
        tensors = self._tensors()
        rates = None if self.tables is None else self.tables.history.rates
        if rates is not None and len(rates):
            tensors["tables.rates"] = rates
        state = {
            "step": self.step,
            "tokens": self.loader.windows * self.config.data.sequence,
            "non_finite": self.non_finite,
            "table_steps": 0 if rates is None else len(rates),
            "loader": self.loader.state_dict(),
            "model": self.model.config.to_diff_dict(),
            "config": self.config.to_dict(),
        }
        checkpoint.save(self.run.checkpoints, self.step, tensors, state)
        checkpoint.prune(self.run.checkpoints, self.config.train.keep, self.config.train.keep_every)

    def _restore(self, path: Path) -> None:
        state = checkpoint.read_state(path)
        self._refuse_changes(state["config"])
        tensors = self._tensors()
        if self.tables is not None and state["table_steps"]:
            tensors["tables.rates"] = torch.zeros(state["table_steps"], dtype=torch.float64)
        checkpoint.load(path, tensors)
        if self.tables is not None:
            self.tables.set_rates(tensors.get("tables.rates"))
        self.step, self.non_finite = state["step"], state["non_finite"]
        self.loader.load_state_dict(state["loader"])
        self._ahead = None
        self.tell(f"resumed from step {self.step}")

    def _export(self, validation: dict[str, Any]) -> None:
        """A Hugging Face folder with its tokenizer, whole or not at all."""
        with runs.write_folder(self.run.export) as folder:
            self.model.save_pretrained(folder)
            self.inputs.tokenizer.save_pretrained(folder)
            tokens = self.loader.windows * self.config.data.sequence
            card = model_card(self.run.path.name, self.config, tokens, {"validation": validation})
            (folder / "README.md").write_text(card, encoding="utf-8")
        self.tell(f"exported to {self.run.export}")

    def _stop(self, number: int, _: Any) -> None:
        """The first signal ends the run after the present step; a second interrupt ends it at once."""
        if self.stopped_by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stopped_by = number


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
