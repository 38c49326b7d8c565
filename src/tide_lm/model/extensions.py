"""What a layer may have besides the paper: each extension is one file, and one line here."""

from torch import nn
from transformers import LlamaConfig

from tide_lm.model.values import RowInValues

EXTENSIONS = {"memory_values": RowInValues}  # by the setting that turns it on


def extended(layer: type[nn.Module], config: LlamaConfig) -> type[nn.Module]:
    """Return a class of layers with the extensions that the config turns on; later ones wrap those before."""
    parts = [part for name, part in EXTENSIONS.items() if getattr(config, name)]
    return type(layer.__name__, (*reversed(parts), layer), {}) if parts else layer
