"""Engines that only pretend: of a known speed, and with the counters that a result needs."""

from __future__ import annotations

from collections import deque

import pytest
from kvtxn.benchmarks.engines import cell as vllm_cell
from kvtxn.benchmarks.engines import files as vllm_files
from kvtxn.benchmarks.engines import report as vllm_report
from kvtxn.benchmarks.engines.audits import Audited
from kvtxn.benchmarks.engines.child import Measured
from kvtxn.benchmarks.engines.load import Point
from kvtxn.benchmarks.engines.process import EngineSpec
from pages import narrow

POINT = Point(scenario="short", context=8, tokens=4, requests=2, acceptance=0.3)


def narrow_report(result) -> str:
    """The page of a result."""
    return narrow(vllm_report.report(result))


def narrow_speed(cells) -> str:
    """The table of speeds."""
    return narrow(vllm_report.speed(cells))


class Pretender:
    """An engine of known speed; remembers what it was given, and when."""

    def __init__(self, policy: str, speed: float, log: deque[str]) -> None:
        self.spec = EngineSpec(policy=policy, arguments={})
        self.speed, self.log, self.works, self.steps = speed, log, [], 0
        self.first_token = [0.5, 1.0]
        self.wrong = 0

    def run(self, work):
        self.log.append(self.spec.label)
        self.works.append(work)
        self.steps += 10
        drift = 1 + len(self.works)  # every round is slower than the one before
        return Measured(
            seconds=drift * 8 / self.speed,
            generated=8,
            drafted=12,
            accepted=5 if self.spec.policy != "undo" else 4,
            digest="same",
            first_token=self.first_token,
            per_token=[drift / self.speed, drift / self.speed],
        )

    def clock(self, work):
        self.run(work)
        return [{"steps": 7, "begin": 8.4, "commit": 5.6, "both": 14.2}]

    def announced(self):
        return None

    def memory(self):
        parts = {"slots": 80, "positions": 16, "checksums": 0, "constant": 4}
        return [{"taken": 100, "formula": 100, **parts}]

    def audited(self):
        """Two ranks that have read ten rows a step each, the second a wrong one from step 20 on."""
        if not self.spec.audited:
            return []
        wrong = [{"kind": "foreign", "request": "7", "slot": 33, "layer": None}] * self.wrong
        found = [wrong[:0], wrong if self.steps >= 20 else []]
        return [
            Audited(
                counters={
                    "kvtxn_audit_steps_total": self.steps,
                    "kvtxn_audit_rows_checked_total": 10 * self.steps,
                    "kvtxn_audit_violations_total": len(each),
                    "kvtxn_audit_violations_total_foreign": len(each),
                    "kvtxn_audit_violations_total_state": 0,
                },
                report=each,
            )
            for each in found
        ]

    def snapshot(self):
        if self.spec.policy == "stock":
            return []
        if self.spec.audited:
            return [{"kvtxn_active": 0.0, **each.counters} for each in self.audited()]
        return [
            {
                "kvtxn_active": 1.0,
                "kvtxn_windows_total": self.steps * 9,
                "kvtxn_bypassed_windows_total": self.steps,
                "kvtxn_bypassed_windows_total_resting": self.steps,
                "kvtxn_fallbacks_total": 0,
                "kvtxn_rows_staged_total": self.steps * 40,
                "kvtxn_rows_committed_total": self.steps * 10,
                "kvtxn_bytes_written_total": self.steps * 2**20,
                "kvtxn_bytes_avoided_total": self.steps * 2**21,
                "kvtxn_acceptance_rate": 0.25,
            }
        ]


@pytest.fixture
def log():
    return deque()


@pytest.fixture
def cell(log):
    engines = [Pretender(*each, log) for each in (("stock", 1.0), ("deferred", 0.5), ("undo", 1))]
    return vllm_cell.measure(engines, POINT, lambda turn: f"work {turn}", rounds=6)


@pytest.fixture
def result(cell):
    return {
        "format": vllm_files.FORMAT,
        "machine": {"processor": "abacus", "torch": "2", "commit": "0", "command": "kvtxn"},
        "settings": {
            **{"model": "tiny", "drafter": "ngram", "drafts": 4, "rounds": 6, "tokens": 4},
            **{"scenario": ["short"], "context": [8], "requests": [2], "acceptance": [0.3]},
        },
        "conditions": {
            "announced": {"stock": None, "deferred": "policy='deferred'"},
            "engines": 3,
            "processors": 2,
            "started": "today",
            "seconds": 9.0,
            "gpu": "1980 MHz, 50, 200 W",
            "environment": {"VLLM_THIS": "1"},
        },
        "cells": [cell],
    }
