"""Figures and pages from the artefacts of run directories; nothing here measures."""
