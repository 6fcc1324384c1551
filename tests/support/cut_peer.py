"""`atoll WORDS` on a rank whose model fits on no device: the ranks cut it."""

import json
import sys

from atoll.peer.cli.main import main
from atoll.peer.training import ranks

if __name__ == "__main__":
    ranks.FIT_SHARE = 0.0
    cut_over_ranks = ranks.cut_over_ranks

    def noted(*given):
        sys.stdout.write(json.dumps({"kind": "test", "text": "cut"}) + "\n")  # at once: one line
        sys.stdout.flush()
        return cut_over_ranks(*given)

    ranks.cut_over_ranks = noted
    sys.exit(main(sys.argv[1:]))
