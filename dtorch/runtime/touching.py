"""Which meshes a batch touches, found out once for a body. Pure; part of the controller."""

from __future__ import annotations

from dtorch.runtime.events import Submission
from dtorch.transport.messages import Definition, Program

MAX_BODIES = 256
"""Bodies of batches remembered with the meshes that they touch."""


class Touching:
    """What the signatures of a session touch.

    Attributes:
        has_random: some op that draws random numbers is known. All workers draw alike, so it touches all meshes.
    """

    def __init__(self) -> None:
        self.has_random = False
        self._meshes: dict[int, tuple[int, ...]] = {}  # signature -> meshes; () for all
        self._bodies: dict[bytes, frozenset[int] | None] = {}

    def define(self, definition: Definition) -> None:
        if definition.params.get("random"):
            self.has_random = True
            self._meshes[definition.sig] = ()
        else:
            layouts = (*definition.inputs, *definition.outputs)
            self._meshes[definition.sig] = tuple(sorted({layout.mesh for layout in layouts}))

    def add_program(self, program: Program) -> None:
        """A program, whose definition was told before."""
        if self._meshes[program.sig]:
            self._meshes[program.sig] = program.meshes

    def forget(self, below: int) -> None:
        """Drop signatures below a number."""
        self._meshes = {s: m for s, m in self._meshes.items() if s >= below}
        self._bodies.clear()

    def of(self, batch: Submission) -> frozenset[int] | None:
        """Meshes that the calls of a batch touch, None for all. A batch that was seen before costs the same however many
        calls it has."""
        try:
            return self._bodies[batch.body]
        except KeyError:
            pass
        meshes = [self._meshes[signature] for signature in batch.signatures]
        found = frozenset(mesh for several in meshes for mesh in several) if all(meshes) else None
        if len(self._bodies) >= MAX_BODIES:
            del self._bodies[next(iter(self._bodies))]
        self._bodies[batch.body] = found
        return found
