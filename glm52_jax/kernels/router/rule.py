"""How experts are chosen."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RoutingRule:
    """How experts are chosen.

    Attributes:
        k: experts of a token.
        groups, kept_groups: experts come in so many groups, of which a token may use its best; a group is ranked by the
            sum of its best two.
        normalise: whether a token's gates are made to sum to one.
        scale: their factor.
    """

    k: int
    groups: int = 1
    kept_groups: int = 1
    normalise: bool = True
    scale: float = 1.0
