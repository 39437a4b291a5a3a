"""Golden trajectories: every method on three small networks, 30 steps in float64, against files that earlier code wrote.

A perturbation of 1e-15 grows to some 1e-13 over 30 steps, so that code which does the same arithmetic in another order agrees
to 1e-10. `python tests/trajectories.py NAME …` writes the files of these methods anew; a commit that does so says why.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import seng
from seng import Curvature

FOLDER = Path(__file__).parent / "golden"
STEPS, EVERY, BATCH = 30, 7, 12
TOLERANCE = 1e-10


class Transformer(nn.Module):
    """One block; the table of tokens is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(9, 8), nn.Embedding(5, 8)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8, bias=False)
        self.mlp = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(5).expand_as(x))
        q, k, v = (
            t.unflatten(2, (2, 4)).transpose(1, 2)
            for t in self.qkv(self.first(h)).chunk(3, 2)
        )
        h = h + self.out(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        )
        return self.head(h + self.mlp(self.second(h)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 9),
        nn.Tanh(),
        nn.LayerNorm(9),
        nn.Linear(9, 7, bias=False),
        nn.Tanh(),
        nn.Linear(7, 4),
    )


def cnn() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3, stride=2, groups=2),
            nn.ReLU(),
        ),
        *(
            nn.ConvTranspose2d(4, 3, 2),
            nn.Tanh(),
            nn.Flatten(),
            nn.Linear(27, 4),
        ),
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "transformer": Transformer,
}


def batches(name: str, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    for step in range(start, start + STEPS):
        draw = torch.Generator().manual_seed(1000 + step)
        if name == "transformer":
            text = torch.randint(9, (BATCH, 6), generator=draw)
            yield text[:, :5], text[:, 1:]
        else:
            x = torch.randn(
                BATCH, *{"mlp": (6,), "cnn": (2, 6, 6)}[name], generator=draw
            )
            yield x, torch.randint(4, (BATCH,), generator=draw)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


Build = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Method:
    """How an optimizer is built, and in which way it is stepped."""

    build: Build
    loop: str = "plain"


def curved(
    lr: float = 0.05,
    loop: str = "plain",
    options: dict[str, Any] | None = None,
    **curvature: Any,
) -> Method:
    """SENG with a curvature, uncentred over λI unless asked otherwise."""
    curvature = UNCENTRED | curvature
    if curvature.get("form") == "explicit":
        del curvature["rank"]
    return Method(
        lambda m: seng.SENG(
            m,
            lr,
            curvature=Curvature(**curvature),
            **{"refresh_every": EVERY, "damping": 0.01} | (options or {}),
        ),
        loop,
    )


def default(lr: float = 0.05, loop: str = "plain", **options: Any) -> Method:
    return Method(
        lambda m: seng.SENG(m, lr, **{"refresh_every": EVERY, **options}), loop
    )


def kronecker(lr: float = 0.05, loop: str = "plain", **options: Any) -> Method:
    """The Kronecker metric alone: its square root."""
    known = {"power": 0.5, "rank": 32, "floor": 0.1, "decay": 0.8}
    options = {"refresh_every": EVERY, **known, **options}
    return Method(lambda m: seng.KFAC(m, lr, **options), loop)


def attached(**curvature: Any) -> Method:
    def build(model: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), 0.003, eps=1e-3)
        optimizer.handle = seng.attach(  # type: ignore[attr-defined]
            optimizer,
            model,
            refresh_every=EVERY,
            damping=0.01,
            curvature=Curvature(**UNCENTRED | curvature),
        )
        return optimizer

    return Method(build)


def groups(model: nn.Module) -> Any:
    params = list(model.parameters())
    halves = [
        {"params": params[:2], "lr": 0.02, "damping": 0.1},
        {"params": params[2:], "weight_decay": 0.01},
    ]
    return seng.SENG(
        halves,
        0.05,
        module=model,
        damping=0.01,
        refresh_every=EVERY,
        curvature=Curvature(**UNCENTRED),
    )


