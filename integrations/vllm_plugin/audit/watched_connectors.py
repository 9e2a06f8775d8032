"""Mixins of KV connectors, which tell the audit of the blocks that they store and load."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...serving.ledger.transfers import TransferWatch
from ..seam import connectors
from ..seam.runner_protocols import ConnectorOutput


class WatchedConnector:
    """A mixin of a connector's worker half: each method tells the audit, then does its own work."""

    kvtxn_transfers: TransferWatch

    def bind_connector_metadata(self, connector_metadata: object) -> None:
        """Tell the audit which blocks the step will store and load; then bind the metadata."""
        watch = self.kvtxn_transfers
        watch.tell(partial(watch.begin, connector_metadata))
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]

    def wait_for_save(self) -> Any:
        """Tell the audit that the step's blocks are stored now; then let the connector finish."""
        self.kvtxn_transfers.tell(self.kvtxn_transfers.end)
        return super().wait_for_save()  # type: ignore[misc]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the connector's answer: requests whose rows were sent, and whose rows came.

        Either may be None for none. The audit is then told of those that came.
        """
        sent, received = super().get_finished(finished_req_ids)  # type: ignore[misc]
        watch = self.kvtxn_transfers
        watch.tell(partial(watch.received, received))
        return sent, received

    def get_transfer_results(self, finished_req_ids: set[str]) -> ConnectorOutput:
        """Return the connector's answer; tell the audit for which requests rows have come.

        Both runners call it since vLLM 0.32.
        """
        results: ConnectorOutput = super().get_transfer_results(  # type: ignore[misc]
            finished_req_ids
        )
        watch = self.kvtxn_transfers
        watch.tell(lambda: watch.received(connectors.came(results)))
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded, and tell the audit."""
        failed: set[int] = super().get_block_ids_with_load_errors()  # type: ignore[misc]
        self.kvtxn_transfers.tell(partial(self.kvtxn_transfers.failed, failed))
        return failed


class WatchedConnectorV1(WatchedConnector):
    """A mixin for the V1 runner, which hands blocks over before it changes anything."""

    def handle_preemptions(self, kv_connector_metadata: object) -> Any:
        """Tell the audit which blocks are stored at once, before other requests get them.

        Then the connector stores them.
        """
        watch = self.kvtxn_transfers
        watch.tell(partial(watch.flush, kv_connector_metadata))
        return super().handle_preemptions(kv_connector_metadata)  # type: ignore[misc]


class WatchedConnectorV2(WatchedConnector):
    """A mixin for the V2 runner, whose ``update_requests`` tells of blocks that others get."""
