"""How the programs of a soak tell what they do: lines of JSON behind a mark."""

import json
import sys
from typing import Any

from soak.ledger import MARK


def tell(event: str, **facts: Any) -> None:
    """Prints one line."""
    sys.stdout.write(f"{MARK}{json.dumps({'event': event, **facts})}\n")
    sys.stdout.flush()
