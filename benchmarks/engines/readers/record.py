"""How a reader tells the driver what it found: one JSON object a line, appended to a file as soon as it is known.

A reader runs in the engine's own environment, so it imports this file, the standard library and its engine. What was
written stays when the engine then crashes, hangs or is stopped at the time limit.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Tell = Callable[..., None]


def run_reader(read: Callable[[Path, dict[str, Any], Tell], None]) -> None:
    """The command `READER CHECKPOINT REQUEST OUT`; what `read` raises becomes the line {"error": ...}.

    REQUEST is a JSON file: {"prompt", "new_tokens", "windows": held-out tokens, lists of ids}.
    """
    checkpoint, request, out = map(Path, sys.argv[1:4])

    def tell(**found: Any) -> None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")

    try:
        read(checkpoint, json.loads(request.read_text(encoding="utf-8")), tell)
    except BaseException as error:
        traceback.print_exc()
        tell(error=f"{type(error).__name__}: {error}".strip())
        sys.exit(1)
