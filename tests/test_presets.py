"""Settings by name: seng/optim/presets.py."""

import torch
from torch import nn

import seng


def test_presets_are_arguments_of_seng() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = seng.SENG(model, 0.1, **seng.presets.paper())
    x, y = torch.randn(16, 5), torch.randint(3, (16,))
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_the_paper_has_its_own_method() -> None:
    sketch = seng.sketch.LeverageRows(64)
    options = seng.presets.paper(damping=2.0, sketch=sketch)
    curvature = options["curvature"]
    assert curvature.base is None and curvature.samples is None
    assert curvature.combine == "independent" and curvature.decay == 0
    assert not curvature.relative_damping and not curvature.centres
    assert curvature.sketch is sketch
    assert options["recipe"] == "paper"
    assert options["damping"] == 2.0 and options["refresh_every"] == 200
    model = nn.Linear(4, 2)
    opt = seng.SENG(model, 0.1, **options)
    assert opt.param_groups[0]["damping"] == 2.0


def test_with_much_damping_the_paper_is_sgd() -> None:
    """Its learning rate is λ times SGD's: its own directions are (M + λI)⁻¹g."""
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    pairs = (
        (model, seng.SENG(model, 1e8, **seng.presets.paper(damping=1e9))),
        (twin, torch.optim.SGD(twin.parameters(), 0.1, 0.9)),
    )
    x = torch.randn(8, 4)
    for m, opt in pairs:
        for _ in range(3):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()
    torch.testing.assert_close(model.weight, twin.weight)
