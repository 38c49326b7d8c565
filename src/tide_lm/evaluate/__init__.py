"""Measuring models on text."""
