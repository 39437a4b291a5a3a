"""A recipe of one's own, sign descent: every weight moves by lr against its direction."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from seng.recipes.recipe import Recipe, recipe


@recipe("sign")
class Sign(Recipe):
    """θ ← θ − lr·sign(d)."""

    def step(
        self,
        state: Any,
        group: Mapping[str, Any],
        params: list[nn.Parameter],
        directions: dict[nn.Parameter, Tensor],
    ) -> None:
        for p in params:
            p.sub_(directions[p].sign(), alpha=group["lr"])
