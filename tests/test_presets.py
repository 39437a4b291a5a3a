"""Settings by name: seng/optim/presets.py."""

import pytest
import torch
from torch import nn

import seng


@pytest.mark.parametrize("name", ["paper", "orthogonal"])
def test_presets_are_arguments_of_seng(name: str) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    opt = seng.SENG(model, 0.1, **getattr(seng.presets, name)())
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
    assert (curvature.base, curvature.combine, curvature.averaging) == (
        "identity",
        "independent",
        0.0,
    )
    assert (
        not curvature.relative_damping
        and not curvature.grafts
        and curvature.sketch is sketch
    )
    assert options["damping"] == 2.0 and options["refresh_every"] == 200
    model = nn.Linear(4, 2)
    assert (
        seng.SENG(model, 0.1, units="paper", **options).param_groups[0][
            "damping"
        ]
        == 2.0
    )


def test_with_much_damping_the_paper_is_sgd() -> None:
    """A preset changes no default of the step."""
    torch.manual_seed(0)
    model, twin = nn.Linear(4, 2), nn.Linear(4, 2)
    twin.load_state_dict(model.state_dict())
    pairs = (
        (model, seng.SENG(model, 0.1, **seng.presets.paper(damping=1e9))),
        (twin, torch.optim.SGD(twin.parameters(), 0.1, 0.9)),
    )
    x = torch.randn(8, 4)
    for m, opt in pairs:
        for _ in range(3):
            opt.zero_grad()
            m(x).square().mean().backward()
            opt.step()
    torch.testing.assert_close(model.weight, twin.weight)
