"""An operation of torch with its arguments, kept to be run later."""

from __future__ import annotations

from typing import Any

import torch

from devstream._compat import modes
from devstream.races.operations import Tensors


class Call:
    """One operation with its arguments, to be run once for its shapes and once more for its values."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self._args, self._kwargs = func, args, kwargs
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        self._generator = given[0] if given else torch.default_generator
        #: The generator's state at the issue, where the operation draws random numbers.
        self.state = self._generator.get_state() if modes.is_random(func) else None

    def given(self, position: int) -> Any:
        """Return the argument at *position*, as the caller gave it."""
        return self._args[position]

    def once(self) -> Any:
        """Run it now."""
        return self.func(*self._args, **self._kwargs)

    def first(self) -> Any:
        """Run it as if it had not run yet."""
        if self.state is not None:
            self._generator.set_state(self.state)
        return self.once()

    def draw(self, writes: Tensors) -> None:
        """Draw its random numbers into nothing: what is drawn next must not depend on when this runs."""
        known = {id(tensor) for tensor in writes}

        def scratch(value: Any) -> Any:
            return torch.empty_like(value) if id(value) in known else value

        self.func(*map(scratch, self._args), **{name: scratch(value) for name, value in self._kwargs.items()})

    def hold(self) -> Tensors:
        """Keep the arguments in tensors of our own, and return these; what the program still holds is its own."""
        held: Tensors = []

        def own(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                held.append(value.detach())
                return held[-1]
            if isinstance(value, list | tuple):
                return type(value)(own(one) for one in value)
            return value

        self._args = tuple(own(one) for one in self._args)
        self._kwargs = {name: own(value) for name, value in self._kwargs.items()}
        return held

    def again(self) -> Any:
        """Run it for its values, with the random numbers of its issue."""
        if self.state is None:
            return self.once()
        now = self._generator.get_state()
        self._generator.set_state(self.state)
        try:
            return self.once()
        finally:
            self._generator.set_state(now)

    def drop(self) -> None:
        """Let go of the arguments."""
        self._args, self._kwargs = (), {}


__all__ = ["Call"]
