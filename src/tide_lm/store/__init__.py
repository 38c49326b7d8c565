"""Stores: files with the packed rows of a model, their encoding, their format and their reader."""
