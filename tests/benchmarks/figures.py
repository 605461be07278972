"""What every benchmark's file begins with: when and where its figures were measured."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def write_figures(path: Path, figures: Any) -> None:
    """Writes figures as JSON, with their date and machine."""
    import torch  # not with the module: it would count among the memory that is measured

    from harness.measure.environment import cpu_model

    machine = {"cpu": cpu_model(), "logical_cpus": os.cpu_count(), "torch": torch.__version__}
    result = {"date": time.strftime("%Y-%m-%d"), "machine": machine, "figures": figures}
    path.write_text(json.dumps(result, indent=1) + "\n")
