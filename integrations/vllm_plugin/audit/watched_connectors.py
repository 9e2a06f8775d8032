"""Mixins of KV connectors, which tell the audit of the blocks that they store and load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ....audit import Ledger, RowGroup
from ...serving.ledger.shared_identities import SharedIdentities
from ...serving.ledger.transfers import TransferWatch
from ..internals import connectors
from ..internals.audited_states import block_sizes
from ..internals.hooks import mix_in
from ..internals.runner_protocols import ConnectorOutput
from ..seam.hooked_runner import HookedRunner


class WatchedConnector:
    """A mixin of a connector's worker half: each method tells the audit, then does its own work.

    Attributes:
        kvtxn_transfers: follows the connector's rows.
    """

    kvtxn_transfers: TransferWatch

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """Note the step's stores and loads."""
        watch = self.kvtxn_transfers
        watch.tell(partial(watch.begin, connector_metadata))
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]

    def wait_for_save(self) -> Any:
        """Note the blocks that are stored."""
        self.kvtxn_transfers.tell(self.kvtxn_transfers.end)
        return super().wait_for_save()  # type: ignore[misc]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Note the requests whose rows have come."""
        sent, received = super().get_finished(finished_req_ids)  # type: ignore[misc]
        watch = self.kvtxn_transfers
        watch.tell(partial(watch.received, received))
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Note the blocks that could not be loaded."""
        failed: set[int] = super().get_block_ids_with_load_errors()  # type: ignore[misc]
        self.kvtxn_transfers.tell(partial(self.kvtxn_transfers.failed, failed))
        return failed


class WatchedConnectorV1(WatchedConnector):
    """A mixin for the V1 runner, which hands blocks over before it changes anything."""

    def handle_preemptions(self, kv_connector_metadata: object) -> Any:
        """Note the blocks that are stored before others get them."""
        watch = self.kvtxn_transfers
        watch.tell(partial(watch.flush, kv_connector_metadata))
        return super().handle_preemptions(kv_connector_metadata)  # type: ignore[misc]


class WatchedConnectorV2(WatchedConnector):
    """A mixin for the V2 runner, whose ``update_requests`` tells of blocks that others get."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> ConnectorOutput:
        """Note the requests whose rows have come."""
        results: ConnectorOutput = super().get_transfer_results(  # type: ignore[misc]
            finished_req_ids
        )
        watch = self.kvtxn_transfers
        watch.tell(partial(watch.received, connectors.came(results)))
        return results


def watch_transfers(
    runner: HookedRunner,
    ledger: Ledger,
    groups: Mapping[str, RowGroup],
    stop: Callable[[Exception], None],
    mixin: type[WatchedConnector] = WatchedConnectorV1,
    shared: SharedIdentities | None = None,
) -> TransferWatch | None:
    """Follow the rows of an engine's KV connector until ``kvtxn_undo`` of its runner is closed.

    Args:
        runner: the worker's model runner.
        ledger: as for ``TransferWatch``.
        groups: as for ``TransferWatch``.
        stop: as for ``TransferWatch``.
        mixin: for the connector's class.
        shared: as for ``TransferWatch``.

    Returns:
        What follows them; None without a connector.
    """
    connector = connectors.connector()
    if connector is None:
        return None
    sizes = block_sizes(runner, [group.name for group in ledger.groups if group.is_state])
    read = partial(connectors.transfers, runner)
    hashes = partial(connectors.block_hashes, runner, ledger.books.key)
    watch = TransferWatch(ledger, groups, sizes, read, hashes, stop, shared)
    runner.kvtxn_undo.callback(mix_in(connector, mixin, kvtxn_transfers=watch))
    return watch
