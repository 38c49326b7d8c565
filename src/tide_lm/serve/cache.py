"""Keys and values of several sequences, in tensors that are allocated once.

Shapes: L layers, B sequences, H key heads, T positions, d of a head.
"""

import torch
from transformers import DynamicCache, PreTrainedConfig


class SlotCache:
    """A cache to which a step appends one token per sequence; `layers` hold keys, then values.

    `ids_B` are the last tokens, which are not appended yet, `previous_B` those before them, and `place_B`
    their positions. A step attends to the positions `seen_T`, from the first on, so that short contexts do
    not pay for the longest.
    """

    is_compileable = True

    def __init__(
        self, config: PreTrainedConfig, batch: int, length: int, like: torch.Tensor, together: bool = False
    ) -> None:
        """Allocate the cache; `together` in one tensor for all layers, which a compiled step would copy."""
        # Looking at all positions would be a special case for a compiled step, so one is never looked at.
        heads, layers = config.num_key_value_heads, config.num_hidden_layers
        shape = (2, batch, heads, length + 1, config.head_dim)
        self.length = length
        self.states_L2BHTd = like.new_zeros(layers, *shape) if together else None
        if self.states_L2BHTd is None:
            self.layers = [like.new_zeros(shape) for _ in range(layers)]
        else:
            self.layers = list(self.states_L2BHTd)
        self.ids_B = torch.zeros(batch, dtype=torch.long, device=like.device)
        self.previous_B, self.place_B = torch.zeros_like(self.ids_B), torch.zeros_like(self.ids_B)
        self._sequences_B = torch.arange(batch, device=like.device)
        self._seen: dict[int, torch.Tensor] = {}
        self.look_at(length)

    def look_at(self, reach: int) -> None:
        """Attend to so many positions; a compiled step works for any number."""
        if reach not in self._seen:
            self._seen[reach] = torch.arange(reach, device=self.place_B.device)
            torch._dynamo.mark_dynamic(self._seen[reach], 0)
        self.seen_T = self._seen[reach]

    def mask(self) -> torch.Tensor:
        """Return what each token attends to, its own position included; True where it does."""
        return (self.seen_T <= self.place_B[:, None])[:, None, None]

    def keep(self, prompts: DynamicCache) -> None:
        """Copy the keys and values of whole prompts, from position 0 on."""
        for states_2BHTd, layer in zip(self.layers, prompts.layers, strict=True):
            for kept_BHTd, new in zip(states_2BHTd, (layer.keys, layer.values), strict=True):
                kept_BHTd[: len(new), :, : new.shape[2]] = new

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one token's keys and values, and return all that are attended to."""
        states_2BHTd, new_B2Hd = self.layers[layer], torch.stack([keys, values], 1)[:, :, :, 0]
        states_2BHTd[:, self._sequences_B, :, self.place_B] = new_B2Hd
        all_keys, all_values = states_2BHTd.narrow(3, 0, len(self.seen_T))
        return all_keys, all_values
