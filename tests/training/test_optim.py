import pytest
import torch

from tide_lm.run.settings import OptimSection
from tide_lm.training import optim
from tide_lm.training.optim import make_optimizer
from tide_lm.training.schedule import learning_rate


def test_the_schedule_passes_through_the_papers_points():
    settings = OptimSection(warmup_steps=100)
    assert learning_rate(0, 1000, settings) == pytest.approx(1e-6)
    assert learning_rate(50, 1000, settings) == pytest.approx((1e-6 + 1e-4) / 2)
    assert learning_rate(100, 1000, settings) == pytest.approx(1e-4)
    assert learning_rate(999, 1000, settings) == pytest.approx(1e-5)
    rates = [learning_rate(step, 1000, settings) for step in range(1000)]
    assert rates[:101] == sorted(rates[:101])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert learning_rate(0, 1, OptimSection(warmup_steps=0)) == pytest.approx(1e-4)


def test_tables_have_their_own_rate_and_decay(tiny_model):
    model = tiny_model()
    settings = OptimSection(table_lr_multiple=5.0, table_weight_decay=0.0)
    optimizer = make_optimizer(model, settings)
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optim.step(optimizer, None, 1e-3, settings, norm=torch.tensor(1.0))
    by_parameter = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert len(by_parameter) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        table = name == "model.memory.weight"
        group = by_parameter[parameter]
        assert group["lr"] == pytest.approx(5e-3 if table else 1e-3), name
        assert group["weight_decay"] == (0.0 if table else 0.1), name


def test_a_base_model_has_one_group(tiny_model):
    assert len(make_optimizer(tiny_model(num_memory_blocks=0), OptimSection()).param_groups) == 1
    assert isinstance(make_optimizer(tiny_model(), OptimSection()), torch.optim.AdamW)
