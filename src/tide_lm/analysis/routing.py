"""What each layer draws from memory, by the frequency of the input token: figure 10, for every layer.

Shapes: B batch, T tokens, K blocks, S = K + 1 slots with the null bank last, L layers, R = 11 rows (the
deciles, then the tokens outside the bins).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tide_lm.data.frequency import BINS
from tide_lm.evaluation.perplexity import read
from tide_lm.evaluation.texts import TextSettings
from tide_lm.model.opened import OpenedModel


@torch.no_grad()
def routing(
    opened: OpenedModel, settings: TextSettings, log: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Return mean router weights as `by_layer[layer][row][slot]`, over each token of the first text once."""
    texts, windows = settings.resolve(opened)
    name, path = next(iter(texts.items()))
    model = opened.model_with_memory
    rows_V = opened.bins.rows().to(model.device)
    slots = model.config.num_memory_blocks + 1
    sums_LRS = torch.zeros(model.config.num_hidden_layers, BINS + 1, slots, dtype=torch.float64)
    counts_R = torch.zeros(BINS + 1, dtype=torch.int64)
    once = replace(windows, stride=windows.size)  # no token twice
    for ids, predicted in read(path, opened.tokenizer, opened.vocabulary, once):
        # The inputs of predicted tokens: all but padding and a document's last token.
        inputs_BT, taken_BT = ids[:, :-1].to(model.device), predicted[:, 1:].to(model.device)
        weights = model.model(inputs_BT, use_cache=False, output_router_weights=True)["router_weights"]
        row_N = rows_V[inputs_BT[taken_BT]]
        member_RN = (row_N == torch.arange(BINS + 1, device=model.device).unsqueeze(1)).double()
        for layer, weights_BTS in enumerate(weights):
            sums_LRS[layer] += (member_RN @ weights_BTS[taken_BT].double()).cpu()
        counts_R += member_RN.sum(1).long().cpu()
        log(f"{int(counts_R.sum()):,} tokens")
    means_LRS = (sums_LRS / counts_R.clamp(min=1)[:, None]).tolist()
    tokens = counts_R.tolist()
    return {
        "text": name,
        "source": str(path),
        "window": windows.size,
        "tokens": tokens,
        "by_layer": [
            [row if count else None for row, count in zip(layer, tokens, strict=True)] for layer in means_LRS
        ],
    }