UNCENTRED: dict[str, Any] = {
    "base": None,
    "centred": False,
    "samples": None,
    "rank": 16,
    "decay": 0.8,
}
COVERED: dict[str, Any] = {  # over P, as centred
    "base": seng.Kronecker(rank=4, floor=0.03),
    "centred": True,
}
sketch = seng.sketch
METHODS: dict[str, Method] = {
    "default": default(),
    "default-nesterov": default(
        nesterov=True, weight_decay=0.01, momentum=0.8, damping=0.3
    ),
    "default-micro": default(loop="micro"),
    "default-damping": default(loop="damping"),
    "default-resumed": default(loop="resumed"),
    "default-maximize": default(0.01, maximize=True),
    "default-muon": default(0.02, recipe="muon"),
    "default-adamw": default(0.01, recipe="adamw", weight_decay=0.1),
    "default-adamw-resumed": default(0.01, "resumed", recipe="adamw"),
    "root": kronecker(),
    "root-nesterov": kronecker(
        nesterov=True, weight_decay=0.01, momentum=0.8, floor=0.1**0.5
    ),
    "root-micro": kronecker(loop="micro"),
    "root-resumed": kronecker(loop="resumed"),
    "root-maximize": kronecker(0.01, maximize=True),
    "root-small": kronecker(rank=3),
    "root-whole": kronecker(power=1, rank=128),
    "low-rank": curved(),
    "low-rank-1": curved(rank=1),
    "low-rank-wide": curved(rank=64),
    "low-rank-micro": curved(loop="micro"),
    "low-rank-resumed": curved(loop="resumed", sketch=sketch.CountSketch(20)),
    "low-rank-own-batch": curved(loop="own-batch"),
    "low-rank-damping": curved(loop="damping", relative_damping=False),
    "low-rank-groups": Method(groups),
    "low-rank-samples": curved(samples=5),
    "low-rank-decay": curved(decay=0.5, rank=5),
    "low-rank-centred": curved(centred=True),
    "merged": curved(form="merged", decay=0.0, rank=6),
    "explicit": curved(form="explicit", decay=0.0),
    "implicit": curved(form="implicit", decay=0.0, rank=3),
    "implicit-exact": curved(form="implicit", decay=0.0, rank=100),
    "implicit-centred": curved(
        form="implicit", decay=0.0, rank=3, centred=True
    ),
    "auto": curved(decay=0.0, rank=100),
    "sketch-rows": curved(form="explicit", decay=0.0, sketch=sketch.Rows(30)),
    "sketch-leverage": curved(
        form="implicit", decay=0.0, sketch=sketch.LeverageRows(30)
    ),
    "sketch-kronecker": curved(
        form="implicit", decay=0.0, sketch=sketch.KroneckerRows(4, 5)
    ),
    "sketch-gaussian": curved(
        form="explicit", decay=0.0, sketch=sketch.Gaussian(30)
    ),
    "sketch-count": curved(
        form="merged", decay=0.0, rank=5, sketch=sketch.CountSketch(30)
    ),
    "sketch-averaged": curved(sketch=sketch.Rows(40), rank=6),
    "sketch-centred": curved(
        form="implicit",
        decay=0.0,
        sketch=sketch.LeverageRows(30),
        centred=True,
    ),
    "independent": curved(
        form="implicit", decay=0.0, combine="independent", rank=2
    ),
    "paper": Method(
        lambda m: seng.SENG(
            m, 0.05, **seng.presets.paper(0.5, EVERY) | {"recipe": "sgd"}
        )
    ),
    "paper-units": Method(
        lambda m: seng.SENG(
            m, 0.02, **seng.presets.paper(0.5, EVERY, sketch.LeverageRows(40))
        )
    ),
    "kronecker-merged": curved(rank=4, **COVERED),
    "kronecker-explicit": curved(form="explicit", decay=0.0, **COVERED),
    "kronecker-implicit": curved(
        form="implicit",
        decay=0.0,
        rank=2,
        options={"damping": 0.1},
        **COVERED,
    ),
    "kronecker-sketch": curved(
        form="merged",
        rank=5,
        sketch=sketch.CountSketch(30),
        options={"damping": 0.1},
        **COVERED,
    ),
    "sampled": curved(fisher="sampled"),
    "gauss-newton": curved(
        fisher="gauss-newton", loss="cross-entropy", form="explicit", decay=0.0
    ),
    "network": curved(blocks="network"),
    "network-explicit": curved(blocks="network", form="explicit", decay=0.0),
    "network-auto": curved(blocks="network", decay=0.0, rank=100),
    "network-centred": curved(blocks="network", centred=True),
    "attach": attached(**COVERED),
    "attach-low-rank": attached(rank=5),
    "muon": Method(lambda m: seng.Muon(m, 0.02)),
    "kfac": Method(lambda m: tikhonov(m)),
    "kfac-micro": Method(
        lambda m: tikhonov(m, weight_decay=0.01, nesterov=True),
        "micro",
    ),
    "kfac-damping": Method(
        lambda m: tikhonov(m, decay=0.5, damping=0.2),
        "damping",
    ),
}


