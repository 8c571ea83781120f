"""State of updates beside a model's variables, of which ranks may have parts."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, kw_only=True)
class Save:
    """What a file is written of, and when."""

    path: Any
    weights: Sequence[Any]  # of the model, whose file it is
    fits: bool  # in ``fit``
    has_failed: bool  # after an error, when ranks are out of step


class State(Protocol):
    """What is carried from step to step, and saved with a model.

    All states are asked, in their order, as a model is compiled, saved or loaded, and
    as it begins to train.
    """

    def keep(self, optimizers: Sequence[Any]) -> None:
        """Forgets the state of all but these optimizers, as the model is compiled."""

    def gather(self) -> None:
        """Gives rank 0 what it saves; all ranks call it."""

    def forget_gathered(self) -> None:
        """Discards what was gathered, which the steps that follow change."""

    def saving(self, save: Save) -> AbstractContextManager[None]:
        """Scope in which rank 0 writes the model's file."""

    def loading(self, path: Any, model: Any) -> AbstractContextManager[None]:
        """Scope in which the model's file is read."""
