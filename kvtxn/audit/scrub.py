"""``Scrub``: compares the bytes of rows and states with their checksums from an earlier step.

Digests follow an engine's reports. Only bytes show a kernel that writes where it should not, a
wrong copy, or a flipped bit. So when rows become durable, a checksum of each row is taken per
layer, and when rows are read later, a sample of them is compared: each slot once in ``every`` steps
that read it. With ``poison``, rows and states that are dead become NaN, so that a kernel that reads
one of them shows it in its output, where ``trace`` finds it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ..errors import ConfigError
from ..host_values import described
from ..layers import LayerRef
from . import byte_books, checks
from .arguments import listed, tokens_besides
from .byte_books import EVERY, ByteBooks, Window
from .groups import Group, Place
from .ledger import Ledger
from .rows import slots_at
from .step import Step
from .violation import KIND_NUMBER

_IMPORTED: Final = KIND_NUMBER["imported"]


class Scrub:
    """Checksums of rows and states, kept beside a ledger, and poison in what is dead.

    An engine calls it in each step, around the calls of the ledger::

        scrub.compare(step)                         # what the step reads is what was written
        ledger.write(step)
        ledger.check(step)
        ...                                         # the forward
        scrub.trace(step, logits, logits_rows)      # a NaN that came out
        ...                                         # sampling
        ledger.resolve(accepted, sampled)
        scrub.seal(step, accepted)                  # what the step leaves, and what is dead

    On a GPU with Triton's passes no call waits: ``compare`` and ``seal`` are two launches each (one
    lists slots, one reads their bytes), ``trace`` is one. A pass takes at most 65,536 slots; those
    beyond are neither compared nor sealed.

    Violations are the ledger's, of kind ``changed``: ``found`` is "bytes" or "nan". Checksums are
    64 bits wide and keyed; other bytes have an equal one with a chance of about 2^-64, and a
    change within 8 bytes is always seen. A ledger has at most one scrub, for all its layers.

    Args:
        ledger: the ledger, which knows the request of each row.
        layers: the layers to watch, at least one, each once, on the ledger's device; a layer of a
            group that the ledger does not have is refused.
        every: one slot in this many is compared in each step.
        poison: True fills all rows and states that are dead with NaN, as far as their format has
            one; names of groups fill those of these groups; False fills nothing. Dead is what no
            step may read any more, such as the row of a rejected draft; ``seal`` fills it. A kernel
            that reads it all the same then has a NaN in its output, and ``trace`` reports it. Use
            it in tests, with kernels that skip masked rows: one that multiplies masked rows of V by
            zero turns every answer into NaN. Leave out groups of states whose last settled state is
            kept at a block boundary for other requests.
        windows: the convolution buffers that are longer than what a step reads, by layer name.
            They are filled, and not compared.

    Raises:
        LayerError: there is no layer, or one is named twice; a layer's group is unknown, or its
            cache has other blocks or another device; or a window does not fit its layer.
        ConfigError: the ledger is no ledger, or has a scrub already; ``every`` is not a positive
            int; or ``poison`` names other groups.
    """

    def __init__(
        self,
        ledger: Ledger,
        layers: Sequence[LayerRef],
        *,
        every: int = EVERY,
        poison: bool | Collection[str] = False,
        windows: Mapping[str, Window] | None = None,
    ) -> None:
        if not isinstance(ledger, Ledger) or ledger.has_bytes:
            raise ConfigError(
                "Scrub", "this ledger cannot have a scrub", expected="a Ledger without a scrub",
                got=f"a {type(ledger).__name__}" + " with one" * isinstance(ledger, Ledger),
                hint="give one scrub the layers of all groups",
            )  # fmt: skip
        every_layer = listed("Scrub", "layers", layers, "a list of LayerRef")
        self._ledger: Final = ledger
        self.books: Final = ByteBooks.new(ledger.books, every_layer, every, poison, windows)
        self.passes: Final = ledger.passes.byte_passes(self.books)
        ledger.findings.layers = tuple(ref.name for ref in every_layer)
        ledger.watch_bytes(self.books)

    @property
    def compared(self) -> int:
        """Number of rows and states that were compared. Waits for the device."""
        return int(self.books.compared)

    @staticmethod
    def num_bytes(groups: Sequence[Group], layers: Mapping[str, int], max_requests: int) -> int:
        """Return the bytes that a scrub takes, without making it.

        8 per slot and layer, 8 per slot (once for groups of one pool), and 8 per request. Triton's
        passes take 3 MiB beside that, which the result does not include.

        Args:
            groups: the ledger's groups.
            layers: the number of layers of each group, by group name.
            max_requests: the ledger's.

        Raises:
            ConfigError: ``layers`` names other groups, or an argument is no number.
        """
        return byte_books.num_bytes(groups, layers, max_requests)

    def compare(self, step: Step) -> None:
        """Compare a sample of the rows and states of earlier steps that a step will read.

        Call it before ``Ledger.write``. Changed bytes become violations of kind ``changed``.

        Raises:
            ConfigError: the step does not fit the ledger.
        """
        self._ledger.require("compare", step)
        self.passes.compare(step)

    def seal(
        self, step: Step, accepted: Tensor | Sequence[int] | None = None, *, besides: int = 0
    ) -> None:
        """Take the checksums of the rows and states that a step leaves; poison what is dead.

        Only groups that ``poison`` named are poisoned.

        Call it after ``Ledger.resolve``.

        Args:
            step: a step whose forward is done.
            accepted: int ``[num_requests]``, as given to ``Ledger.resolve``; None: no draft of the
                step was accepted, or it had none.
            besides: as given to ``Ledger.resolve``.

        Raises:
            ConfigError: the step is no step, or has drafts that are trees.
            AcceptanceError: ``accepted`` does not fit the step, or ``besides`` is no number.
        """
        besides = tokens_besides("seal", besides)
        self._ledger.require("seal", step, after=True)
        if step.parents is not None:
            raise ConfigError(
                "seal", "a count does not say which drafts of a tree stay",
                expected="a step without parents", got="parents",
                hint="compare no bytes where drafts are trees; nothing was sealed",
            )  # fmt: skip
        if accepted is None:
            counts = torch.zeros(len(step.lines), dtype=torch.int64, device=self._ledger.device)
        else:
            counts, _ = self._ledger.outcome("seal", step, accepted, None, besides)
        self.passes.seal(step, counts, besides)

    def trace(self, step: Step, outputs: Tensor, rows: Tensor) -> None:
        """Report each request that has a NaN in an output of its rows, once, as ``changed``.

        Call it after the forward and before ``Ledger.resolve``. Use it with ``poison``; without it
        a NaN may be the model's own.

        Args:
            step: the step.
            outputs: float ``[n, ...]``, such as logits, or hidden states of the last layer.
            rows: int ``[n]``, the row of the step that each output belongs to; -1: to none.

        Raises:
            ConfigError: the step is no step, or the outputs do not fit ``rows``.
        """
        self.passes.trace(step, *self._outputs("trace", step, outputs, rows))

    def locate(self, step: Step, outputs: Tensor, rows: Tensor, *, clear: bool = False) -> None:
        """Report each request that has a NaN in an output, once, with the row it came from.

        Call it like ``trace``, without ``poison``, when an output is known to have a NaN. It
        searches all rows and states that the request's step may have read, and waits for the
        device. The report, of kind ``changed`` with ``found`` "nan", names the slot and the layer:
        a row of an earlier step if one has a NaN; else one that lies masked in the same blocks;
        else the step's own first row with a NaN, which the model or a kernel has made. It names no
        slot if none has a NaN.

        Args:
            step: as in ``trace``.
            outputs: as in ``trace``.
            rows: as in ``trace``.
            clear: then fill with zeros the rows with a NaN that the search found, since kernels
                that multiply masked rows by zero would hand it to whoever gets the block next. For
                an engine that computes the request again.

        Raises:
            ConfigError: as in ``trace``.
        """
        outputs, rows = self._outputs("locate", step, outputs, rows)
        self.passes.locate(step, outputs, rows, clear=clear)

    def _outputs(
        self, operation: str, step: Step, outputs: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Check the outputs of a step's rows; return both on the device, outputs at least 2-D.

        Raises:
            ConfigError: the step is no step, or the outputs do not fit ``rows``.
        """
        self._ledger.require(operation, step, after=True)
        rows = checks.ints(operation, "rows", rows)
        right = isinstance(outputs, Tensor) and outputs.is_floating_point() and outputs.ndim > 0
        right = right and not outputs.is_nested and (rows.is_cpu or rows.device == outputs.device)
        device = self.books.seals.device
        if not right or len(outputs) != len(rows) or outputs.device != device:
            raise ConfigError(
                operation, "outputs are not valid",
                expected=f"float [{len(rows)}, ...] on {device}",
                got=described(outputs, where=True),
                hint="pass logits, and the row of the step that each of them belongs to",
            )  # fmt: skip
        outputs = outputs[:, None] if outputs.ndim == 1 else outputs
        return outputs, rows.to(outputs.device)

    # -- rows and states that leave, and that come ---------------------------------------------

    def export(self, group: str, table: Tensor | Sequence[int], first: int, end: int) -> Tensor:
        """Return the checksums of rows that leave the engine, for ``import_rows``.

        A row that was sealed has the checksum of what was written, so a change since then is found
        when the row comes back.

        Args:
            group: the group of the rows; of a state, its group, with a table of its block alone.
            table: int ``[blocks]`` on the host, the block table.
            first: the first position; of a state, its length less one.
            end: the position after the last.

        Returns:
            int64 ``[num_layers, end - first]``, layers of the group in the scrub's order.

        Raises:
            ConfigError: the group has no layers here, or the table has no such rows.
        """
        place, where = self._rows("export", group, table, first, end)
        slots, seals = slots_at(place, where), self.books.seals[where]
        sealed = (seals != 0) & (seals == self._ledger.books.words[where])
        stored = torch.stack([layer.sums[slots] for layer in self.books.layers[place]])
        return torch.where(sealed, stored, self.passes.sums(place, slots))

    def import_rows(
        self,
        request: str,
        group: str,
        table: Tensor | Sequence[int],
        first: int,
        end: int,
        sums: Tensor | None = None,
    ) -> None:
        """Seal rows that were loaded for a request, and compare them with what was stored.

        Call it after ``Ledger.import_rows`` or ``Ledger.import_state``, with the loaded bytes in
        place. A row of other bytes is reported as ``imported``, with ``found`` "bytes". It loses
        its seal, so that no later read reports it again.

        Args:
            request: the request that gets the rows.
            group: as in ``export``.
            table: as in ``export``.
            first: as in ``export``.
            end: as in ``export``.
            sums: int64 ``[num_layers, end - first]``, the result of ``export`` for the rows that
                were brought; None: they are sealed and not compared.

        Raises:
            ConfigError: as in ``export``; or the request is not admitted; or ``sums`` have another
                dtype or shape: the rows are sealed by then.
        """
        place, where = self._rows("import_rows", group, table, first, end)
        line = self._ledger.line(request, operation="import_rows")
        slots = slots_at(place, where)
        self.passes.take(place, slots)
        if sums is None:
            return
        given = checks.ints("import_rows", "sums", sums, "[num_layers, n]")
        layers = self.books.layers[place]
        if given.dtype is not torch.int64 or given.shape != (len(layers), len(slots)):
            raise ConfigError(
                "import_rows", "sums are not those of the rows",
                expected=f"int64 [{len(layers)}, {len(slots)}]",
                got=described(given), hint="give what export returned for them",
            )  # fmt: skip
        now = torch.stack([layer.sums[slots] for layer in layers])
        lines = torch.full_like(slots, line)
        wrong = now != given.to(now.device)
        position = torch.arange(first, end, device=slots.device)
        self.passes.report(_IMPORTED, place, lines, position, where, wrong)

    def _rows(
        self, operation: str, group: str, table: Tensor | Sequence[int], first: int, end: int
    ) -> tuple[Place, Tensor]:
        """Return the place of the group that writes rows, and their indices in ``Books.words``.

        Raises:
            ConfigError: no such group, or none with layers here; or the table has no such rows.
        """
        books = self._ledger.books
        place = books.layout.places[checks.place_of(operation, books, group).written]
        if place not in self.books.layers:
            raise ConfigError(
                operation, f"group {group!r} has no layers here",
                expected=f"one of {[p.group.name for p in self.books.layers]}", got=repr(group),
                hint="give the layers of the group when the scrub is made",
            )  # fmt: skip
        return place, self._ledger.words_of(operation, place, table, first, end)
