import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tide_lm.ops.kernels import use_triton


def test_a_cpu_tensor_takes_the_reference_unless_told(monkeypatch):
    monkeypatch.delenv("TIDE_LM_KERNELS", raising=False)
    assert not use_triton(torch.empty(1))
    monkeypatch.setenv("TIDE_LM_KERNELS", "triton")
    assert use_triton(torch.empty(1))
    monkeypatch.setenv("TIDE_LM_KERNELS", "reference")
    assert not use_triton(torch.empty(1))


def test_another_choice_is_refused(monkeypatch):
    monkeypatch.setenv("TIDE_LM_KERNELS", "cuda")
    with pytest.raises(ValueError, match="'cuda': set it to reference or triton"):
        use_triton(torch.empty(1))


@pytest.mark.kernels
@pytest.mark.parametrize("file", ["test_cross_entropy.py", "test_memory_rows.py"])
def test_the_kernels_give_the_same(file):
    """Triton's interpreter in the place of a GPU, for all tests of a file."""
    pytest.importorskip("triton", reason="triton is not installed")
    here = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TIDE_LM_KERNELS": "triton"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", here / file]
    done = subprocess.run(command, env=environment, cwd=here.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
