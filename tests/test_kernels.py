"""The grouped kernels against plain torch, on a GPU or, where there is none, on the CPU in Triton's interpreter.

conftest.py asks for the interpreter. It takes a second for 50,000 numbers of Y, so blocks are as small as their case allows.
"""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)

from seng.gpu.grouped import Grouped, Item, available, fits  # noqa: E402
from seng.gpu.kernels import AVAILABLE, WORK  # noqa: E402

if not AVAILABLE:
    pytest.skip("needs a C compiler", allow_module_level=True)

TILE = WORK[False]["TILE"]
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CHANNELS_LAST = torch.channels_last
TOLERANCE = {
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}  # of results rounded to this type


def draw(
    *shape, seed=0, dtype=torch.float32, memory_format=torch.contiguous_format
):
    x = torch.randn(
        shape,
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    ).to(DEVICE, dtype)
    return x.to(memory_format=memory_format) if len(shape) == 4 else x


def item(
    *shapes,
    k=3,
    seed=0,
    Y_dtype=torch.float32,
    dtype=torch.float32,
    memory_format=torch.contiguous_format,
    rows=None,
):
    """A block of parameters of these shapes; the rows are the first dimension, or 1 for a layer of vectors."""
    params = [
        draw(*s, seed=seed + q, dtype=dtype, memory_format=memory_format)
        for q, s in enumerate(shapes)
    ]
    rows = rows or (1 if len(shapes[0]) == 1 else shapes[0][0])
    n = sum(p.numel() for p in params)
    Y = (draw(k, n, seed=seed + 10) / n**0.5).to(Y_dtype)
    core = draw(k, k, seed=seed + 11) / (2 * k)
    return Item(
        Y,
        rows,
        tuple(params),
        core,
        torch.zeros((), dtype=torch.int64, device=DEVICE),
    )


def gradients(items, seed=100):
    """One for each parameter, laid out as it is."""
    params = [p for x in items for p in x.params]
    return [
        torch.empty_like(p).copy_(draw(*p.shape, seed=seed + q))
        for q, p in enumerate(params)
    ]


