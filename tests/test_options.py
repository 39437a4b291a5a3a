"""Every option acts, or is refused by name: of `Curvature`, `SENG`, `KFAC` and `LeastSquares`, and of Curvature's in pairs.

The options are read from the signatures: one without a case here fails the suite.
"""

import inspect
import warnings
from dataclasses import fields

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import seng
from seng import Curvature, Kronecker

ROWS = seng.sketch.Rows(20)
# Of layers that do not fit into memory, of K-FAC's norms, of an optimizer without a module.
pytestmark = pytest.mark.filterwarnings("ignore:seng:UserWarning")


class Network(nn.Sequential):
    """Convolution, norm and linear layers; `spare`, if there is one, is a parameter that no layer of torch's own holds."""

    def __init__(self, spare: bool = False) -> None:
        super().__init__(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.Tanh(),
            nn.LayerNorm([6, 4, 4]),
            nn.Flatten(),
            nn.Linear(96, 8),
            nn.Tanh(),
            nn.Linear(8, 4),
        )
        self.spare = nn.Parameter(torch.ones(4)) if spare else None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.spare is None else out * self.spare


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(24, 2, 4, 4, generator=draw)
    return x, torch.randint(4, (24,), generator=draw)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(
    kind: type, *, spare: bool = False, **options: object
) -> Tensor | str:
    """The weights after some steps, three refreshes among them; or the words of a refusal."""
    torch.manual_seed(0)
    model = Network(spare)
    try:
        opt = kind(model, **{"lr": 0.05, "refresh_every": 3, **options})
        for step in range(7):
            x, y = batch(step)
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward()
            opt.step()
    except (ValueError, TypeError) as refused:
        return str(refused)
    return weights(model)


def curved(**options: object) -> Tensor | str:
    try:
        curvature = Curvature(**options)
    except (ValueError, TypeError) as refused:
        return str(refused)
    return trained(seng.SENG, curvature=curvature)


def acts(name: str, usual: Tensor | str, other: Tensor | str) -> bool:
    """Whether an option changes what comes out, or is refused by its name."""
    assert isinstance(usual, Tensor), usual
    if isinstance(other, str):
        return name in other
    return float((other - usual).norm() / usual.norm()) > 1e-9


# What an option is set to, and the options beside which it should act.
CURVATURE: dict[str, tuple[object, dict[str, object]]] = {
    "form": ("implicit", {"decay": 0, "rank": 3}),
    "samples": (5, {}),
    "rank": (2, {}),
    "sketch": (ROWS, {}),
    "implicit_sketch": (
        ROWS,
        {"base": None, "rank": 100, "decay": 0, "threshold": 1},
    ),
    "threshold": (1, {"base": None, "combine": "independent"}),
    "combine": (
        "independent",
        {"form": "implicit", "base": None, "centred": False},
    ),
    "centred": (False, {}),
    "decay": (0.3, {}),
    "relative_damping": (False, {}),
    "fisher": ("sampled", {}),
    "blocks": ("network", {"base": None}),
    "memory": (1_000, {}),
    "loss": ("squares", {"fisher": "sampled"}),
    "base": (None, {}),
}


def test_every_option_of_curvature_has_a_case():
    assert {f.name for f in fields(Curvature)} == set(CURVATURE)


@pytest.mark.parametrize("name", CURVATURE)
def test_an_option_of_curvature_acts(name):
    value, beside = CURVATURE[name]
    found = curved(**beside, **{name: value})
    assert isinstance(found, Tensor) or name == "memory", found
    assert acts(name, curved(**beside), found)


CONTEXTS: dict[str, dict[str, object]] = {
    "over a base": {"form": "auto"},
    "over λI": {"base": None, "decay": 0.8},
    "network": {"blocks": "network", "base": None, "decay": 0.8},
    "explicit": {"form": "explicit", "base": None},
    "implicit": {"form": "implicit", "base": None, "rank": 3},
    "merged": {"form": "merged", "base": None, "decay": 0},
    "explicit over a base": {"form": "explicit"},
    "implicit over a base": {"form": "implicit", "rank": 3},
    "explicit, network": {
        "form": "explicit",
        "base": None,
        "blocks": "network",
    },
}


