"""Layers and models: shared, attention, recurrent, parametrized, or without a rule."""

import naive
import torch
import torch.nn.functional as F
from test_capture import (
    FunctionalTie,
    Positions,
    SharedConv,
    Tied,
    Twice,
    optimizer,
    reference,
    stepped,
)
from torch import nn
from torch.nn.utils import parametrizations, prune

import seng
from situations import (
    batch,
    exact,
    loop,
    mlp,
    plain_gradient,
    sengs,
    situation,
)


@situation("Models", "a layer that is called twice")
def _():
    exact(Twice(), torch.randn(6, 4, 3), torch.randn(6, 3))


@situation("Models", "weights tied between embedding and head: one block")
def _():
    model = Tied()
    exact(
        model, torch.randint(7, (6, 4)), torch.randn(6, 4, 7), layers=[model]
    )


@situation("Models", "two convolutions that share a weight")
def _():
    model = SharedConv()
    exact(
        model, torch.randn(6, 2, 5, 5), torch.randn(6, 2, 2, 2), layers=[model]
    )


@situation("Models", "a weight that is also used outside of its layer")
def _():
    model = FunctionalTie()
    opt = optimizer(model)
    naive.loss_of(
        model(torch.randint(7, (6, 4))), torch.randn(6, 4, 7)
    ).backward()
    opt.step()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(4, 12),
            nn.Linear(4, 4),
            nn.RMSNorm(4),
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, 2)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        return self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


@situation(
    "Models",
    "attention written with nn.Linear and scaled_dot_product_attention",
)
def _():
    exact(Attention(), torch.randn(5, 3, 4), torch.randn(5, 3, 4))


@situation("Models", "nn.MultiheadAttention and nn.TransformerEncoderLayer")
def _():
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
    plain_gradient(model, model.self_attn.in_proj_weight, torch.randn(5, 3, 4))


@situation("Models", "nn.MultiheadAttention with strict=True")
def _():
    seng.SENG(nn.TransformerEncoderLayer(4, 2, 8), strict=True)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


for kind in (nn.LSTM, nn.GRU):

    @situation("Models", f"nn.{kind.__name__} beside other layers")
    def _(kind=kind):
        model = Recurrent(kind)
        plain_gradient(model, model.rnn.weight_hh_l0, torch.randn(5, 6, 3))


@situation("Models", "weight_norm (a parametrization)")
def _():
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.Tanh(),
        nn.Linear(4, 2),
    )
    plain_gradient(
        model, model[0].parametrizations.weight.original1, torch.randn(5, 3)
    )


@situation("Models", "pruned layers (torch.nn.utils.prune)")
def _():
    model = nn.Sequential(
        prune.l1_unstructured(nn.Linear(3, 4), "weight", 2),
        nn.Tanh(),
        nn.Linear(4, 2),
    )
    plain_gradient(model, model[0].weight_orig, torch.randn(5, 3))


@situation(
    "Models", "grouped, depthwise and transposed convolutions, GroupNorm"
)
def _():
    layers = (
        nn.Conv2d(2, 4, 2, groups=2),
        nn.GroupNorm(2, 4),
        nn.ConvTranspose2d(4, 2, 2, groups=2),
    )
    exact(
        nn.Sequential(*layers),
        torch.randn(5, 2, 4, 4),
        torch.randn(5, 2, 4, 4),
    )


@situation("Models", "channels_last")
def _():
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Conv2d(4, 2, 2)).to(
        memory_format=torch.channels_last
    )
    x = torch.randn(5, 2, 4, 4).to(memory_format=torch.channels_last)
    exact(model, x, torch.randn(5, 2, 2, 2))


@situation(
    "Models",
    "BatchNorm in training: the batch's statistics are taken as given",
)
def _():
    layer, x, target = nn.BatchNorm1d(3), torch.randn(6, 3), torch.randn(6, 3)
    u = naive.batch_norm_gradients(layer, x, target)
    opt = optimizer(layer)
    naive.loss_of(layer(x), target).backward()
    assert (
        naive.relative_error(stepped(layer, opt), reference([(u, u.mean(0))]))
        < 1e-9
    )


@situation("Models", "time first, with seng.layers.arrange")
def _():
    model, x, target = (
        nn.Linear(3, 2),
        torch.randn(6, 5, 3),
        torch.randn(6, 5, 2),
    )
    seng.layers.arrange(model, lambda t: t.transpose(0, 1))

    def backward():
        naive.loss_of(
            model(x.transpose(0, 1)).transpose(0, 1), target
        ).backward()

    exact(model, x, target, layers=[model], backward=backward)


@situation(
    "Models",
    "a layer whose dimension 0 is not the sample (a table of positions)",
)
def _():
    model = Positions()
    plain_gradient(model, model.places.weight, torch.randint(7, (8, 5)))


@situation("Models", "a table of positions with strict=True")
def _():
    model = Positions()
    opt = optimizer(model, strict=True)
    naive.loss_of(
        model(torch.randint(7, (8, 5))), torch.randn(8, 5, 2)
    ).backward()
    opt.step()


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.scale * self.linear(x)


@situation("Models", "a parameter of a module without a rule")
def _():
    model = Scaled()
    plain_gradient(model, model.scale, torch.randn(5, 3))


@situation("Models", "a model without any covered layer")
def _():
    seng.SENG(nn.LSTM(2, 2))


@situation("Models", "a subclass of a covered layer with a forward of its own")
def _():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(nn.Linear(3, 3), Doubled(3, 2))
    plain_gradient(model, model[1].weight, torch.randn(5, 3))


@situation("Models", "lazy layers before their first forward")
def _():
    seng.SENG(nn.Sequential(nn.LazyLinear(3)))


@situation("Models", "embeddings with sparse=True")
def _():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
    opt = seng.SENG(model)
    model(torch.randint(5, (4,))).sum().backward()
    opt.step()


@situation("Models", "torch.fx.symbolic_trace(model)")
def _():
    model = torch.fx.symbolic_trace(mlp())
    exact(model, *batch(), layers=[getattr(model, name) for name in "023"])


@situation("Models", "torch.jit.script(model)")
def _():
    seng.SENG(torch.jit.script(mlp()))


@situation("Models", "parameters without a module")
def _():
    model, other = mlp(), mlp()
    got = loop(model, sengs(model.parameters()))
    sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    assert torch.equal(got, loop(other, sgd))


@situation("Models", "parameters of another module")
def _():
    seng.SENG(mlp().parameters(), module=mlp(1))
