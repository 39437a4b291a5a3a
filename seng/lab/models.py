"""The networks our experiments train, written from their papers: ResNet (1512.03385), VGG (1409.1556), GPT-2 (Radford et al.
2019), ViT (2010.11929), and small CNNs.

`resnet50` (v1.5) and `vgg16_bn` have torchvision's layers and initialisation; `resnet18` is the usual variant for 32×32
images, with a 3×3 stem and no max pool. Dimension 0 is the sample in every layer, as the library asks.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x)); the shortcut is a 1×1 projection where the shape changes."""

    def __init__(
        self, branch: nn.Sequential, inputs: int, outputs: int, stride: int
    ) -> None:
        super().__init__()
        self.branch = branch
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same_shape
            else nn.Sequential(*conv_norm(inputs, outputs, 1, stride))
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) to (B, outputs, h/stride, w/stride)."""
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


def conv_norm(
    inputs: int, outputs: int, size: int, stride: int = 1
) -> list[nn.Module]:
    """A convolution and its BatchNorm, which makes a bias redundant; the padding keeps the image size at stride 1."""
    return [
        nn.Conv2d(
            inputs, outputs, size, stride, padding=size // 2, bias=False
        ),
        nn.BatchNorm2d(outputs),
    ]


def basic(inputs: int, width: int, stride: int) -> Residual:
    """Two 3×3 convolutions: the block of ResNet18."""
    first, second = (
        conv_norm(inputs, width, 3, stride),
        conv_norm(width, width, 3),
    )
    return Residual(
        nn.Sequential(*first, nn.ReLU(inplace=True), *second),
        inputs,
        width,
        stride,
    )


def bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """1×1, 3×3, 1×1: the block of ResNet50. The stride is on the 3×3, which is what "v1.5" means."""
    narrow, middle, wide = (
        conv_norm(inputs, width, 1),
        conv_norm(width, width, 3, stride),
        conv_norm(width, 4 * width, 1),
    )
    branch = nn.Sequential(
        *narrow, nn.ReLU(inplace=True), *middle, nn.ReLU(inplace=True), *wide
    )
    return Residual(branch, inputs, 4 * width, stride)


def stages(
    block: Callable[[int, int, int], Residual],
    depths: tuple[int, ...],
    expansion: int,
) -> list[nn.Module]:
    """The four stages of a ResNet, 64 to 512 wide; each but the first halves the image."""
    blocks: list[nn.Module] = []
    inputs = 64
    for stage, depth in enumerate(depths):
        width = 64 * 2**stage
        for position in range(depth):
            blocks.append(
                block(inputs, width, 2 if stage > 0 and position == 0 else 1)
            )
            inputs = width * expansion
    return blocks


def resnet18(classes: int = 10) -> nn.Sequential:
    """ResNet18 for 32×32 images."""
    stem = [*conv_norm(3, 64, 3), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)]
    return initialised(
        nn.Sequential(*stem, *stages(basic, (2, 2, 2, 2), 1), *head)
    )


def resnet50(classes: int = 1000) -> nn.Sequential:
    """ResNet50 v1.5 for 224×224 images."""
    stem = [
        *conv_norm(3, 64, 7, 2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, classes)]
    return initialised(
        nn.Sequential(*stem, *stages(bottleneck, (3, 4, 6, 3), 4), *head)
    )


def vgg16_bn(classes: int = 10) -> nn.Sequential:
    """VGG16 with BatchNorm and the three-layer head of 7×7 features."""
    features: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            features += [
                nn.Conv2d(inputs, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
            inputs = width
        features.append(nn.MaxPool2d(2))
    head: list[nn.Module] = [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for inputs in (512 * 7 * 7, 4096):
        head += [nn.Linear(inputs, 4096), nn.ReLU(inplace=True), nn.Dropout()]
    model = initialised(
        nn.Sequential(*features, *head, nn.Linear(4096, classes))
    )
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


def small_cnn(classes: int = 10) -> nn.Sequential:
    """For 32×32 images on a CPU: four convolutions and a linear layer, 150,954 parameters."""
    return initialised(
        nn.Sequential(
            *conv_norm(3, 32, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            *conv_norm(32, 64, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            *conv_norm(64, 64, 3),
            nn.ReLU(inplace=True),
            *conv_norm(64, 128, 3),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128 * 4 * 4, classes),
        )
    )


def fashion_cnn(classes: int = 10) -> nn.Sequential:
    """For 28×28 grey images on a CPU: three convolutions and a linear layer, 86,954 parameters."""
    layers = [*conv_norm(1, 32, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [*conv_norm(32, 64, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    layers += [
        *conv_norm(64, 64, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, classes),
    ]
    return initialised(nn.Sequential(*layers))


def autoencoder(pixels: int = 784, code: int = 30) -> nn.Sequential:
    """The deep autoencoder of Hinton and Salakhutdinov (2006): 784-1000-500-250-30 and back; logits of the pixels.

    Sparse initialisation (Martens, 2010): each unit begins with 15 inputs from N(0, 1), without which its sigmoids saturate.
    """
    widths = (pixels, 1000, 500, 250, code)
    layers: list[nn.Module] = []
    for sizes in (widths, widths[::-1]):
        for inputs, outputs in pairwise(sizes):
            linear = nn.Linear(inputs, outputs)
            nn.init.zeros_(linear.bias)
            nn.init.sparse_(linear.weight.data.T, 1 - 15 / inputs, std=1.0)
            layers += [linear, nn.Sigmoid()]
        layers.pop()  # neither the code nor the logits are squashed
    return nn.Sequential(*layers)


class Attention(nn.Module):
    """softmax(QKᵀ/√(width/heads))V, all heads at once."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        q, k, v = (
            self.qkv(x)
            .unflatten(2, (3, self.heads, -1))
            .permute(2, 0, 3, 1, 4)
        )  # each (B, heads, T, width/heads)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the norms come first, as in GPT-2 and ViT."""

    def __init__(
        self,
        width: int,
        attention: Attention,
        activation: nn.Module,
        eps: float,
    ) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps), attention
        self.norm2 = nn.LayerNorm(width, eps)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            activation,
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, width) to the same."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT2(nn.Module):
    """GPT-2 without its dropout: learned positions, and one matrix for the tokens going in and coming out."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        vocabulary: int,
        context: int,
    ) -> None:
        super().__init__()
        self.tokens, self.positions = (
            nn.Embedding(vocabulary, width),
            nn.Embedding(context, width),
        )
        tanh = nn.GELU("tanh")
        self.blocks = nn.Sequential(
            *(
                TransformerBlock(
                    width, Attention(width, heads, causal=True), tanh, 1e-5
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        normal_linears(self)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.01)
        for (
            name,
            p,
        ) in (
            self.named_parameters()
        ):  # what each of the 2·layers residual branches ends with
            if name.endswith(("out.weight", "mlp.2.weight")):
                nn.init.normal_(p, std=0.02 / (2 * layers) ** 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) to logits (B, T, vocabulary)."""
        positions = torch.arange(
            tokens.shape[1], device=tokens.device
        ).expand_as(tokens)  # (B, T): the sample comes first
        out: Tensor = self.head(
            self.norm(
                self.blocks(self.tokens(tokens) + self.positions(positions))
            )
        )
        return out


