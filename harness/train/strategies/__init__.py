"""The strategies by name: built-in ones, and the user's own classes."""

from __future__ import annotations

from collections.abc import Mapping

from harness.config.strategy_traits import StrategyTraits
from harness.errors import WorkloadError
from harness.system.user_code import load_from
from harness.train.strategies.base import Single, Strategy
from harness.train.strategies.ddp import Ddp
from harness.train.strategies.dp import DataParallel
from harness.train.strategies.fsdp import Fsdp

STRATEGIES: Mapping[str, type[Strategy]] = {
    "single": Single,
    "dp": DataParallel,
    "ddp": Ddp,
    "fsdp": Fsdp,
}
"""Of each row of BUILTIN_TRAITS in harness/config/strategy_traits.py its class."""
METHODS = ("wrap", "unwrap", "make_optimizer", "gradient_sync", "optimizer_state", "load_optimizer_state")


def make_strategy(name: str) -> Strategy:
    """Return a built-in strategy, or one of the user's own class; raise WorkloadError."""
    return STRATEGIES[name]() if name in STRATEGIES else load_strategy_class(name)()


def load_strategy_class(name: str) -> type[Strategy]:
    """Return the class behind ``package.module:ClassName``; raise WorkloadError if it is no strategy."""
    found: type[Strategy] = load_from(name, "class", what=f"strategy {name!r}")
    abstract = getattr(found, "__abstractmethods__", ())
    missing = [method for method in METHODS if method in abstract or not callable(getattr(found, method, None))]
    if missing:
        raise WorkloadError(
            f"strategy {name!r}: the class lacks {', '.join(missing)}; "
            "derive it from harness.train.strategies.base.Strategy, which has all but wrap"
        )
    traits = getattr(found, "traits", None)
    if not isinstance(traits, StrategyTraits):
        raise WorkloadError(
            f"strategy {name!r}: traits: got {type(traits).__name__}; "
            "allowed: a StrategyTraits of harness.config.strategy_traits"
        )
    return found
