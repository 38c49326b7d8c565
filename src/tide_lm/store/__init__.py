"""Rows of memory in a file of their own: how they are encoded, where they are, and how they are read."""
