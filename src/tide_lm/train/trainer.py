"""One training run, from its settings to a Hugging Face folder, resumable to the bit."""

import json
import math
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from tide_lm import presets, runs
from tide_lm.data.frequency import FrequencyBins
from tide_lm.data.loader import Loader, validation_windows
from tide_lm.data.shards import TokenSplit
from tide_lm.estimate import train_flops
from tide_lm.evaluate.loss import held_out_loss
from tide_lm.model import TideConfig, TideForCausalLM
from tide_lm.run_config import RunConfig, differences
from tide_lm.train import checkpoint, optim
from tide_lm.train.gradients import GradientRecorder
from tide_lm.train.loss import chunked_cross_entropy
from tide_lm.train.model_card import model_card
from tide_lm.train.monitor import Monitor

NON_FINITE_LIMIT = 3
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12}  # dense bfloat16


class Trainer:
    """Owns the model, the optimiser and the position in the data; `tell` takes lines for a person."""

    def __init__(self, config: RunConfig, run: Path, tell: Callable[[str], None]) -> None:
        self.config, self.run, self.tell = config, runs.RunDirectory(run), tell
        self.data = Path(config.data.path)
        self.split = TokenSplit(self.data, "train")
        self.split.verify()
        self.bins = FrequencyBins.from_prepared(self.data)
        self.tokenizer = AutoTokenizer.from_pretrained(self.data / "tokenizer")
        self.loader = Loader(self.split, config.data.sequence, config.train.batch, config.train.seed)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device_name = torch.cuda.get_device_name() if self.device.type == "cuda" else "CPU"
        self.model = self._make_model()
        self.optimizer = optim.make_optimizer(self.model, config.optim)
        self.forward = torch.compile(self.model.model) if config.train.compile else self.model.model
        self.gradients = GradientRecorder(self.model) if config.train.record_gradients else None
        self.monitor = Monitor(self.run.path, config.train.tensorboard, config.train.wandb)
        self.step = 0
        self.non_finite = 0
        self._stopping = False

    def _make_model(self) -> TideForCausalLM:
        settings = self.config.model
        shape = presets.get(settings.preset).model
        if self.split.manifest.vocab_size > shape.vocab_size:
            raise ValueError(
                f"{self.data} was tokenised with {self.split.manifest.vocab_size:,} ids, and "
                f"{settings.preset} has {shape.vocab_size:,}: prepare the data with a smaller tokenizer, "
                "or choose another preset"
            )
        torch.manual_seed(self.config.train.seed)
        config = TideConfig.from_preset(
            settings.preset,
            memory_gain_init=settings.memory_gain_init,
            tie_word_embeddings=settings.tie_word_embeddings,
            max_position_embeddings=max(shape.max_position_embeddings, self.config.data.sequence),
            bos_token_id=self.split.manifest.bos_token_id,
            eos_token_id=self.split.manifest.eos_token_id,
        )
        model = TideForCausalLM(config).to(self.device).train()
        if self.config.train.activation_checkpointing:
            model.gradient_checkpointing_enable()
        return model

    def train(self, resume: bool = False, allow_changes: bool = False) -> dict[str, Any]:
        """Runs to the last step, or to a signal; returns the last validation."""
        with self.run.locked():
            self._begin(resume, allow_changes)
            previous = signal.signal(signal.SIGTERM, self._stop)
            try:
                return self._loop()
            finally:
                signal.signal(signal.SIGTERM, previous)

    def _begin(self, resume: bool, allow_changes: bool) -> None:
        if self.run.config.exists() and not resume:
            raise ValueError(f"{self.run.path} holds a run already: resume it, or choose another name")
        if self.run.config.exists():
            before = RunConfig.from_dict(json.loads(self.run.config.read_text(encoding="utf-8")))
            changed = differences(before, self.config)
            if changed and not allow_changes:
                raise ValueError(
                    f"the settings differ from those of {self.run.path}:\n  "
                    + "\n  ".join(changed)
                    + "\nput them back, or allow the changes"
                )
            found = checkpoint.newest(self.run.checkpoints, self.tell)
            if found is not None:
                self._restore(found)
        self.run.cut_metrics(self.step)
        runs.write_atomically(self.run.config, json.dumps(self.config.to_dict(), indent=2) + "\n")

    def _loop(self) -> dict[str, Any]:
        settings = self.config.train
        validation: dict[str, Any] = {}
        while self.step < settings.steps:
            record = self._train_step()
            self.step += 1
            last = self.step == settings.steps
            if last or (settings.validate_every and self.step % settings.validate_every == 0):
                validation = self._validate()
                record |= {"validation": validation, "sample": self.sample()}
            if last or "validation" in record or self.step % settings.log_every == 0:
                self.run.add_metrics(record)
                self.monitor.add(record)
                self.tell(self._line(record))
            if last or self._stopping or self.step % settings.checkpoint_every == 0:
                self._save()
            if self._stopping:
                self.tell(f"stopped by a signal at step {self.step}: resume to go on")
                return validation
        if self.gradients is not None:
            self.gradients.write(runs.results_folder(self.run.path))
        runs.write_result(self.run.path, "validation", {"step": self.step, **validation}, settings.seed)
        self._export()
        return validation

    def _train_step(self) -> dict[str, Any]:
        """One optimiser step over a global batch, in micro-batches."""
        started = time.monotonic()
        settings = self.config
        inputs, targets = (part.to(self.device) for part in self.loader.next_batch())
        pieces = settings.train.batch // settings.train.micro_batch
        loss = torch.zeros((), device=self.device)
        for ids, wanted in zip(inputs.chunk(pieces), targets.chunk(pieces), strict=True):
            objective, per_token = self._loss(ids, wanted)
            (objective / pieces).backward()
            loss += per_token.mean() / pieces
        if self.gradients is not None:
            self.gradients.collect()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.optim.clip_norm)
        rate = optim.learning_rate(self.step, settings.train.steps, settings.optim)
        self._update(loss.item(), norm.item(), rate)
        seconds = time.monotonic() - started
        speed = inputs.numel() / seconds
        return {
            "step": self.step + 1,
            "tokens": self.loader.windows * settings.data.sequence,
            "loss": loss.item(),
            "gradient_norm": norm.item(),
            "learning_rate": rate,
            "timing": {"tokens_per_s": round(speed, 1), "mfu": self._mfu(speed)},
        }

    def _loss(self, ids: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = self.config.train.dtype == "bfloat16"
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=half):
            hidden = self.forward(ids, use_cache=False).last_hidden_state
            return chunked_cross_entropy(
                hidden.flatten(0, 1), self.model.lm_head.weight, wanted.flatten(), self.config.optim.z_loss
            )

    def _update(self, loss: float, norm: float, rate: float) -> None:
        """Steps the optimiser; a batch that is not finite is left out, and several in a row end the run."""
        finite = math.isfinite(loss) and math.isfinite(norm)
        self.non_finite = 0 if finite else self.non_finite + 1
        if self.non_finite == NON_FINITE_LIMIT:
            raise ValueError(
                f"the loss was not finite {NON_FINITE_LIMIT} times in a row, last at step {self.step + 1} "
                f"(windows up to {self.loader.windows} of the data's order): lower optim.max_lr"
            )
        if finite:
            optim.set_learning_rate(self.optimizer, rate)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _validate(self) -> dict[str, Any]:
        split = TokenSplit(self.data, "validation")
        windows = validation_windows(split, self.config.data.sequence, self.config.train.validation_sequences)
        return held_out_loss(self.model, windows, self.bins)

    def sample(self) -> str:
        """What the model writes after the beginning of a document, the likeliest token each time."""
        start = self.split.manifest.bos_token_id
        ids = torch.tensor([[0 if start is None else start]], device=self.device)
        self.model.eval()
        written = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0
        )
        self.model.train()
        return self.tokenizer.decode(written[0], skip_special_tokens=True)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All tensors of the run by name; the moments exist from the start, so that loading can fill them."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        tensors = {f"model.{name}": parameter.detach() for parameter, name in names.items()}
        for parameter, name in names.items():
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            tensors |= {f"optimizer.{key}.{name}": value for key, value in state.items()}
        if self.gradients is not None:
            tensors |= {f"gradients.{name}": value for name, value in self.gradients.squared.items()}
        return tensors

    def _save(self) -> None:
        state = {"step": self.step, "non_finite": self.non_finite, "loader": self.loader.state_dict()}
        checkpoint.save(self.run.checkpoints, self.step, self._tensors(), state)
        checkpoint.prune(self.run.checkpoints, self.config.train.keep, self.config.train.keep_every)

    def _restore(self, path: Path) -> None:
        state = checkpoint.load(path, self._tensors())
        self.step, self.non_finite = state["step"], state["non_finite"]
        self.loader.load_state_dict(state["loader"])
        self.tell(f"resumed from step {self.step}")

    def _export(self) -> None:
        """A Hugging Face folder with its tokenizer, whole or not at all."""
        temporary = self.run.path / ".export.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        self.model.save_pretrained(temporary)
        self.tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(model_card(self.config, self.model, self.run), encoding="utf-8")
        shutil.rmtree(self.run.export, ignore_errors=True)
        temporary.rename(self.run.export)
        self.tell(f"exported to {self.run.export}")

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _mfu(self, tokens_per_second: float) -> float | None:
        """The share of the GPU's peak that training reaches; None where the peak is not known."""
        peak = next((flops for name, flops in PEAK_FLOPS.items() if name in self.device_name), None)
        if peak is None:
            return None
        shape = presets.get(self.config.model.preset).model
        return round(tokens_per_second * train_flops(shape, self.config.data.sequence) / peak, 4)

    def _line(self, record: dict[str, Any]) -> str:
        timing, left = record["timing"], self.config.train.steps - record["step"]
        eta = left * self.config.train.batch * self.config.data.sequence / timing["tokens_per_s"]
        parts = [
            f"step {record['step']:,}/{self.config.train.steps:,}",
            f"loss {record['loss']:.4f}",
            f"lr {record['learning_rate']:.2e}",
            f"{timing['tokens_per_s']:,.0f} tokens/s",
            f"{eta / 60:.1f} min left",
        ]
        if self.device.type == "cuda":
            parts.append(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB")
        if timing["mfu"] is not None:
            parts.append(f"MFU {timing['mfu']:.1%}")
        if "validation" in record:
            parts.append(f"validation {record['validation']['loss']:.4f}")
        return "  ".join(parts)
