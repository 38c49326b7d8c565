"""To and from what others have: Llama checkpoints, serving stacks."""
