"""What each layer draws from memory, by the frequency of the input token: figure 10, for every layer.

B batch, T tokens, K blocks, S = K + 1 slots with the null bank last, L layers, R = 11 rows: the deciles, then
the unbinned.
"""

from pathlib import Path
from typing import Any

import torch

from tide_lm.data.frequency import BINS
from tide_lm.evaluate.perplexity import Progress, TextSize, Windows, read
from tide_lm.model.opened import OpenedModel


@torch.no_grad()
def routing(
    opened: OpenedModel,
    text: str | Path,
    windows: Windows,
    text_field: str = "text",
    progress: Progress = lambda tokens: None,
) -> dict[str, Any]:
    """Mean router weights `by_layer[layer][row][slot]`, each token of the text once; rows as in the bins."""
    model = opened.tide
    rows_V = opened.bins.rows().to(model.device)
    slots = model.config.num_memory_blocks + 1
    sums_LRS = torch.zeros(model.config.num_hidden_layers, BINS + 1, slots, dtype=torch.float64)
    counts_R = torch.zeros(BINS + 1, dtype=torch.int64)
    apart = Windows(windows.size, windows.size, windows.batch)  # no token twice
    for ids, predicted in read(text, text_field, opened.tokenizer, opened.vocabulary, apart, TextSize()):
        # The inputs of predicted tokens: all but what fills a row up, and a document's last token.
        inputs_BT, taken_BT = ids[:, :-1].to(model.device), predicted[:, 1:].to(model.device)
        weights = model.model(inputs_BT, use_cache=False, output_router_weights=True)["router_weights"]
        row_N = rows_V[inputs_BT[taken_BT]]
        member_RN = (row_N == torch.arange(BINS + 1, device=model.device).unsqueeze(1)).double()
        for layer, weights_BTS in enumerate(weights):
            sums_LRS[layer] += (member_RN @ weights_BTS[taken_BT].double()).cpu()
        counts_R += member_RN.sum(1).long().cpu()
        progress(int(counts_R.sum()))
    means_LRS = (sums_LRS / counts_R.clamp(min=1)[:, None]).tolist()
    tokens = counts_R.tolist()
    return {
        "tokens": tokens,
        "by_layer": [
            [row if count else None for row, count in zip(layer, tokens, strict=True)] for layer in means_LRS
        ],
    }