@pytest.fixture(scope="module")
def usual():
    """The weights of each context, trained once."""
    return {}


@pytest.mark.parametrize("name", CURVATURE)
@pytest.mark.parametrize("context", CONTEXTS)
def test_an_option_acts_in_every_context_or_is_refused(context, name, usual):
    beside, value = CONTEXTS[context], CURVATURE[name][0]
    if name in beside:
        return
    if context not in usual:
        usual[context] = curved(**beside)
    assert acts(name, usual[context], curved(**{**beside, name: value}))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"form": "explicit", "rank": 2}, "rank"),
        ({"threshold": 5}, "threshold"),
        ({"base": None, "decay": 0.8, "threshold": 5}, "threshold"),
        ({"base": None, "form": "implicit", "threshold": 5}, "threshold"),
        ({"decay": 0, "threshold": 5}, "threshold"),
        ({"implicit_sketch": ROWS}, "implicit_sketch"),
        (
            {"base": None, "decay": 0.8, "implicit_sketch": ROWS},
            "implicit_sketch",
        ),
        ({"form": "merged", "implicit_sketch": ROWS}, "implicit_sketch"),
    ],
    ids=str,
)
def test_what_would_do_nothing_is_refused(given, name):
    words = f"^Curvature: {name} does nothing here, since .*; leave it out"
    with pytest.raises(ValueError, match=words):
        Curvature(**given)


KRONECKER: dict[str, object] = {
    "power": 1.0,
    "rank": 2,
    "floor": 0.5,
    "decay": 0.3,
    "damp": "tikhonov",
}


def test_every_option_of_kronecker_has_a_case():
    assert {f.name for f in fields(Kronecker)} == set(KRONECKER)


@pytest.mark.parametrize("name", KRONECKER)
def test_an_option_of_kronecker_acts_as_a_base_or_is_refused(name):
    given = {name: KRONECKER[name]}
    found = curved(base=Kronecker(**given))
    assert isinstance(found, Tensor) or name == "damp", found
    assert acts(name, curved(), found)


PAPER = {
    "curvature": Curvature(base=None, relative_damping=False),
    "damping": 0.5,
}
LAM = {"curvature": Curvature(base=None)}
RECIPE: dict[str, tuple[object, dict[str, object]]] = {
    "lr": (0.02, {}),
    "recipe": ("muon", {}),
    "momentum": (0.5, {}),
    "nesterov": (True, {}),
    "weight_decay": (0.1, {}),
    "eps": (1.0, {"recipe": "muon"}),
    "refresh_every": (2, {}),
    "maximize": (True, {}),
}
SENG: dict[str, tuple[object, dict[str, object]]] = {
    **RECIPE,
    "damping": (0.5, {}),
    "curvature": (Curvature(base=None), {}),
    "strategy": ("lagged", LAM),
}
KFAC: dict[str, tuple[object, dict[str, object]]] = {
    **RECIPE,
    "power": (1.0, {}),
    "rank": (2, {}),
    "floor": (0.5, {}),
    "decay": (0.3, {}),
    "damp": ("tikhonov", {}),
    "damping": (0.5, {"damp": "tikhonov"}),
}
OPTIMIZERS = {seng.SENG: SENG, seng.KFAC: KFAC}
ELSEWHERE = {
    seng.SENG: {"params", "module", "strict", "betas", "sample_dim"},
    seng.KFAC: {
        "params",
        "module",
        "strict",
        "strategy",
        "betas",
        "sample_dim",
    },
}


def options_of(kind: type) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self"}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_option_of_an_optimizer_has_a_case(kind):
    assert options_of(kind) == OPTIMIZERS[kind].keys() | ELSEWHERE[kind]


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in OPTIMIZERS for name in OPTIMIZERS[kind]],
)
def test_an_option_of_an_optimizer_acts(kind, name):
    value, beside = OPTIMIZERS[kind][name]
    found = trained(kind, **beside, **{name: value})
    assert isinstance(found, Tensor), found
    assert acts(name, trained(kind, **beside), found)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_dimension_of_the_samples_acts(kind):
    """A batch of sequences, time first or samples first."""

    def moved(sample_dim):
        torch.manual_seed(0)
        layer = nn.LayerNorm(3)  # whose u² is no sum over positions
        opt = kind(layer, lr=1.0, sample_dim=sample_dim)
        x = torch.randn(5, 7, 3)
        (layer(x).square() * x).mean().backward()
        opt.step()
        return weights(layer)

    assert acts("sample_dim", moved(0), moved(1))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("betas", [(0.5, 0.9), (0.9, 0.5)])
