"""What the gates of a model do: entropy, weights and state of each site."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from normsmith.schedules import GateController, GateState
from normsmith.surgery.table import text_table


@dataclass(frozen=True)
class GateReport:
    """The gates of a model in the order of its modules; prints as a table.

    Entropies and thresholds ε_H are in nats, entropies running means over the site's samples or tokens; an equal mix of
    K candidates has ln K.
    """

    gates: tuple[GateState, ...]
    thresholds: tuple[float, ...]

    def __str__(self) -> str:
        rows = [
            (
                gate.site,
                f"{gate.entropy:.3f}" if _measured(gate) else "–",
                f"{threshold:.3f}",
                ", ".join(f"{name} {w:.2f}" for name, w in zip(gate.candidates, gate.weights, strict=True))
                if _measured(gate)
                else "–",
                chosen(gate) if _measured(gate) else "–",
                state(gate),
            )
            for gate, threshold in zip(self.gates, self.thresholds, strict=True)
        ]
        return text_table(("site", "entropy", "ε_H", "weights", "chosen", "state"), rows)

    def to_dict(self) -> dict[str, Any]:
        """The table as JSON values, for result files: a list of sites, each with its weights by candidate; what is not
        measured yet is None.
        """
        return {
            "sites": [
                {
                    "site": gate.site,
                    "entropy": gate.entropy if _measured(gate) else None,
                    "threshold": threshold,
                    "weights": dict(zip(gate.candidates, gate.weights, strict=True)) if _measured(gate) else None,
                    "chosen": chosen(gate) if _measured(gate) else None,
                    "state": state(gate),
                }
                for gate, threshold in zip(self.gates, self.thresholds, strict=True)
            ]
        }


def _measured(gate: GateState) -> bool:
    return not math.isnan(gate.entropy)


def chosen(gate: GateState) -> str:
    """The candidate with the largest mean weight."""
    return gate.candidates[max(range(len(gate.weights)), key=lambda k: gate.weights[k])]


def state(gate: GateState) -> str:
    """`training`, `frozen` (the selector's softmax) or `static` (fixed weights)."""
    return "static" if gate.static else "frozen" if gate.frozen else "training"


def gate_report(controller: GateController) -> GateReport:
    """The gates that a controller watches, as they are now; reading them waits for the device."""
    return GateReport(controller.gates(), tuple(controller.thresholds))
