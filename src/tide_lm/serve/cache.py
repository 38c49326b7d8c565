"""Keys and values of several sequences, in one tensor that stays where it is.

Shapes: L layers, B sequences, H key heads, T positions, d of a head.
"""

import torch
from transformers import DynamicCache, PreTrainedConfig


class SlotCache:
    """What a model appends a token to, each sequence at its own place.

    `ids_B` are the last tokens, which are not appended yet, and `place_B` their positions; `reach` is how
    many positions are looked at, so that short contexts do not pay for the longest.
    """

    is_compileable = True

    def __init__(self, config: PreTrainedConfig, batch: int, length: int, like: torch.Tensor) -> None:
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, batch, config.num_key_value_heads, length, head)
        self.states_L2BHTd = like.new_zeros(shape)
        self.ids_B = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.place_B = torch.zeros_like(self.ids_B)
        self.reach = length
        self._sequences_B = torch.arange(batch, device=like.device)

    @property
    def length(self) -> int:
        return self.states_L2BHTd.shape[4]

    def mask(self) -> torch.Tensor:
        """What the token at each place sees, its own position included; True as `sdpa` has it."""
        positions_T = torch.arange(self.reach, device=self.place_B.device)
        return (positions_T <= self.place_B[:, None])[:, None, None]

    def keep(self, prompts: DynamicCache) -> None:
        """What a model has of whole prompts, from position 0 on."""
        for states_2BHTd, layer in zip(self.states_L2BHTd, prompts.layers, strict=True):
            for kept_BHTd, new in zip(states_2BHTd, (layer.keys, layer.values), strict=True):
                kept_BHTd[: len(new), :, : new.shape[2]] = new

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps one token's, and returns all that are looked at."""
        states_2BHTd = self.states_L2BHTd[layer]
        for kept_BHTd, new in zip(states_2BHTd, (keys, values), strict=True):
            kept_BHTd[self._sequences_B, :, self.place_B] = new[:, :, 0]
        all_keys, all_values = states_2BHTd[:, :, :, : self.reach]
        return all_keys, all_values
