"""One claim in this process: ``python -m tests.gpu.one NAME DEVICE FILE`` writes its verdict to the file."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

from tests.gpu.claims import CLAIMS, Claim
from tests.gpu.modules import requirement_of
from tests.gpu.verdict import NotRun, Verdict

OWN = ("harness", "tests")


def verdict_of(claim: Claim, device: str) -> Verdict:
    """Return the verdict of a claim; an exception is a FAIL, a missing module a reason not to run."""
    module, _, name = claim.function.partition(":")
    try:
        import torch

        function = getattr(importlib.import_module(f"tests.gpu.{module}"), name)
        verdict = function(torch.device(device, 0) if device == "cuda" else torch.device(device), *claim.arguments)
    except NotRun as reason:
        return Verdict("not run", str(reason))
    except ModuleNotFoundError as error:
        top = (error.name or "").partition(".")[0]
        if top in OWN:
            raise
        return Verdict("not run", f"needs {requirement_of(top)}")
    except Exception as error:
        traceback.print_exc()
        return Verdict("FAIL", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    assert isinstance(verdict, Verdict)
    return verdict


def main(claim: Claim, device: str, file: Path) -> None:
    """Write the verdict, and leave without the interpreter's teardown, in which torch sometimes aborts."""
    file.write_text(json.dumps(asdict(verdict_of(claim, device))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(next(claim for claim in CLAIMS if claim.name == sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
