"""The one list of layer cases for the whole suite, and float64 as the default precision of tests."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from several import Ranks
from torch import Tensor, nn

torch.set_num_threads(1)  # two workers share two cores
if (
    not torch.cuda.is_available()
):  # before anything imports seng, and with it Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")

FORMS = ("explicit", "implicit", "merged", "auto")


@dataclass(frozen=True)
class Case:
    name: str
    layer: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of one sample's input
    vocabulary: int = 0  # > 0: the input is indices

    def input(self, batch: int) -> Tensor:
        if self.vocabulary:
            return torch.randint(self.vocabulary, (batch, *self.shape))
        return torch.randn(batch, *self.shape)

    def target(self, layer: nn.Module, batch: int) -> Tensor:
        with torch.no_grad():
            return torch.randn_like(
                layer(self.input(max(batch, 2)))[:1].expand(
                    batch, *layer(self.input(2)).shape[1:]
                )
            )


def _eval(layer: nn.Module) -> nn.Module:
    """A norm in eval mode whose statistics and affine parameters are not the initial ones."""
    for buffer in layer.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    with torch.no_grad():
        for p in layer.parameters():
            p.uniform_(0.5, 1.5)
    return layer.eval()


LAYERS = [
    Case("linear", lambda: nn.Linear(4, 3), (4,)),
    Case("linear-no-bias", lambda: nn.Linear(4, 3, bias=False), (4,)),
    Case("linear-sequence", lambda: nn.Linear(4, 3), (5, 4)),
    Case("linear-4d", lambda: nn.Linear(3, 2), (2, 3, 3)),
    Case("linear-wide", lambda: nn.Linear(2, 9), (6, 2)),
    Case("conv1d", lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 9)),
    Case("conv2d", lambda: nn.Conv2d(2, 3, 3), (2, 5, 6)),
    Case(
        "conv2d-no-bias",
        lambda: nn.Conv2d(2, 3, 3, padding=1, bias=False),
        (2, 4, 4),
    ),
    Case(
        "conv2d-stride",
        lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 3), padding=(1, 0)),
        (2, 7, 8),
    ),
    Case(
        "conv2d-dilation",
        lambda: nn.Conv2d(2, 3, (2, 3), dilation=(2, 1), padding=2),
        (2, 5, 5),
    ),
    Case(
        "conv2d-groups",
        lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1),
        (4, 4, 4),
    ),
    Case(
        "conv2d-depthwise",
        lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False),
        (4, 5, 5),
    ),
    Case(
        "conv2d-same",
        lambda: nn.Conv2d(2, 3, (2, 4), padding="same", dilation=(1, 2)),
        (2, 5, 6),
    ),
    Case(
        "conv2d-valid", lambda: nn.Conv2d(2, 3, 2, padding="valid"), (2, 4, 4)
    ),
    Case(
        "conv2d-reflect",
        lambda: nn.Conv2d(2, 3, 3, padding=(2, 1), padding_mode="reflect"),
        (2, 5, 5),
    ),
    Case(
        "conv2d-replicate",
        lambda: nn.Conv2d(
            2, 3, 3, padding=2, padding_mode="replicate", stride=2
        ),
        (2, 5, 5),
    ),
    Case(
        "conv2d-circular",
        lambda: nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"),
        (2, 5, 5),
    ),
    Case(
        "conv2d-same-circular",
        lambda: nn.Conv2d(2, 3, 4, padding="same", padding_mode="circular"),
        (2, 5, 5),
    ),
    Case("conv2d-1x1", lambda: nn.Conv2d(5, 3, 1), (5, 2, 2)),
    Case(
        "conv3d",
        lambda: nn.Conv3d(2, 2, 2, stride=(1, 2, 1), padding=1),
        (2, 3, 4, 3),
    ),
    Case(
        "conv-transpose1d",
        lambda: nn.ConvTranspose1d(
            3, 2, 3, stride=2, padding=1, output_padding=1
        ),
        (3, 4),
    ),
    Case(
        "conv-transpose2d",
        lambda: nn.ConvTranspose2d(
            2, 3, (3, 2), stride=(2, 1), padding=(2, 0)
        ),
        (2, 4, 3),
    ),
    Case(
        "conv-transpose2d-groups",
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, dilation=2),
        (4, 3, 3),
    ),
    Case(
        "conv-transpose2d-no-bias",
        lambda: nn.ConvTranspose2d(2, 3, 2, bias=False),
        (2, 3, 3),
    ),
    Case(
        "conv-transpose3d",
        lambda: nn.ConvTranspose3d(2, 2, 2, stride=2, padding=1),
        (2, 3, 2, 2),
    ),
    Case("embedding", lambda: nn.Embedding(7, 3), (), vocabulary=7),
    Case("embedding-sequence", lambda: nn.Embedding(7, 3), (5,), vocabulary=7),
    Case(
        "embedding-padding",
        lambda: nn.Embedding(5, 2, padding_idx=1),
        (3, 2),
        vocabulary=5,
    ),
    Case("layer-norm", lambda: _eval(nn.LayerNorm(5)), (5,)),
    Case("layer-norm-sequence", lambda: _eval(nn.LayerNorm(4)), (3, 4)),
    Case("layer-norm-2d", lambda: _eval(nn.LayerNorm((3, 4))), (2, 3, 4)),
    Case(
        "layer-norm-no-bias",
        lambda: _eval(nn.LayerNorm(4, bias=False)),
        (3, 4),
    ),
    Case("rms-norm", lambda: _eval(nn.RMSNorm(4)), (3, 4)),
    Case("group-norm", lambda: _eval(nn.GroupNorm(2, 4)), (4, 3, 2)),
    Case("batch-norm1d", lambda: _eval(nn.BatchNorm1d(3)), (3,)),
    Case("batch-norm1d-sequence", lambda: _eval(nn.BatchNorm1d(3)), (3, 4)),
    Case("batch-norm2d", lambda: _eval(nn.BatchNorm2d(3)), (3, 2, 4)),
    Case(
        "instance-norm1d",
        lambda: _eval(nn.InstanceNorm1d(3, affine=True)),
        (3, 4),
    ),
    Case(
        "instance-norm2d-tracked",
        lambda: _eval(
            nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        ),
        (3, 2, 4),
    ),
    Case(
        "instance-norm3d",
        lambda: nn.InstanceNorm3d(2, affine=True),
        (2, 2, 3, 2),
    ),
    Case("prelu", lambda: nn.PReLU(), (3, 4)),
    Case("prelu-channels", lambda: nn.PReLU(3), (3, 2, 2)),
    Case("prelu-features", lambda: nn.PReLU(3), (3,)),
    Case("batch-norm3d", lambda: _eval(nn.BatchNorm3d(2)), (2, 2, 3, 2)),
]


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=LAYERS, ids=lambda case: case.name)
def case(request) -> Case:
    return request.param


@pytest.fixture(params=FORMS)
def form(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()


@pytest.fixture(params=[2, 4])
def ranks(request, two, four):
    return two if request.param == 2 else four
