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
