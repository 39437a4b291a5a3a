"""Assumptions A.1 and A.2 on U of a trained network: how large must q be, and which sketch keeps the span of U best?

    A.1  ‖NᵀSN − I‖₂ ≤ η          A.2  ‖NᵀSv − Nᵀv‖² ≤ ε‖v‖²          S = ΩᵀΩ; N: an orthonormal basis of span U, ρ columns

v is the gradient of a batch that U does not know. For Gaussian Ω, random matrix theory has η → (1 + √(ρ/q))² − 1, which is
below 1 from q = (1 + √2)²ρ ≈ 5.8ρ on; the mean of ε is known for every flat sketch (`seng.lab.theory.sketched`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import torch

from seng.lab.theory.sketched import (
    BOTH,
    KINDS,
    OBLIVIOUS,
    drawn,
    errors,
    expected,
)
from seng.lab.theory.study import Claim, Outcome, Say, Study
from seng.lab.theory.trained import Layer, layers
from seng.linalg.sketch import Rows, RowSample

HIGH = 0.95  # the high quantile, and the share of draws that shall have η < 1
EDGE = (1 + 2**0.5) ** 2  # q/ρ from which a Gaussian Ω has η < 1
FIT = 4  # exponents are fitted from q = 4ρ on: below, the second term of η is as large as the first
ERRORS = 4  # standard errors that a mean may be off
LOOKS = {  # colours of Okabe and Ito's palette
    "Gaussian": ("#000000", "o"),
    "CountSketch": ("#0072B2", "s"),
    "Rows": ("#009E73", "^"),
    "LeverageRows": ("#D55E00", "v"),
    "rows by leverage": ("#CC79A7", "D"),
    "KroneckerRows": ("#E69F00", "P"),
}


def measured(
    kind: str, layer: Layer, q: int, draws: int, seed: int
) -> dict[str, Any]:
    """Medians, high quantiles and means over the draws, as plain numbers."""
    generator = torch.Generator().manual_seed(seed)
    found = [
        astuple(errors(layer, layer.g, drawn(kind, layer, q, generator)))
        for _ in range(draws)
    ]
    eta, epsilon, gram, damped, energy, rows = torch.tensor(
        found, dtype=torch.float64
    ).unbind(1)
    return {
        "q": float(rows[0]),
        "draws": draws,
        "eta": [float(eta.quantile(p)) for p in (0.5, HIGH)],
        "least_eta": float(eta.min()),
        "product": [float(epsilon.quantile(p).sqrt()) for p in (0.5, HIGH)],
        "epsilon": [float(epsilon.mean()), float(epsilon.std() / draws**0.5)],
        "expected": expected(kind, layer, layer.g, q),
        "gram": float(gram.median()),
        "damped": float(damped.median()),
        "energy": [float(energy.mean()), float(energy.std() / draws**0.5)],
    }


def crossing(points: list[dict[str, Any]]) -> float | None:
    """The q at which the high quantile of η falls below 1 for good, between points by a power law; None: beyond the last."""
    above = [i for i, point in enumerate(points) if point["eta"][1] >= 1]
    if not above or above[-1] + 1 == len(points):
        return None if above else points[0]["q"]
    a, b = points[above[-1]], points[above[-1] + 1]
    logs = torch.tensor(
        [a["eta"][1], b["eta"][1], b["q"] / a["q"]], dtype=torch.float64
    ).log()
    return float(a["q"] * (logs[2] * logs[0] / (logs[0] - logs[1])).exp())


def exponent(
    points: list[dict[str, Any]],
    value: Callable[[dict[str, Any]], float],
    least: float,
) -> float:
    """Of the power law through the points with q ≥ least."""
    used = [point for point in points if point["q"] >= least]
    x, y = (
        torch.tensor(
            [[point["q"], value(point)] for point in used], dtype=torch.float64
        )
        .log()
        .unbind(1)
    )
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def pooled(layer: dict[str, Any], kind: str, key: str) -> tuple[float, float]:
    """A mean over what it should be, and its standard error: of all draws with q ≥ ρ together, since a single q has few."""
    points = [p for p in layer["sketches"][kind] if p["q"] >= layer["rank"]]
    weights = [
        p["draws"] / (p["expected"] if key == "epsilon" else 1.0)
        for p in points
    ]
    draws = sum(p["draws"] for p in points)
    mean = (
        sum(w * p[key][0] for w, p in zip(weights, points, strict=True))
        / draws
    )
    return mean, sum(
        (w * p[key][1]) ** 2 for w, p in zip(weights, points, strict=True)
    ) ** 0.5 / draws


def printed(layer: Layer, q: int, draws: int) -> list[float]:
    """The mean of ‖ΩU‖_F²/‖U‖_F² of uniform rows with the printed scale e_i/p_i = n·e_i, its standard error, and q·n."""
    generator, n = torch.Generator().manual_seed(q), layer.U.n
    found = []
    for _ in range(draws):
        omega = Rows(q, replacement=True).draw(layer.U, generator)
        assert isinstance(omega, RowSample)
        found.append(
            errors(
                layer,
                layer.g,
                replace(omega, scale=torch.full_like(omega.scale, n)),
            ).energy
        )
    energies = torch.tensor(found, dtype=torch.float64)
    return [
        float(energies.mean()),
        float(energies.std() / draws**0.5),
        float(q * n),
    ]


def run(say: Say, quick: bool) -> Outcome:
    """Every sketch at every q, on both layers."""
    samples, draws, dense, largest = (
        (16, 24, 2048, 256) if quick else (32, 100, 8192, 2048)
    )
    numbers: dict[str, Any] = {"samples": samples, "layers": {}, "printed": {}}
    for at, layer in enumerate(layers(samples, 20 if quick else 40)):
        sizes = [
            samples // 2 * 2**i
            for i in range(20)
            if samples // 2 * 2**i <= largest
        ]
        found: dict[str, list[dict[str, Any]]] = {}
        for number, kind in enumerate(KINDS):
            say(f"{layer.name}: {kind}")
            # A Gaussian Ω takes q·n random numbers, so there are fewer of the large ones.
            times = [
                min(draws, max(4, dense // q)) if kind == "Gaussian" else draws
                for q in sizes
            ]
            seeds = [
                10_000 * at + 1_000 * number + i for i in range(len(sizes))
            ]
            found[kind] = [
                measured(kind, layer, q, t, seed)
                for q, t, seed in zip(sizes, times, seeds, strict=True)
            ]
        shares = {
            "Rows": torch.full_like(layer.g, 1 / layer.U.n),
            "LeverageRows": layer.row_norms,
        }
        numbers["layers"][layer.name] = {
            **{
                "n": layer.U.n,
                "rank": layer.rank,
                "condition": float(layer.sigma[0] / layer.sigma[-1]),
            },
            "coherence": {
                kind: layer.coherence(p) for kind, p in shares.items()
            }
            | {"rows by leverage": 1.0},
            "crossing": {
                kind: crossing(points) for kind, points in found.items()
            },
            "sketches": found,
        }
        numbers["printed"][layer.name] = printed(layer, sizes[-2], draws)
    slope, edge = (0.2, 0.4) if quick else (0.1, 0.25)
    claims = (
        _falls(numbers, slope),
        _mean(numbers),
        _enough(numbers, edge),
        _order(numbers),
        _undone(numbers),
    )
    return Outcome(
        (*claims, *_scale(numbers)),
        numbers,
        lambda figure: _draw(figure, numbers),
        _remarks(numbers),
    )


def _falls(numbers: dict[str, Any], tolerance: float) -> Claim:
    fits = {
        f"{kind}, {name}": (
            exponent(
                layer["sketches"][kind],
                lambda point: point["eta"][0],
                FIT * layer["rank"],
            ),
            exponent(
                layer["sketches"][kind],
                lambda point: point["epsilon"][0] ** 0.5,
                FIT * layer["rank"],
            ),
        )
        for name, layer in numbers["layers"].items()
        for kind in OBLIVIOUS
    }
    holds = all(
        abs(value + 0.5) <= tolerance
        for pair in fits.values()
        for value in pair
    )
    words = f"A.1, A.2: from q = {FIT}ρ on, η and √ε of oblivious sketches fall like q^(−1/2); exponents within {tolerance}"
    return Claim(
        words,
        "; ".join(
            f"{where}: η {a:.2f}, √ε {b:.2f}" for where, (a, b) in fits.items()
        ),
        holds,
    )


def _mean(numbers: dict[str, Any]) -> Claim:
    kinds = (*OBLIVIOUS, "Rows", "rows by leverage")
    found = {
        f"{kind}, {name}": pooled(layer, kind, "epsilon")
        for name, layer in numbers["layers"].items()
        for kind in kinds
    }
    holds = all(
        abs(mean - 1) <= ERRORS * error for mean, error in found.values()
    )
    words = f"A.2: the mean of ε over its closed form, all draws with q ≥ ρ together, is 1 within {ERRORS} standard errors"
    return Claim(
        words,
        "; ".join(
            f"{where}: {mean:.3f} ± {error:.3f}"
            for where, (mean, error) in found.items()
        ),
        holds,
    )


def _enough(numbers: dict[str, Any], tolerance: float) -> Claim:
    parts, holds = [], True
    for name, layer in numbers["layers"].items():
        rank, at, every = (
            layer["rank"],
            layer["crossing"],
            [p for points in layer["sketches"].values() for p in points],
        )
        few = [p["least_eta"] for p in every if p["q"] < rank]
        gaussian = at["Gaussian"]
        holds = (
            holds
            and gaussian is not None
            and abs(gaussian / rank / EDGE - 1) <= tolerance
            and min(few) >= 1 - 1e-9
        )
        listed = ", ".join(
            f"{kind} {'none' if q is None else f'{q / rank:.1f}ρ'}"
            for kind, q in at.items()
        )
        parts.append(
            f"{name} (ρ = {rank}): {listed}; smallest η below q = ρ: {min(few):.2f}"
        )
    words = f"η < 1 in {HIGH:.0%} of draws takes a Gaussian Ω q = {EDGE:.1f}ρ (± {tolerance:.0%}); no Ω has it with q < ρ"
    return Claim(words, "; ".join(parts), holds)


def _order(numbers: dict[str, Any]) -> Claim:
    parts, holds = [], True
    for name, layer in numbers["layers"].items():
        kinds = sorted(
            layer["coherence"], key=lambda kind: layer["coherence"][kind]
        )
        etas = {kind: layer["sketches"][kind][-1]["eta"][0] for kind in kinds}
        holds = (
            holds
            and list(etas.values()) == sorted(etas.values())
            and kinds[-1] == "LeverageRows"
        )
        listed = ", ".join(
            f"{kind} {layer['coherence'][kind]:.3g} and η {eta:.2f}"
            for kind, eta in etas.items()
        )
        parts.append(
            f"{name}, q = {layer['sketches']['Rows'][-1]['q']:.0f}: {listed}"
        )
    words = "A.1: among samplings of rows, η grows with the coherence max ℓ_i/(ρ p_i), and the paper's row norms have the largest"
    return Claim(words, "; ".join(parts), holds)


def _undone(numbers: dict[str, Any]) -> Claim:
    parts, holds = [], True
    for name, layer in numbers["layers"].items():
        rows, norms = (
            layer["sketches"][kind][-1] for kind in ("Rows", "LeverageRows")
        )
        holds = (
            holds
            and norms["gram"] < rows["gram"]
            and norms["damped"] < 1.25 * rows["damped"]
        )
        each = (
            f"{key} {rows[key]:.3f} and {norms[key]:.3f}"
            for key in ("gram", "damped")
        )
        parts.append(f"{name}: uniform and row norms: {', '.join(each)}")
    words = "Yet row norms keep UᵀU better than uniform rows, and about as well (within 1.25) what a solve with λ = 0.01 σ₁² needs"
    return Claim(words, "; ".join(parts), holds)


def _scale(numbers: dict[str, Any]) -> tuple[Claim, Claim]:
    means = {
        f"{kind}, {name}": pooled(layer, kind, "energy")
        for name, layer in numbers["layers"].items()
        for kind in KINDS
    }
    off = {
        where: abs(mean - 1) / (error + 1e-9)
        for where, (mean, error) in means.items()
    }  # of row norms there is no error
    worst = max(off, key=lambda where: off[where])
    ours = Claim(
        f"Ours: the mean of ‖ΩU‖²/‖U‖², all draws with q ≥ ρ together, is 1 for every sketch, within {ERRORS} standard errors",
        f"worst of {len(off)}: {worst}, {means[worst][0]:.4f} ± {means[worst][1]:.4f}",
        off[worst] <= ERRORS,
    )
    theirs = Claim(
        f"With the printed e_i/p_i (eq. 14) of uniform rows it is q·n, within {ERRORS} standard errors, not 1",
        "; ".join(
            f"{name}: {m:.4g} ± {e:.2g}, q·n = {f:.4g}"
            for name, (m, e, f) in numbers["printed"].items()
        ),
        all(
            abs(mean - factor) <= ERRORS * error < mean - 1
            for mean, error, factor in numbers["printed"].values()
        ),
    )
    return ours, theirs


def _remarks(numbers: dict[str, Any]) -> tuple[str, ...]:
    out = []
    for name, layer in numbers["layers"].items():
        norms, small, both = (
            layer["sketches"][kind][-1]
            for kind in ("LeverageRows", "KroneckerRows", BOTH)
        )
        mean = f"E ε is {norms['expected']:.3g}, the median of {norms['draws']} draws {norms['product'][0] ** 2:.3g}"
        sides = f"with its small side whole η {small['eta'][0]:.2f}, with both sampled {both['eta'][0]:.2f}"
        out.append(
            f"{name}, q = {norms['q']:.0f}: of row norms, {mean}; of KroneckerRows, {sides}"
        )
    return tuple(out)


def _draw(figure: Any, numbers: dict[str, Any]) -> None:
    axes = figure.subplots(2, 2, sharex=True)
    for row, (name, layer) in zip(
        axes, numbers["layers"].items(), strict=True
    ):
        rank = layer["rank"]
        for kind, (colour, marker) in LOOKS.items():
            points = layer["sketches"][kind]
            q = [p["q"] for p in points]
            for ax, key in zip(row, ("eta", "product"), strict=True):
                middle, high = zip(*(p[key] for p in points), strict=True)
                ax.plot(
                    q,
                    middle,
                    marker=marker,
                    markersize=4,
                    color=colour,
                    label=kind,
                    linewidth=1.2,
                )
                ax.fill_between(
                    q, middle, high, color=colour, alpha=0.12, linewidth=0
                )
        first, last = (layer["sketches"]["Gaussian"][i]["q"] for i in (0, -1))
        line = [first * (last / first) ** (i / 50) for i in range(51)]
        theory = (
            [(1 + (rank / x) ** 0.5) ** 2 - 1 for x in line],
            [(rank / x) ** 0.5 for x in line],
        )
        for ax, y, words in zip(
            row, theory, ("(1 + √(ρ/q))² − 1", "√(ρ/q)"), strict=True
        ):
            ax.plot(
                line, y, ":", color="0.45", linewidth=2, label=words, zorder=0
            )
            ax.set(xscale="log", yscale="log")
            ax.grid(alpha=0.25)
            ax.spines[["top", "right"]].set_visible(False)
        row[0].axhline(1, color="0.3", linewidth=0.8)
        row[0].axvline(rank, color="0.3", linewidth=0.8, linestyle="--")
        row[0].set(
            ylabel="η: ‖NᵀΩᵀΩN − I‖₂",
            title=f"{name}, n = {layer['n']}, ρ = {rank} (dashed)",
            ylim=(0.1, 50),
        )
        row[1].set(
            ylabel="√ε: ‖NᵀΩᵀΩv − Nᵀv‖/‖v‖",
            title="line: median, band: up to 95 % of draws",
            ylim=(0.05, 10),
        )
    for ax in axes[1]:
        ax.set_xlabel("q")
    axes[0, 0].legend(frameon=False, fontsize=7, ncols=2)
    axes[0, 1].legend(
        *[x[-1:] for x in axes[0, 1].get_legend_handles_labels()],
        frameon=False,
        fontsize=8,
    )


STUDY = Study(
    "embedding",
    "A.1 and A.2: how well does each sketch keep the span of U, and from which q on?",
    run,
    (10.0, 7.0),
)
