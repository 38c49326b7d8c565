"""The shape of a model, the paper's models, and what they cost; nothing here needs torch."""