def tikhonov(model: nn.Module, **options: Any) -> Any:
    return seng.KFAC(
        model, 0.02, damp="tikhonov", refresh_every=EVERY, **options
    )


def residual(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return (out.softmax(-1) - F.one_hot(y, out.shape[-1])).flatten()


FITS: dict[str, dict[str, Any]] = {
    "least-squares": {"damping": 0.1},
    "least-squares-plain": {"acceleration": False, "damping": 0.1},
    "least-squares-search": {
        "line_search": True,
        "adapt": False,
        "damping": 0.1,
    },
    "least-squares-momentum": {
        "momentum": 0.5,
        "adapt": False,
        "damping": 1.0,
    },
    "least-squares-sketch": {"sketch": sketch.CountSketch(60), "damping": 0.1},
    "least-squares-whole": {"separate": False, "damping": 0.1},
}

RANKS: dict[
    str, tuple[str, Method]
] = {  # method -> how the network is spread, and how it is trained
    "shared-default": ("ddp", default()),
    "shared-root": ("ddp", kronecker()),
    "shared-low-rank": ("ddp", curved()),
    "shared-sketch": (
        "ddp",
        curved(sketch=sketch.CountSketch(40), rank=6, decay=0.0),
    ),
    "block-default": ("ddp", default(strategy="block")),
    "block-low-rank": ("ddp", curved(options={"strategy": "block"})),
    "block-explicit": (
        "ddp",
        curved(form="explicit", decay=0.0, options={"strategy": "block"}),
    ),
    "block-independent": (
        "ddp",
        curved(
            form="implicit",
            combine="independent",
            decay=0.0,
            rank=2,
            options={"strategy": "block"},
        ),
    ),
    "lagged-low-rank": ("ddp", curved(0.02, options={"strategy": "lagged"})),
    "lagged-implicit": (
        "ddp",
        curved(
            0.02,
            form="implicit",
            decay=0.0,
            rank=3,
            options={"strategy": "lagged"},
        ),
    ),
    "fsdp-default": ("fsdp", default()),
    "fsdp-low-rank": ("fsdp", curved()),
    "fsdp-merged": ("fsdp", curved(decay=0.0, rank=5)),
}


def _step(
    method: Method, step: int, model: nn.Module, opt: Any, x: Tensor, y: Tensor
) -> float:
    opt.zero_grad()
    parts = 3 if method.loop == "micro" else 1
    total = 0.0
    for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
        loss = loss_of(model, a, b) / parts
        loss.backward()
        total += float(loss.detach())
    if method.loop == "own-batch" and step % EVERY == 0:
        with opt.curvature_batch():
            loss_of(model, x.flip(-1)[:7], y[:7]).backward()
    if method.loop == "damping":
        for group in opt.param_groups:
            group["damping"] = 0.3 / (1 + step // 10)
    opt.step()
    return total


def trajectory(
    name: str, method: Method, nudge: float = 0.0
) -> dict[str, list[float]]:
    """The loss before every step, and of each tensor at the end two sums that tell it apart."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        next(model.parameters()).mul_(1 + nudge)
    opt = method.build(model)
    losses = []
    for step, (x, y) in enumerate(batches(name)):
        if method.loop == "resumed" and step == 11:
            state = opt.state_dict()
            opt = method.build(model)
            opt.load_state_dict(state)
        losses.append(_step(method, step, model, opt, x, y))
    return {
        "losses": losses,
        "tensors": fingerprints(list(model.parameters())),
    }


def fit(
    name: str, options: dict[str, Any], nudge: float = 0.0
) -> dict[str, list[float]]:
    """The same for least squares, on one batch."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        next(model.parameters()).mul_(1 + nudge)
    x, y = next(batches(name))
    fitted = seng.LeastSquares(model, residual, **options)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # some of them are differentiated as a whole
        losses = [
            fitted.step(x, y) for _ in range(5)
        ]  # from then on some are at rounding
    return {
        "losses": losses,
        "tensors": fingerprints(list(model.parameters())),
    }


def on_rank(
    rank: int, key: str, name: str, nudge: float = 0.0
) -> dict[str, list[float]]:
    """The same on one of several ranks; uneven parts of each batch."""
    how, method = RANKS[key]
    torch.manual_seed(0)
    model = MODELS[name]()
    with torch.no_grad():
        next(model.parameters()).mul_(1 + nudge)
    if how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(
            model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))
        )
        run: nn.Module = model
    else:
        run = nn.parallel.DistributedDataParallel(model)
    opt = method.build(run)
    losses = []
    for step, (x, y) in enumerate(batches(name)):
        mine = slice(0, 5) if rank == 0 else slice(5, None)
        losses.append(_step(method, step, run, opt, x[mine], y[mine]))
    tensors = [
        getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()
    ]
    return {"losses": losses, "tensors": fingerprints(tensors)}