def reference(items, grads):
    """d = g − Yᵀ(C(Yg)) block by block, in float64."""
    out, grads = [], iter(grads)
    for x in items:
        own = [next(grads) for _ in x.params]
        g = torch.cat(
            [v.double().reshape(x.rows, -1) for v in own], 1
        ).flatten()
        Y, C = x.Y.double(), x.core.double()
        b = C @ (Y @ g)
        d = (g - Y.T @ b if b.isfinite().all() else g).view(x.rows, -1)
        parts = d.split([p.numel() // x.rows for p in x.params], 1)
        out += [
            part.reshape(v.shape) for part, v in zip(parts, own, strict=True)
        ]
    return out


def assert_near(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        tolerance = TOLERANCE[a.dtype]
        torch.testing.assert_close(
            a.double(),
            e.double(),
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
        )


BLOCKS = {
    "linear with bias": lambda **o: item((7, 5), (7,), **o),
    "linear": lambda **o: item((7, 5), **o),
    "several tiles": lambda **o: item((61, 83), (61,), **o),
    "whole tiles": lambda **o: item((4, TILE // 2), **o),
    "aligned rows": lambda **o: item((24, 99), (24,), **o),
    "convolution": lambda **o: item((6, 5, 3, 3), **o),
    "convolution with bias": lambda **o: item((6, 5, 3, 3), (6,), **o),
    "channels last": lambda **o: item(
        (6, 5, 3, 3), memory_format=CHANNELS_LAST, **o
    ),
    "channels last with bias": lambda **o: item(
        (30, 16, 3, 3), (30,), memory_format=CHANNELS_LAST, **o
    ),
    "channels last, 1 × 1": lambda **o: item(
        (6, 5, 1, 1), memory_format=CHANNELS_LAST, **o
    ),
    "one output": lambda **o: item(
        (1, 5, 3, 3), (1,), memory_format=CHANNELS_LAST, rows=1, **o
    ),
    "norm": lambda **o: item((40,), (40,), **o),
    "norm without bias": lambda **o: item((40,), **o),
    "norm of two dimensions": lambda **o: item((4, 6), (4, 6), rows=1, **o),
    "embedding": lambda **o: item((500, 8), **o),
    "k = 1": lambda **o: item((9, 4), k=1, **o),
    "k = 40": lambda **o: item((9, 40), (9,), k=40, **o),
    "k = 100": lambda **o: item((16, 16), k=100, **o),
    "tall, several tiles": lambda **o: item((13, 83), (13,), k=130, **o),
    "tall, aligned rows": lambda **o: item((16, 80), k=200, **o),
    "tall, channels last": lambda **o: item(
        (8, 16, 3, 3), (8,), k=64, memory_format=CHANNELS_LAST, **o
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_direction_of_one_block(name):
    items = [BLOCKS[name]()]
    assert fits(items[0])
    grads = gradients(items)
    out = Grouped(items).directions(grads)
    assert [d.stride() for d in out] == [p.stride() for p in items[0].params]
    assert_near(out, reference(items, grads))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize(
    "Y_dtype", [torch.float32, torch.bfloat16, torch.float16]
)
def test_types(Y_dtype, dtype):
    items = [
        BLOCKS[name](Y_dtype=Y_dtype, dtype=dtype)
        for name in ("several tiles", "aligned rows", "channels last")
    ]
    grads = gradients(items)
    assert_near(Grouped(items).directions(grads), reference(items, grads))


def mixed():
    """Every block at once, of several pairs of types."""
    types = [
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ]
    pairs = zip(BLOCKS.values(), types * 7, strict=True)
    nothing = [
        item((9, 4), k=0),
        item((6, 5, 3, 3), k=0, memory_format=CHANNELS_LAST),
    ]  # whose direction is the gradient
    return nothing + [
        make(seed=20 * q, Y_dtype=Y_dtype, dtype=dtype)
        for q, (make, (Y_dtype, dtype)) in enumerate(pairs)
    ]


def test_many_blocks_at_new_addresses():
    items = mixed()
    grouped = Grouped(items)
    for seed in (100, 500):
        grads = gradients(items, seed)
        assert_near(grouped.directions(grads), reference(items, grads))


def test_many_spans(monkeypatch):
    monkeypatch.setattr("seng.gpu.grouped.SPAN", 2)
    items = [item((1, 70_001), k=5), item((3, 4), k=2)]
    grads = gradients(items)
    assert_near(Grouped(items).directions(grads), reference(items, grads))


@pytest.mark.parametrize("offset", [1, 8])
def test_basis_that_is_a_view(offset):
    x = item((8, 16), k=4, Y_dtype=torch.float16)
    Y = (
        torch.empty(x.Y.numel() + offset, dtype=x.Y.dtype, device=DEVICE)[
            offset:
        ]
        .view(x.Y.shape)
        .copy_(x.Y)
    )
    items = [Item(Y, x.rows, x.params, x.core, x.failures)]
    grads = gradients(items)
    assert_near(Grouped(items).directions(grads), reference(items, grads))


def test_gradients_with_other_strides_or_another_type():
    items = [
        BLOCKS["channels last with bias"](),
        BLOCKS["convolution"](),
        item((6, 7)),
    ]
    grads = gradients(items)
    others = [
        grads[0].contiguous(),
        grads[1].double(),
        grads[2].to(memory_format=CHANNELS_LAST),
        grads[3].t().contiguous().t(),
    ]
    grouped = Grouped(items)
    for given in (others, grads, others):
        assert_near(grouped.directions(given), reference(items, grads))


def test_permuted_weight():
    x = item((6, 5, 3, 4))
    p = x.params[0].transpose(2, 3).contiguous().transpose(2, 3)
    items = [Item(x.Y, 6, (p,), x.core, x.failures)]
    assert fits(items[0])
    grads = gradients(items)
    assert_near(Grouped(items).directions(grads), reference(items, grads))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_failure_stays_in_its_block(bad):
    items = [item((61, 83), (61,), seed=q) for q in range(3)]
    grads = gradients(items)
    grads[2][40, 3] = bad
    grouped = Grouped(items)
    out = grouped.directions(grads)
    assert_near(out, reference(items, grads))
    assert torch.equal(out[2], grads[2]) or bad is torch.nan
    assert torch.equal(out[3], grads[3])
    grouped.directions(grads)
    assert [int(x.failures) for x in items] == [0, 2, 0]


def test_core_that_is_not_finite():
    items = [item((7, 5)), item((7, 5), (7,))]
    items[0].core[1, 2] = torch.inf
    grads = gradients(items)
    assert torch.equal(Grouped(items).directions(grads)[0], grads[0])
    assert [int(x.failures) for x in items] == [1, 0]


def test_core_overwritten_in_place():
    items = mixed()[2:]  # those with a core
    grouped, grads = Grouped(items), gradients(items)
    before = grouped.directions(grads)
    for x in items:
        x.core.mul_(-3)
    after = grouped.directions(grads)
    assert_near(after, reference(items, grads))
    assert not torch.equal(before[0], after[0])


def group(lr, momentum=0.0, weight_decay=0.0, nesterov=False, maximize=False):
    return {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }


HYPER = {
    "plain": [group(0.1)],
    "momentum": [group(0.1, 0.9)],
    "nesterov": [group(0.1, 0.9, 0.01, nesterov=True)],
    "weight decay": [group(0.1, weight_decay=0.2)],
    "maximize": [group(0.1, 0.9, 0.01, maximize=True)],
    "two groups": [group(0.1, 0.9, 0.01), group(0.3, 0.0, 0.1, maximize=True)],
    "three groups": [
        group(0.1, 0.9, 0.01),
        group(0.3),
        group(0.2, 0.5, nesterov=True),
    ],
}


@pytest.mark.parametrize("name", HYPER)
def test_update_is_sgd_with_the_direction(name):
    hyper = HYPER[name]
    items = [
        BLOCKS[b](seed=q, Y_dtype=torch.float16)
        for q, b in enumerate(
            ("several tiles", "channels last with bias", "norm")
        )
    ]
    grouped, params = (
        Grouped(items),
        [p for x in items for p in x.params],
    )
    groups = [q % len(hyper) for q in range(len(params))]
    twins = [p.clone() for p in params]
    sgd = torch.optim.SGD(
        [
            {
                "params": [
                    twins[q] for q in range(len(params)) if groups[q] == i
                ],
                **h,
            }
            for i, h in enumerate(hyper)
        ]
    )
    buffers = [
        torch.zeros_like(p) if hyper[q]["momentum"] else None
        for p, q in zip(params, groups, strict=True)
    ]
    for step in range(3):
        grads = gradients(items, seed=100 * step)
        hyper = [h | {"lr": h["lr"] / (1 + step)} for h in HYPER[name]]
        for own, h in zip(sgd.param_groups, hyper, strict=True):
            own["lr"] = h["lr"]
        for twin, d in zip(twins, reference(items, grads), strict=True):
            twin.grad = torch.empty_like(twin).copy_(d)
        sgd.step()
        grouped.update(
            grads,
            buffers,
            hyper,
            groups,
        )
        assert_near(params, twins)
    assert_near(
        [m for m in buffers if m is not None],
        [
            s
            for t in twins
            if (s := sgd.state[t].get("momentum_buffer")) is not None
        ],
    )


def test_update_of_bfloat16():
    items = [
        item((61, 83), (61,), dtype=torch.bfloat16, Y_dtype=torch.float16)
    ]
    params = items[0].params
    before, grads = [p.double() for p in params], gradients(items)
    buffers = [torch.ones_like(p) for p in params]
    Grouped(items).update(grads, buffers, [group(0.1, 0.5)], [0, 0])
    expected = [0.5 + d for d in reference(items, grads)]
    assert_near(buffers, [m.to(torch.bfloat16) for m in expected])
    assert_near(
        params, [p - 0.1 * m for p, m in zip(before, expected, strict=True)]
    )


def test_directions_and_update_agree():
    items = mixed()
    grouped, grads, params = (
        Grouped(items),
        gradients(items),
        [p for x in items for p in x.params],
    )
    expected = [
        p - 0.5 * d
        for p, d in zip(
            [p.double() for p in params],
            grouped.directions(grads),
            strict=True,
        )
    ]
    versions = [p._version for p in params]
    nothing = [None] * len(params)
    grouped.update(grads, nothing, [group(0.5)], [0] * len(params))
    assert_near(params, expected)
    assert all(p._version > v for p, v in zip(params, versions, strict=True))


def test_parameters_that_moved():
    items = [BLOCKS["convolution with bias"]()]
    p, grouped, nothing = items[0].params[0], Grouped(items), [None, None]
    grouped.update(gradients(items), nothing, [group(0.1)], [0, 0])
    before = grouped.located()
    p.data = p.data.clone(memory_format=CHANNELS_LAST)
    expected, grads = p.double(), gradients(items, seed=7)
    assert grouped.located() != before
    grouped.update(grads, nothing, [group(0.1)], [0, 0])
    assert_near([p], [expected - 0.1 * reference(items, grads)[0]])


def test_what_does_not_fit():
    x = item((6, 4), (6,))
    weight, bias = x.params
    assert fits(x)
    assert not fits(replace(x, Y=x.Y.double()))
    for params in (
        (weight.double(), bias),
        (draw(6, 8)[:, ::2], bias),
        (weight, bias, bias),
        (weight, draw(6, 2)),
    ):
        assert not fits(replace(x, params=params))
    assert not available(torch.device("cpu"))
