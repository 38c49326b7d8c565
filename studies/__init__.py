"""The study: does every layer need to know the token? `python -m studies --help`."""
