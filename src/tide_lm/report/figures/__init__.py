"""The paper's figures, a file for each subject."""