def test_options_of_another_recipe_are_refused_by_name(kind, betas):
    for name, value in {"betas": betas, "eps": 1.0}.items():
        refused = trained(kind, **{name: value})
        assert isinstance(refused, str) and f"no option {name} " in refused


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_params_and_module_act(kind):
    """Without a module it is SGD; with some of the parameters, the others stay."""

    def weights_by(choose):
        torch.manual_seed(0)
        model = Network()
        opt = kind(**choose(model), lr=0.05)
        for step in range(2):
            opt.zero_grad()
            x, y = batch(step)
            F.cross_entropy(model(x), y).backward()
            opt.step()
        return weights(model)

    whole = weights_by(lambda m: {"params": m})
    inside = weights_by(lambda m: {"params": m.parameters(), "module": m})
    bare = weights_by(lambda m: {"params": m.parameters()})
    part = weights_by(lambda m: {"params": m[-1].parameters(), "module": m})
    assert torch.equal(inside, whole)
    assert acts("module", whole, bare) and acts("params", whole, part)


def test_strict_refuses_what_takes_the_plain_gradient():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert isinstance(trained(seng.SENG, spare=True), Tensor)
    assert any("spare" in str(w.message) for w in told)
    refused = trained(seng.SENG, spare=True, strict=True)
    assert (
        isinstance(refused, str)
        and "strict=True" in refused
        and "spare" in refused
    )


# What is refused


P = Kronecker()
NO_CURVATURE: list[tuple[dict[str, object], str]] = [
    ({"form": "plain"}, "unknown form 'plain'; use one of 'auto', "),
    ({"form": "lookup"}, "unknown form 'lookup'"),
    ({"form": None}, "unknown form None"),
    ({"combine": "both"}, "unknown combine 'both'; use one of 'exact', "),
    ({"fisher": "true"}, "unknown fisher 'true'; use one of 'empirical', "),
    ({"blocks": "row"}, "unknown blocks 'row'; use one of 'layer', "),
    ({"loss": "hinge"}, "unknown loss 'hinge'; use one of None, 'squares', "),
    ({"loss": "squares"}, "loss='squares' is what fisher='gauss-newton' or"),
    ({"relative_damping": 1}, "unknown relative_damping 1; use one of True"),
    ({"centred": 1}, "unknown centred 1; use one of None, True, False"),
    ({"centred": "yes"}, "unknown centred 'yes'"),
    *(
        (
            {name: value},
            f"{name} must be an integer of at least 1, not {value}",
        )
        for name in ("rank", "samples", "threshold")
        for value in (0, -3, 2.5, True)
    ),
    *(
        ({name: 9}, f"{name} is None or one of seng.sketch, such as Rows(256)")
        for name in ("sketch", "implicit_sketch")
    ),
    *(
        ({"decay": value}, f"decay must lie in [0, 1), not {value!r}")
        for value in (1, -0.1, True, "much", float("nan"))
    ),
    *(
        ({"memory": value}, "memory is bytes (an int) or a fraction in (0, 1]")
        for value in (0, -3, 1.5, 0.0, True, "1 GB")
    ),
    ({"base": "kronecker"}, "base is None (I) or a seng.Kronecker, not 'kron"),
    ({"base": True}, "base is None (I) or a seng.Kronecker, not True"),
    (
        {"base": Kronecker(damp="tikhonov")},
        "base.damp='tikhonov' has no Kronecker base; give base=None with it",
    ),
    (
        {"blocks": "network"},
        "blocks='network' has no Kronecker base; give base=None with it",
    ),
    (
        {"combine": "independent"},
        "combine='independent' has no Kronecker base; give base=None with it",
    ),
    *(
        (
            {"form": form, "sketch": ROWS},
            f"form='{form}' with sketch has no Kronecker base; give base=None",
        )
        for form in ("explicit", "implicit")
    ),
    (
        {"form": "implicit", "implicit_sketch": ROWS},
        "form='implicit' with implicit_sketch has no Kronecker base",
    ),
    *(
        (
            {"centred": True, "fisher": fisher},
            f"fisher='{fisher}' has no centred form; leave centred out",
        )
        for fisher in ("sampled", "gauss-newton")
    ),
    (
        {"centred": True, "combine": "independent", "base": None},
        "combine='independent' has no centred form; leave centred out",
    ),
    *(
        (
            {"form": form, "decay": 0.8},
            f"only the merged form can accumulate curvature; with form='{form}' use decay=0",
        )
        for form in ("explicit", "implicit")
    ),
    *(
        (
            {"base": None, "combine": "independent", **given},
            "combine='independent' (eq. 23) is the implicit form's",
        )
        for given in ({"form": "explicit"}, {"form": "merged"}, {"decay": 0.5})
    ),
    (
        {"base": None, "combine": "independent", "blocks": "network"},
        "combine='independent' (eq. 23) is made layer by layer",
    ),
]


