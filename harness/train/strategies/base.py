"""Which parts of a model fsdp shards one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

Units = Callable[[nn.Module], Sequence[nn.Module]]


def default_units(model: nn.Module) -> list[nn.Module]:
    """The children of each ModuleList and Sequential, inner ones first, each once."""
    parents = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    return list(dict.fromkeys(child for parent in reversed(parents) for child in parent.children()))
