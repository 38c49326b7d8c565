"""Other projects' formats: Llama checkpoints, serving stacks."""