@pytest.mark.parametrize(("given", "said"), NO_CURVATURE, ids=str)
def test_curvature_refuses_with_the_reason(given, said):
    with pytest.raises((ValueError, TypeError), match="^Curvature: ") as error:
        Curvature(**given)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["graft", "power", "base_rank", "traffic"])
def test_fields_that_are_gone_are_unknown(name):
    with pytest.raises(
        TypeError, match=f"unexpected keyword argument '{name}'"
    ):
        Curvature(**{name: None})


@pytest.mark.parametrize("name", ["units", "orthogonal"])
def test_options_that_are_gone_are_unknown(name):
    for kind in OPTIMIZERS:
        with pytest.raises(
            TypeError, match=f"unexpected keyword argument '{name}'"
        ):
            kind(Network(), **{name: True})


NO_OPTIMIZER: list[tuple[dict[str, object], str]] = [
    ({"recipe": "adam"}, "unknown recipe 'adam'; use one of 'sgd', "),
    ({"recipe": 3}, "unknown recipe 3; use one of"),
    *(
        ({name: value}, f"{name} must be at least 0, not {value!r}")
        for name in ("lr", "momentum", "weight_decay")
        for value in (-1, float("nan"))
    ),
    *(
        ({name: "fast"}, f"{name} is a number, not 'fast'")
        for name in ("lr", "momentum", "weight_decay")
    ),
    ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
    ({"nesterov": True, "momentum": 0.0}, "nesterov needs a momentum above 0"),
    *(
        (
            {"refresh_every": value},
            "refresh_every is a number of steps, at least 1",
        )
        for value in (
            0,
            -2,
            2.5,
            True,
            {},
            {5: 3},
            {0: 0},
            {0: 2.5},
            {0: 3, "9": 4},
        )
    ),
    *(
        (
            {"sample_dim": value},
            "sample_dim is the dimension of the samples, 0 or",
        )
        for value in (-1, 1.5, True, None)
    ),
    ({"strategy": "ring"}, "unknown strategy 'ring'; there are 'local'"),
    (
        {"recipe": "muon", "strategy": "lagged"},
        "recipe='muon' works on whole matrices of this step: it does not run with strategy='lagged'",
    ),
    ({"module": nn.Linear(2, 2)}, "module=… is another: give one of them"),
    ({"betas": (0.9, 0.9)}, "has no option betas with this recipe"),
    ({"eps": 1e-8}, "has no option eps with this recipe"),
]
ABSOLUTE = Curvature(base=None, relative_damping=False)
OF_SENG: list[tuple[dict[str, object], str]] = [
    *(
        ({"damping": value}, f"damping is λ, a number above 0, not {value!r}")
        for value in (0, -0.1, float("nan"))
    ),
    ({"damping": "much"}, "damping is a number, not 'much'"),
    (
        {"curvature": "kronecker"},
        "curvature is a seng.Curvature, not 'kronecker'",
    ),
    ({"curvature": P}, "curvature is a seng.Curvature, not Kronecker("),
    *(
        (
            {"recipe": "paper", "curvature": curvature},
            "divides by one λ for all layers",
        )
        for curvature in (
            None,
            Curvature(base=None),
            Curvature(relative_damping=False),
        )
    ),
    ({"strategy": "lagged"}, "strategy='lagged' has no Kronecker base"),
]
OF_KFAC: list[tuple[dict[str, object], str]] = [
    (
        {"damping": 0.1},
        "damp='floor' is damped by its floor; leave out damping",
    ),
    (
        {"damp": "tikhonov", "damping": 0},
        "damping is λ, a number above 0, not 0",
    ),
    *(
        (
            {"recipe": "paper", "damp": damp},
            "KFAC: recipe='paper' divides by the λ",
        )
        for damp in ("floor", "tikhonov")
    ),
    (
        {"strategy": "lagged"},
        "strategy='lagged' averages what each rank makes of its own samples",
    ),
]
REFUSALS = [
    *((kind, *case) for kind in OPTIMIZERS for case in NO_OPTIMIZER),
    *((seng.SENG, *case) for case in OF_SENG),
    *((seng.KFAC, *case) for case in OF_KFAC),
]


