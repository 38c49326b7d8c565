"""The paper's diagnostics, each a function from a model to numbers."""
