"""What a drafter is: the contract (`base`), the kinds (one module each), shared layers and tree arithmetic.

A kind is a module of this package that defines `Config` and `Model`; its name is the module's name. `kinds()` finds them,
so a new file is a new kind and there is no table to edit.
"""

import importlib
import pkgutil
from types import ModuleType

from draftsmith.drafters.base import Drafter, Proposal, Shape, TrainableDrafter, TrainingBatch
from draftsmith.drafters.checkpoint import build, load, save
from draftsmith.drafters.settings import nearest

__all__ = [
    "Drafter",
    "Proposal",
    "Shape",
    "TrainableDrafter",
    "TrainingBatch",
    "build",
    "kind_module",
    "kinds",
    "load",
    "save",
]

_SHARED = {
    "anchors",
    "adapters",
    "attention",
    "base",
    "causal_lm",
    "checkpoint",
    "compiling",
    "divergences",
    "fused",
    "grow",
    "head_gradient",
    "kv",
    "language_model",
    "layers",
    "layout",
    "losses",
    "recurrent",
    "regression",
    "settings",
    "starts",
    "texts",
    "tree",
    "unpack",
    "vocabulary",
}
_UNTRAINED = {"ngram", "suffix"}  # drafters, but nothing here trains them: no `Config`, no `Model`


def kinds() -> list[str]:
    """The names of all drafter kinds that can be trained, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name not in _SHARED | _UNTRAINED)


def kind_module(kind: str) -> ModuleType:
    """The module that implements a kind; ValueError with the nearest name if there is none."""
    if kind not in kinds():
        raise ValueError(f"unknown drafter kind {kind!r}; {nearest(kind, kinds())}")
    return importlib.import_module(f"draftsmith.drafters.{kind}")
