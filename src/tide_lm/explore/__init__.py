"""A page to look into a model: its numbers, and the page around them."""
