"""``python -m tw_syncrep.launch``."""

import sys

from tw_syncrep.launch import main

if __name__ == "__main__":
    sys.exit(main())
