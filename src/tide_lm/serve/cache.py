"""Keys and values of several sequences, in tensors that stay where they are.

Shapes: L layers, B sequences, H key heads, T positions, d of a head.
"""

import torch
from transformers import DynamicCache, PreTrainedConfig


class SlotCache:
    """What a model appends a token to, each sequence at its own place; `layers` have keys, then values.

    `ids_B` are the last tokens, which are not appended yet, and `place_B` their positions; `seen_T` are the
    positions that are looked at, from the first on, so that short contexts do not pay for the longest.
    """

    is_compileable = True

    def __init__(
        self,
        config: PreTrainedConfig,
        batch: int,
        length: int,
        like: torch.Tensor,
        together: bool = False,
    ) -> None:
        """Make a cache; `together`, all layers are one tensor, all of which a compiled step would copy."""
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        # To look at all positions would be a case apart for a compiled step: one is never looked at.
        shape, layers = (2, batch, config.num_key_value_heads, length + 1, head), config.num_hidden_layers
        self.length = length
        self.states_L2BHTd = like.new_zeros(layers, *shape) if together else None
        if self.states_L2BHTd is None:
            self.layers = [like.new_zeros(shape) for _ in range(layers)]
        else:
            self.layers = list(self.states_L2BHTd)
        self.ids_B = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.place_B = torch.zeros_like(self.ids_B)
        self._sequences_B = torch.arange(batch, device=like.device)
        self._seen: dict[int, torch.Tensor] = {}
        self.look_at(length)

    def look_at(self, reach: int) -> None:
        """So many positions; a step that was compiled for others does for these too."""
        if reach not in self._seen:
            self._seen[reach] = torch.arange(reach, device=self.place_B.device)
            torch._dynamo.mark_dynamic(self._seen[reach], 0)
        self.seen_T = self._seen[reach]

    def mask(self) -> torch.Tensor:
        """What the token at each place sees, its own position included; True as `sdpa` has it."""
        return (self.seen_T <= self.place_B[:, None])[:, None, None]

    def keep(self, prompts: DynamicCache) -> None:
        """What a model has of whole prompts, from position 0 on."""
        for states_2BHTd, layer in zip(self.layers, prompts.layers, strict=True):
            for kept_BHTd, new in zip(states_2BHTd, (layer.keys, layer.values), strict=True):
                kept_BHTd[: len(new), :, : new.shape[2]] = new

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps one token's, and returns all that are looked at."""
        states_2BHTd, new_B2Hd = self.layers[layer], torch.stack([keys, values], 1)[:, :, :, 0]
        states_2BHTd[:, self._sequences_B, :, self.place_B] = new_B2Hd
        all_keys, all_values = states_2BHTd.narrow(3, 0, len(self.seen_T))
        return all_keys, all_values
