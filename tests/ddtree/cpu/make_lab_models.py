"""make_lab_models.py OUT: the pair of ``make_models.py`` for lab hosts, where requests are long: 8192 tokens of context.

``OUT/tiny`` says ``t8``, ``t13`` and ``t21`` as its whole context has it. Its drafter ``OUT/tiny-dflash`` (block size 4) ranks
first a token that is never said and then those three: a chain (DFLASH) accepts 1 token a step, a tree (DDTREE) of 40 nodes
and 8 candidates 3 to 4.
"""

from __future__ import annotations

import sys
from pathlib import Path

import make_models

CONTEXT = 8192


def main() -> None:
    out = Path(sys.argv[1])
    make_models.CONFIG["max_position_embeddings"] = CONTEXT
    make_models.pair(out, "tiny", make_models.SPOKEN, (make_models.NEVER[0], *make_models.SPOKEN))
    (out / "tiny-draft").rename(out / "tiny-dflash")


if __name__ == "__main__":
    main()
