"""The data of a run, checked against its settings before a model is built."""

from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from tide_lm.data import tokenizers
from tide_lm.data.frequency import FrequencyBins
from tide_lm.data.loader import count_windows
from tide_lm.data.shards import Manifest, TokenSplit, check_checksum
from tide_lm.run import process_group
from tide_lm.run.settings import DataSection, ModelSection
from tide_lm.training.checks import check_data, other_tokenizer


@dataclass(frozen=True)
class Inputs:
    train: TokenSplit
    validation: TokenSplit
    tokenizer: PreTrainedTokenizerBase
    bins: FrequencyBins

    @property
    def manifest(self) -> Manifest:
        return self.train.manifest


def open_inputs(settings: DataSection, model: ModelSection) -> Inputs:
    """Open prepared data; an error names what does not fit, and the cure."""
    check_data(settings, model)
    folder = Path(settings.path)
    train, validation = TokenSplit(folder, "train"), TokenSplit(folder, "validation")
    check_checksum(folder / "tokenizer" / "tokenizer.json", train.manifest.tokenizer_sha256)
    count_windows(validation, settings.sequence)
    if model.start:
        _check_same_tokenizer(Path(model.start), folder, train.manifest)
    tokenizer = tokenizers.load(str(folder / "tokenizer"))
    return Inputs(train, validation, tokenizer, FrequencyBins.from_prepared(folder))


def verify(inputs: Inputs) -> None:
    """Compare the data's checksums; each rank reads its share, and all raise the first error."""
    fault = None
    try:
        for split in (inputs.train, inputs.validation):
            split.verify(process_group.rank(), process_group.world_size())
    except ValueError as error:
        fault = str(error)
    if faults := [fault for fault in process_group.all_gather(fault) if fault is not None]:
        raise ValueError(faults[0])


def _check_same_tokenizer(start: Path, folder: Path, manifest: Manifest) -> None:
    """Check that the data have the tokenizer of the model to start from, if its folder holds one."""
    if not (start / "tokenizer.json").is_file():
        return
    if tokenizers.fingerprint(tokenizers.load(str(start.absolute()))) != manifest.tokenizer_sha256:
        raise ValueError(other_tokenizer(folder, start))