def fingerprints(tensors: list[Tensor]) -> list[float]:
    out = []
    for t in tensors:
        flat = t.detach().flatten()
        weights = torch.linspace(1, 2, len(flat), dtype=flat.dtype).cos()
        out += [float(flat.norm()), float(flat @ weights)]
    return out


def difference(
    got: dict[str, list[float]], want: dict[str, list[float]]
) -> float:
    """The largest, relative where numbers are above 1."""
    pairs = [
        (a, b)
        for key in want
        for a, b in zip(got[key], want[key], strict=True)
    ]
    return max(
        abs(a - b) / max(1.0, abs(b)) if a == a else float("inf")
        for a, b in pairs
    )


def read(key: str) -> dict[str, dict[str, list[float]]]:
    return json.loads((FOLDER / f"{key}.json").read_text())


def write(key: str, found: dict[str, dict[str, list[float]]]) -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{key}.json").write_text(json.dumps(found, indent=1) + "\n")


def main(keys: list[str]) -> None:
    from several import Ranks

    ranks: Ranks | None = None
    for key in keys or [*METHODS, *FITS, *RANKS]:
        found, off = {}, {}
        for name in MODELS:
            if key in RANKS:
                ranks = ranks or Ranks(2)
                found[name] = ranks(on_rank, key, name)[0]
                off[name] = difference(
                    ranks(on_rank, key, name, 1e-15)[0], found[name]
                )
                continue
            run, how = (
                (trajectory, METHODS[key])
                if key in METHODS
                else (fit, FITS[key])
            )
            found[name] = run(name, how)
            off[name] = difference(run(name, how, 1e-15), found[name])
        write(key, found)
        ends = {
            name: f"{t['losses'][0]:.3f} -> {t['losses'][-1]:.3g} ({off[name]:.0e})"
            for name, t in found.items()
        }
        print(f"{key:26}", ends, flush=True)
    if ranks is not None:
        ranks.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1:])
