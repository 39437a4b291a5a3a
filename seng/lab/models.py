"""The networks our experiments train, written from their papers: ResNet (1512.03385), VGG (1409.1556), a small CNN for digits.

`resnet50` (v1.5) and `vgg16_bn` have torchvision's layers and initialisation; `resnet18` is the usual variant for 32×32
images, with a 3×3 stem and no max pool.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a 1×1 projection where the shape changes."""

    def __init__(self, branch: nn.Sequential, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.branch = branch
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else nn.Sequential(*conv_norm(inputs, outputs, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) to (B, outputs, h/stride, w/stride)."""
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


def conv_norm(inputs: int, outputs: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution and its BatchNorm, which makes a bias redundant; the padding keeps the image size at stride 1."""
    return [nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)]


def basic(inputs: int, width: int, stride: int) -> Residual:
    """Two 3×3 convolutions: the block of ResNet18."""
    first, second = conv_norm(inputs, width, 3, stride), conv_norm(width, width, 3)
    return Residual(nn.Sequential(*first, nn.ReLU(inplace=True), *second), inputs, width, stride)


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """1×1, 3×3, 1×1: the block of ResNet50. The stride is on the 3×3, which is what "v1.5" means."""
    narrow, middle, wide = conv_norm(inputs, width, 1), conv_norm(width, width, 3, stride), conv_norm(width, 4 * width, 1)
    branch = nn.Sequential(*narrow, nn.ReLU(inplace=True), *middle, nn.ReLU(inplace=True), *wide)
    return Residual(branch, inputs, 4 * width, stride)


def stages(block: Callable[[int, int, int], Residual], depths: tuple[int, ...], expansion: int) -> list[nn.Module]:
    """The four stages of a ResNet, 64 to 512 wide; each but the first halves the image."""
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for position in range(depth):
            blocks.append(block(inputs, width, 2 if stage > 0 and position == 0 else 1))
            inputs = width * expansion
    return blocks


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet18 for 32×32 images."""
    stem = [*conv_norm(3, 64, 3), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return initialised(nn.Sequential(*stem, *stages(basic, (2, 2, 2, 2), 1), *head))


def resnet50(classes: int = 1000) -> nn.Sequential:
    """ResNet50 v1.5 for 224×224 images."""
    stem = [*conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes)]
    return initialised(nn.Sequential(*stem, *stages(bottleneck, (3, 4, 6, 3), 4), *head))


def vgg16_bn(classes: int = 10) -> nn.Sequential:
    """VGG16 with BatchNorm and the three-layer head of 7×7 features."""
    features: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            features += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
        features.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inputs in (512 * 7 * 7, 4096):
        head += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    model = initialised(nn.Sequential(*features, *head, nn.Linear(4096, classes)))
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.zeros_(layer.bias)
    return model


def digits_cnn() -> nn.Sequential:
    """For scikit-learn's 1×8×8 digits: 31,242 parameters."""
    return nn.Sequential(
        *conv_norm(1, 32, 3),
        nn.ReLU(inplace=True),
        *conv_norm(32, 32, 3),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        *conv_norm(32, 48, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(48 * 4 * 4, 10),
    )


def initialised(model: nn.Sequential) -> nn.Sequential:
    """He's initialisation for every convolution (fan out), as both papers' reference code has it."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