def gpt2(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = 50257,
    context: int = 1024,
) -> GPT2:
    """The smallest GPT-2, 124,439,808 parameters; the vocabulary is not padded."""
    return GPT2(layers, width, heads, vocabulary, context)


class ViT(nn.Module):
    """Patches and a class token through a transformer."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        patch: int,
        size: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(
            torch.zeros(1, (size // patch) ** 2 + 1, width)
        )
        self.blocks = nn.Sequential(
            *(
                TransformerBlock(
                    width,
                    Attention(width, heads, causal=False),
                    nn.GELU(),
                    1e-6,
                )
                for _ in range(layers)
            )
        )
        self.norm = nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, classes)
        normal_linears(self)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, size, size) to (B, classes)."""
        patches = self.patches(x).flatten(2).mT  # (B, T − 1, width)
        x = (
            torch.cat([self.class_token.expand(len(x), -1, -1), patches], 1)
            + self.positions
        )
        out: Tensor = self.head(self.norm(self.blocks(x)[:, 0]))
        return out


def vit_s16(classes: int = 1000, size: int = 224) -> ViT:
    """ViT-S/16: 12 layers, 384 wide, 6 heads; 22,050,664 parameters."""
    return ViT(12, 384, 6, 16, size, classes)


def normal_linears(model: nn.Module) -> None:
    """Weights from N(0, 0.02²) and biases 0, as GPT-2's code has it and ViT's nearly."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def initialised(model: nn.Sequential) -> nn.Sequential:
    """He's initialisation for every convolution (fan out), as both papers' reference code has it."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(
                layer.weight, mode="fan_out", nonlinearity="relu"
            )
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model
