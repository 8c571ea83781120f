"""``python -m tw_launch``."""

import sys

from tw_launch import main

if __name__ == "__main__":
    sys.exit(main())