@pytest.mark.parametrize(("kind", "given", "said"), REFUSALS, ids=str)
def test_an_optimizer_refuses_with_the_reason(kind, given, said):
    with pytest.raises((ValueError, TypeError)) as error:
        kind(Network(), **given)
    assert said in str(error.value)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    "name", sorted(OPTIMIZERS[seng.SENG].keys() | KRONECKER.keys())
)
def test_groups_take_the_options_of_groups_alone(name, kind):
    """All others are refused, or would be read by nobody."""
    model = Network()
    of_groups = seng.SENG(model).defaults.keys() | {"eps"}
    if name in of_groups:
        return
    group = {"params": list(model.parameters()), name: None}
    with pytest.raises(
        ValueError, match=f"^{name} holds for the whole optimizer: give it to"
    ):
        kind([group], module=model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_strict_needs_a_module(kind):
    with pytest.raises(ValueError, match="strict=True: no module was given"):
        kind(Network().parameters(), strict=True)


@pytest.mark.parametrize(
    "given",
    [
        {"recipe": "paper", "curvature": ABSOLUTE},
        {"strategy": "lagged", **LAM},
    ],
)
def test_what_the_refusals_recommend_is_taken(given):
    assert isinstance(trained(seng.SENG, **given), Tensor)


FIT: dict[str, tuple[object, dict[str, object]]] = {
    "damping": (0.1, {}),
    "adapt": (False, {"acceleration": False}),
    "acceleration": (False, {"damping": 1.0}),
    "line_search": (True, {"adapt": False, "damping": 1e-4}),
    "momentum": (0.5, {"adapt": False, "damping": 1.0}),
    "sketch": (seng.sketch.CountSketch(25), {}),
    "memory": (1, {}),  # no step fits
    "separate": (True, {}),  # these residuals do not
}


def mixed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Residuals that hang on the mean over the samples, so that they do not separate."""
    out = model(x)
    return (out - out.mean(0) - torch.eye(4)[y]).flatten()


def fitted(**options: object) -> Tensor | str:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(32, 3), nn.Tanh(), nn.Linear(3, 4)
    )
    x, y = batch(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that they do not separate
            fit = seng.LeastSquares(model, mixed, **options)
            for _ in range(3):
                fit.step(x, y)
    except (ValueError, TypeError, MemoryError) as refused:
        return str(refused)
    return weights(model)


def test_every_option_of_least_squares_has_a_case():
    assert options_of(seng.LeastSquares) == FIT.keys() | {"model", "residual"}


@pytest.mark.parametrize("name", FIT)
def test_an_option_of_least_squares_acts(name):
    value, beside = FIT[name]
    found = fitted(**beside, **{name: value})
    assert isinstance(found, Tensor) or name in ("memory", "separate"), found
    assert acts(name, fitted(**beside), found)
